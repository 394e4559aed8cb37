"""Predict the paper's tables by a machine model fitted on some of their rows."""

import argparse

from bench import predict
from bench.verbs import options

GROUP = "Plan and predict"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``predict``."""
    options.add_machine(parser)
    parser.add_argument("--results", metavar="DIR",
                        help="instead of fitting, set predictions beside what was measured")
    parser.add_argument("--table", metavar="NAMES", help="weak, strong or all (default)")
    options.add_pictures(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the predictions; the exit status."""
    return predict.run(arguments)
