"""Compare two sides of runs, case by case; say what differs from three runs a side on."""

import argparse

from bench.command_line import options
from bench.errors import UsageError
from bench.records.run_file import report_left_out
from bench.reports.comparison import compare_sides
from mm3d.console import complain

GROUP = "Look at results"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``compare``."""
    parser.add_argument("sides", nargs="*", metavar="A B", help=(
        "folders of .h5 files, or files: all runs of a case in a folder are runs of that side"))
    for name, side in (("before", "A"), ("after", "B")):
        parser.add_argument(f"--{name}", nargs="+", metavar="RUN", help=(
            f"the files or folders of side {side}, instead of A B"))
    parser.add_argument("--fail-on-regression", type=options.number(), metavar="PERCENT", help=(
        "exit with 1 when B is slower in a case by more than this, and the test says so too, or "
        "lacks a case of A; takes three runs a side"))


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; 1 when B fails ``--fail-on-regression`` or a file was left out."""
    limit = arguments.fail_on_regression
    sides = chosen(arguments)
    parts, failures, problems = compare_sides(*sides, limit)
    names = [f"{side}: {' '.join(words)}" for side, words in zip("AB", sides)]
    arguments.show([*names, *parts])
    if failures:
        complain(*failures)
    return report_left_out(problems) or int(bool(failures))


def chosen(arguments: argparse.Namespace) -> tuple[list[str], list[str]]:
    """Return the files of both sides; UsageError unless they are two, named in one way."""
    plain, named = arguments.sides, (arguments.before, arguments.after)
    if len(plain) == 2 and named == (None, None):
        return plain[:1], plain[1:]
    if not plain and None not in named:
        return named
    raise UsageError("compare A B sets two files or folders side by side; for several of a side, "
                     "name them all after --before and after --after")
