"""The words of the command lines: few verbs, and options that mean the same wherever they are."""
import argparse
import functools
import re

from bench.__main__ import parser as bench
from jobs.__main__ import parser as jobs

MOST = 16
# Options of one name and several helps: one meaning, of which these say what is particular.
PARTICULAR = {
    **dict.fromkeys(("--data", "--zero", "--shards", "--stages", "--schedule", "--microbatches",
                     "--context", "--context-way"),
                    "of a mesh that is run, or that is predicted"),
    **dict.fromkeys(("--grid", "--hidden", "--ranks", "--scheme", "--inside"),
                    "one, or several that are measured or chosen from"),
    **dict.fromkeys(("--repetitions", "--max-repetitions", "--max-seconds", "--width", "--seed",
                     "--stop-file"), "of steps of a row or a training, or of other measurements"),
    **dict.fromkeys(("--form", "--shape", "--backward"), "of products measured, or shown once"),
    **dict.fromkeys(("--dtype", "--backend"), "some verbs have fewer choices or a use"),
    **dict.fromkeys(("--out", "--trace", "--torch", "--overlap", "--machine", "--beside", "--work",
                     "--times", "--experts", "--steps", "--vocab"),
                    "what is done with it differs")}


def leaves(parser: argparse.ArgumentParser, name: str):
    """The parsers that have options, each with its words."""
    below = [action for action in parser._actions
             if isinstance(action, argparse._SubParsersAction)]
    if not below:
        yield name, parser
    for action in below:
        for word, one in action.choices.items():
            yield from leaves(one, f"{name} {word}")


@functools.cache
def options() -> dict[str, dict[tuple, list[str]]]:
    """The commands that have each option, by its type, metavar and help without defaults."""
    found: dict[str, dict[tuple, list[str]]] = {}
    for program in (bench, jobs):
        for name, parser in leaves(program(), program.__module__):
            for action in parser._actions:
                text = re.sub(r"\s*\(default.*", "", action.help or "")
                kind = getattr(action.type, "__qualname__", ""), action.metavar, action.nargs, text
                for option in action.option_strings:
                    found.setdefault(option, {}).setdefault(kind, []).append(name)
    return found


def test_there_are_few_verbs():
    below = next(action for action in bench()._actions
                 if isinstance(action, argparse._SubParsersAction))
    assert len(below.choices) <= MOST


def test_an_option_means_the_same_wherever_it_is():
    several = {option for option, kinds in options().items() if len(kinds) > 1}
    assert len(options()) > 100 and several == PARTICULAR.keys(), several ^ PARTICULAR.keys()


def test_verbs_that_print_tables_have_a_format():
    without = {name.partition(" ")[2] for name, one in leaves(bench(), "bench")
               if "--format" not in one._option_string_actions}
    assert without == {"cluster", "merge", "validate"}


def test_files_that_are_written_and_sizes_of_the_job_have_one_name():
    found = options()
    assert {kind[1] for kind in found["--out"]} == {"DIR", "FILE"}
    assert all("of all replicas" in kind[3] for kind in found["--batch"])
