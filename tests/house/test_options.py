"""The words of the command lines: few verbs, and options that mean the same wherever they are."""
import argparse
import functools
import re
from dataclasses import MISSING, fields

import pytest

from bench.__main__ import parser as bench
from bench.cases.variants import Variant, schemes_with_option
from bench.command_line.config_options import option_of
from bench.experiments.training.plan import Plan
from bench.experiments.training.trainer import Course
from bench.instruments.timing import Limits
from jobs.__main__ import parser as jobs
from mm3d.config import Division, Model
from mm3d.model.experts.options import ExpertDesign, ExpertOptions
from refused import has_verbs, parsers_of

# Options of one name and several helps: one meaning, of which these say what is particular.
PARTICULAR = {
    **dict.fromkeys(("--data", "--zero", "--shards", "--context", "--context-way"),
                    "of a mesh that is run, or that is predicted"),
    **dict.fromkeys(("--stages", "--schedule", "--microbatches"),
                    "of a pipeline that is run, predicted or drawn, or of several measured ones"),
    **dict.fromkeys(("--grid", "--hidden", "--scheme", "--inside"),
                    "one, or several that are measured or chosen from"),
    "--ranks": "those of the job, or of the rows that are chosen by them",
    "--seed": "of what is drawn: parameters, input, matrices, dropout, the order of measurements",
    "--stop-file": "what ends when it exists, a row or a training",
    **dict.fromkeys(("--form", "--shape", "--backward"), "of products measured, or shown once"),
    "--dtype": "which types the verb has", "--backend": "used, or only tried by doctor",
    "--out": "the folder of all results, or the one file that the verb makes",
    "--trace": "whose steps are written",
    "--torch": "what PyTorch computes beside it",
    "--overlap": "whether it is run, measured besides, never, or counted dry",
    "--machine": "what is predicted or waited for by this model",
    "--beside": "what is set beside: ScaLAPACK's product, or schedules by name",
    "--work": "of rows, or of the actions of a pipeline",
    "--times": "in units of --unit where ranks wait for them, else in any",
    "--experts": "of the layer that is measured, or of layers of a model",
    "--steps": "how many a training has, or the file of those that others measured",
    "--vocab": "tokens of a model that has them anyway, or that turn layers into a GPT"}


# Classes whose fields say what they are, so that options can be made of them.
CONFIGURATIONS = Model, Plan, Division, ExpertOptions, ExpertDesign, Variant, Course, Limits
# Options that have the name of such a field and are not made of it, and their commands.
OTHERS = {
    # of rows: several, or a group of them such as paper
    "--scheme": ["reproduce", "run", "render", "submit", "status", "collect"],
    "--steps": ["predict"],    # a file of them, not their number
    "--stop-file": ["run"],    # which does not load what trains
    # to draw a schedule no model is loaded
    **dict.fromkeys(("--schedule", "--stages", "--microbatches"), ["draw schedule"])}


@functools.cache
def commands() -> list[tuple[str, argparse.ArgumentParser]]:
    """Each command that has options, in words, and its parser."""
    return [(" ".join(words), parser) for program in (bench, jobs)
            for words, parser in parsers_of(program()) if not has_verbs(parser)]


@functools.cache
def options() -> dict[str, set[tuple]]:
    """Types, metavars and helps without defaults that each option has in some command."""
    found: dict[str, set[tuple]] = {}
    for _, parser in commands():
        for action in parser._actions:
            text = re.sub(r"\s*\(default.*", "", action.help or "")
            kind = getattr(action.type, "__qualname__", ""), action.metavar, action.nargs, text
            for option in action.option_strings:
                found.setdefault(option, set()).add(kind)
    return found


def not_made_of_fields(
        parsers: list[tuple[str, argparse.ArgumentParser]]) -> dict[str, list[str]]:
    """Options that have the name of a field and that `add_fields` has not made, with commands."""
    named = {f"--{option_of(one).replace('_', '-')}" for kind in CONFIGURATIONS
             for one in fields(kind)}
    found: dict[str, list[str]] = {}
    for command, parser in parsers:
        for action in parser._actions:
            for option in named & {*action.option_strings}:
                if not hasattr(action, "field"):
                    found.setdefault(option, []).append(command)
    return found


def test_options_are_made_of_the_fields_of_configurations():
    assert not_made_of_fields(commands()) == OTHERS
    by_hand = argparse.ArgumentParser()
    by_hand.add_argument("--expert-top", type=int)
    assert not_made_of_fields([("verb", by_hand)]) == {"--expert-top": ["verb"]}


def test_no_option_of_experts_says_a_field_of_the_model():
    """One line of words is read as both: `--z-loss` is the router's, not the head's."""
    model, experts = ({option_of(one) for one in fields(kind)} - {""}
                      for kind in (Plan, ExpertOptions))
    assert not model & experts


@pytest.mark.parametrize("kind", CONFIGURATIONS)
def test_each_field_of_a_configuration_says_what_it_is(kind):
    for one in fields(kind):
        assert one.metadata["about"].strip(". ") == one.metadata["about"], one.name
        assert one.default is not MISSING or one.metadata["least"] == 1, one.name


def test_a_variant_keeps_what_schemes_can_keep():
    """Choices are stated, so that what reads records need not load schemes."""
    choices = {word for one in schemes_with_option("keep").values() for word in one.choices}
    assert choices == {*Variant.__dataclass_fields__["keep"].metadata["choices"]}


def test_an_option_means_the_same_wherever_it_is():
    several = {option for option, kinds in options().items() if len(kinds) > 1}
    assert len(options()) > 100 and several == PARTICULAR.keys(), several ^ PARTICULAR.keys()


def test_verbs_that_print_tables_have_a_format():
    without = {words for words, one in parsers_of(bench())
               if not has_verbs(one) and "--format" not in one._option_string_actions}
    assert without == {("cluster",), ("merge",), ("validate",)}


def test_files_that_are_written_and_sizes_of_the_job_have_one_name():
    found = options()
    assert {kind[1] for kind in found["--out"]} == {"DIR", "FILE"}
    assert all("of all replicas" in kind[3] for kind in found["--batch"])
