"""Measure all selected rows, starting mpirun for each rank count; print tables, draw figures.

It goes on where an earlier one was stopped.
"""

import argparse

from bench import reproduce
from bench.verbs import options, row_options

GROUP = "Measure the paper's tables"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``reproduce``."""
    row_options.add_rows(parser)
    parser.add_argument("--ranks", type=options.numbers, metavar="P,...", help=(
        "only rows of so many ranks; for schemes that the paper lacks, any number (default: all)"))
    parser.add_argument("--fresh", action="store_true", help=(
        "measure every row anew, also those that an earlier one, which was stopped, has finished"))


def run(arguments: argparse.Namespace) -> int:
    """Measure, print and draw; the exit status."""
    return reproduce.reproduce(arguments)
