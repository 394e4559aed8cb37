"""Options are made from the fields of a configuration, and read into one again."""
import argparse

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
    ("--recompute all", "full"), ("--lr x", "a number"), ("--warmup -1", "at least 0"),
    ("--optimizer adam", "invalid choice")])
def test_what_cannot_be_read_is_refused(words, said):
    with pytest.raises(argparse.ArgumentError, match=said):
        parse(words, (Division, config_options.MESH), (Plan, ("lr", "warmup", "optimizer")))


def test_the_help_says_what_a_field_is_and_its_default():
    parser, found = parse("", (Division, ["shards", "stages"]),
                          (Plan, ["lr"], {"lr": None}, lambda name: f"default of {name}"))
    text = " ".join(parser.format_help().split())
    assert "by zero, the others having copies of their own (default all)" in text
    assert "stages of the pipeline in each replica (default 1)" in text
    assert "peak of the learning rate (default of lr)" in text and found.lr is None
