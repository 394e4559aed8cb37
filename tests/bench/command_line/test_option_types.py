"""Options are made from the fields of a configuration; those that are numbers have bounds."""
import argparse
import contextlib
from dataclasses import replace
from fractions import Fraction
from numbers import Number

import pytest

from bench.__main__ import parser
from bench.cases.paper import load_tables
from bench.command_line import config_options
from bench.command_line.measuring import limits_of
from bench.command_line.options import fraction, fractions, number, whole
from bench.errors import UsageError
from bench.experiments.training.plan import Plan
from jobs.__main__ import parser as jobs_parser
from mm3d.config import Division, Model
from refused import parsers_of

HUGE = "9" * 400
BAD = ("nan", "inf", "-inf", "1e400", "-1", HUGE, "", "abc", f"{HUGE}/7")


def numeric(action: argparse.Action) -> bool:
    """Whether an option is one number, or several."""
    for text in ("3", "3,3,3"):
        with contextlib.suppress(Exception):
            found = action.type(text)
            found = found if isinstance(found, (list, tuple)) else [found]
            return all(isinstance(one, Number) for one in found)
    return False


OPTIONS = [(words, action) for top in (parser(), jobs_parser()) for words, one in parsers_of(top)
           for action in one._actions if action.type and not action.choices and numeric(action)]


def test_there_are_such_options():
    assert len(OPTIONS) > 100


@pytest.mark.parametrize("text", BAD, ids=lambda text: text[:8])
def test_none_takes_what_is_no_number_or_too_large(text):
    taken = []
    for words, action in OPTIONS:
        try:
            action.type(text)
        except argparse.ArgumentTypeError as error:
            assert len(str(error)) < 200 and "would do" in str(error), (words, action.dest, error)
        else:
            taken.append((words, action.dest))
    assert not taken


@pytest.mark.parametrize("kind, text, found", [
    (whole(1), "1", 1), (whole(0), "0", 0), (whole(0), "1000000000", 10 ** 9),
    (whole(0, 5), "5", 5), (number(), "0", 0), (number(above=True), "1e-9", 1e-9),
    (fraction, "0", 0), (fraction, ".5", Fraction(1, 2)), (fraction, "4/3", Fraction(4, 3)),
    (fraction, "1e3", 1000), (fraction, "1.3", Fraction(13, 10)),
    (fractions, "1,0.5,4/3", (1, Fraction(1, 2), Fraction(4, 3)))])
def test_what_is_taken(kind, text, found):
    assert kind(text) == found


@pytest.mark.parametrize("kind, text, said", [
    (whole(1), "0", "'0': a whole number of at least 1 would do"),
    (whole(1), "1.0", "'1.0': a whole number of at least 1 would do"),
    (whole(1), "1000000001", "a whole number of at most 1000000000 would do"),
    (number(above=True), "0", "'0': a number greater than 0 would do"),
    (number(most=10), "11", "a number of at most 10 would do"),
    (fraction, "1/0", "'1/0': a number of at least 0 would do, such as 1.3"),
    (fraction, "1e-12", "'1e-12': 0, or a number from 1e-09 to 1e+09 would do"),
    (fraction, "1e99", "0, or a number from"), (fraction, "1e9999999999", "at least 0"),
    (fractions, "1,1", "'1,1': numbers F,B,W would do")])
def test_what_is_refused(kind, text, said):
    with pytest.raises(argparse.ArgumentTypeError) as caught:
        kind(text)
    assert said in str(caught.value)


@pytest.mark.parametrize("words, least, most", [
    ([], (7, 2), (30, 20)), (["--max-repetitions=1"], (1, 1), (1, 1)),
    (["--max-repetitions=9"], (7, 2), (9, 9)), (["--repetitions=40"], (40, 40), (40, 40))])
def test_one_limit_of_repetitions_alone_moves_the_default_of_the_other(words, least, most):
    """Those of a microbenchmark, and of the rows of a preset."""
    found = [limits_of(parser().parse_args([*verb.split(), *words]), defaults)
             for verb, defaults in (("measure gemm", None),
                                    ("run --preset tiny", load_tables().presets["tiny"]))]
    assert tuple(one.repetitions for one in found) == least
    assert tuple(one.max_repetitions for one in found) == most
    with pytest.raises(UsageError, match="must be at least the 5 that are asked for"):
        limits_of(parser().parse_args(
            ["measure", "gemm", "--repetitions=5", "--max-repetitions=2"]))


# --- from fields ----------------------------------------------------------------------

def parse(words: str, *added):
    parser = argparse.ArgumentParser(exit_on_error=False)
    for kind, names, *more in added:
        config_options.add_fields(parser, kind, names, *more)
    return parser, parser.parse_args(words.split())


def test_what_is_given_is_read_and_the_rest_has_defaults():
    _, found = parse("--data 4 --zero 3 --grid 2x1x1 --recompute full", (
        Division, config_options.MESH))
    assert config_options.read(Division, found) == Division(4, zero=3, grid=(2, 1, 1),
                                                            recompute="full")
    sizes = {"layers": 1, "hidden": 8, "heads": 2, "batch": 4, "seq": 6}
    _, found = parse("--heads 4", (Model, sizes, sizes))
    assert config_options.read(Model, found, vocab=7) == Model(1, 8, 4, 4, 6, vocab=7)


@pytest.mark.parametrize("words, said", [
    ("--data 0", "at least 1"), ("--zero 4", "invalid choice"), ("--grid 2y2", "such as 2x2x2"),
    ("--recompute all", "full"), ("--lr x", "a number"), ("--lr-warmup -1", "at least 0"),
    ("--optimizer adam", "invalid choice")])
def test_what_cannot_be_read_is_refused(words, said):
    with pytest.raises(argparse.ArgumentError, match=said):
        parse(words, (Division, config_options.MESH), (Plan, ("lr", "warmup", "optimizer")))


def test_the_help_says_what_a_field_is_and_its_default():
    parser, found = parse("", (Division, ["shards", "stages"]),
                          (Plan, ["lr", "tied"], config_options.told(Plan, ["lr"], lr="so much")),
                          (Division, ["grid"], {"grid": (2, 1)}, "{}, or auto"))
    text = " ".join(parser.format_help().split())
    assert "by zero, the others having copies of their own (default all)" in text
    assert "stages of the pipeline in each replica (default 1)" in text
    assert "peak of the learning rate (default so much)" in text and found.lr is None
    assert "such as 2x2x2, or auto (default 2x1)" in text and found.grid == (2, 1)
    assert "--untied give the head a matrix of its own" in text and found.untied is False


def test_what_is_not_given_is_as_of_a_configuration_that_is_there():
    start = Plan(1, 8, 4, 4, 6, lr=0.5, warmup=3, dtype="float64")
    names = ("lr", "warmup", "dtype", "tied", "dropout")
    _, found = parse("--lr-warmup 5 --untied --dropout 0", (
        Plan, names, config_options.told(Plan, names)))
    assert config_options.read(start, found) == replace(start, warmup=5, tied=False)
    assert config_options.given(Plan, found) == {"warmup": 5, "tied": False, "dropout": 0}
