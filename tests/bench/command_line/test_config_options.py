"""Options are made from the fields of a configuration, and read into one again."""
import argparse
from dataclasses import replace

import pytest

from bench.command_line import config_options
from bench.experiments.training.plan import Plan
from mm3d.config import Division, Model


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
