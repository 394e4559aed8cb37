"""Measure the 3-D product beside ScaLAPACK's, which must be installed, under mpirun; print it."""

import argparse

from bench import scalapack
from bench.verbs import options

GROUP = "Measure the parts alone"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``scalapack``."""
    options.add_repetitions(parser, 7, 30.0)
    options.add_shape(parser)
    options.add_grid(parser)
    options.add_dtype(parser)
    parser.add_argument("--block", type=options.numbers, default=[64, 128, 256], metavar="N,...",
                        help="rows and columns of ScaLAPACK's blocks (default 64,128,256)")
    parser.add_argument("--calls", type=options.whole(1), default=5, metavar="N",
                        help="in a sample (default 5)")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and print; the exit status."""
    return scalapack.scalapack(arguments, comm)
