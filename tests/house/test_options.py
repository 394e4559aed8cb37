"""The words of the command lines: few verbs, and options that mean the same wherever they are."""
import functools
import re

from bench.__main__ import parser as bench
from jobs.__main__ import parser as jobs
from refused import has_verbs, parsers_of

# Options of one name and several helps: one meaning, of which these say what is particular.
PARTICULAR = {
    **dict.fromkeys(("--data", "--zero", "--shards", "--stages", "--schedule", "--microbatches",
                     "--context", "--context-way"),
                    "of a mesh that is run, or that is predicted"),
    **dict.fromkeys(("--grid", "--hidden", "--ranks", "--scheme", "--inside"),
                    "one, or several that are measured or chosen from"),
    **dict.fromkeys(("--seed", "--stop-file"),
                    "of steps of a row or a training, or of other measurements"),
    **dict.fromkeys(("--form", "--shape", "--backward"), "of products measured, or shown once"),
    **dict.fromkeys(("--dtype", "--backend"), "some verbs have fewer choices or a use"),
    **dict.fromkeys(("--out", "--trace", "--torch", "--overlap", "--machine", "--beside", "--work",
                     "--times", "--experts", "--steps", "--vocab"),
                    "what is done with it differs")}


@functools.cache
def options() -> dict[str, set[tuple]]:
    """Types, metavars and helps without defaults that each option has in some command."""
    found: dict[str, set[tuple]] = {}
    for program in (bench, jobs):
        for _, parser in parsers_of(program()):
            for action in [] if has_verbs(parser) else parser._actions:
                text = re.sub(r"\s*\(default.*", "", action.help or "")
                kind = getattr(action.type, "__qualname__", ""), action.metavar, action.nargs, text
                for option in action.option_strings:
                    found.setdefault(option, set()).add(kind)
    return found


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
