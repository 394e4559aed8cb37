"""Measure latency and bandwidth of each collective along each direction, under mpirun."""

import argparse

from bench import micro
from bench.verbs import options

GROUP = "Measure the parts alone"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``collectives``."""
    options.add_measurement(parser, 7, 1.0)
    options.add_grid(parser)
    parser.add_argument("--least", type=int, default=1024, metavar="BYTES",
                        help="the smallest array (default 1024); each is 4 times the last")
    parser.add_argument("--most", type=int, default=4 * 2 ** 20, metavar="BYTES",
                        help="the largest array (default 4 MiB)")
    options.add_dtype(parser)
    options.add_machine_file(parser, "the cost of each collective, and of the links")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write; the exit status."""
    return micro.collectives(arguments, comm)
