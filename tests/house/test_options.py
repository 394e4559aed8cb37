"""The words of the command lines: few verbs, and options that mean the same wherever they are."""
import functools
import re

from bench.__main__ import parser as bench
from jobs.__main__ import parser as jobs
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
