"""Rank every scheme and grid by predicted time, with words and memory."""

import argparse

from bench import plan
from bench.verbs import options

GROUP = "Plan and predict"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan``."""
    options.add_model(parser)
    options.add_machine(parser)
    parser.add_argument("--top", type=int, default=12, metavar="N",
                        help="how many to print (default 12)")
    options.add_recompute(parser)
    options.add_pictures(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plans; the exit status."""
    return plan.run(arguments)
