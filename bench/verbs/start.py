"""Measure what many ranks cost: starting them, their grid, a tiny step."""

import argparse

from bench import start
from bench.verbs import options

GROUP = "This machine"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``start``."""
    parser.add_argument("--ranks", type=options.numbers, default=[8, 27, 64], metavar="N,...",
                        help="cubes (default 8,27,64)")


def run(arguments: argparse.Namespace) -> int:
    """Measure and print; the exit status."""
    return start.start(arguments)
