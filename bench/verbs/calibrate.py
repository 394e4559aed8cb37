"""Measure this machine, with as many ranks as mpirun starts, and write its model."""

import argparse

from bench import calibrate
from bench.verbs import options

GROUP = "Plan and predict"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``calibrate``."""
    parser.add_argument("--out", required=True, metavar="FILE",
                        help="the machine's model, a .toml file for --machine")
    options.add_stall(parser)


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write; the exit status."""
    return calibrate.calibrate(arguments, comm)
