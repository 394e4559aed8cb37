"""Compare two sides of runs, case by case; say what differs from three runs a side on."""

import argparse

from bench import compare
from bench.verbs import options

GROUP = "Look at results"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``compare``."""
    parser.add_argument("sides", nargs="*", metavar="A B", help=(
        "folders of .h5 files, or files: all runs of a case in a folder are runs of that side"))
    for name, side in (("before", "A"), ("after", "B")):
        parser.add_argument(f"--{name}", nargs="+", metavar="RUN", help=(
            f"the files or folders of side {side}, instead of A B"))
    parser.add_argument("--fail-on-regression", type=float, metavar="PERCENT", help=(
        "exit with 1 when B is slower in a case by more than this, and the test says so too; "
        "takes three runs a side"))
    options.add_format(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison; the exit status."""
    return compare.compare(arguments)
