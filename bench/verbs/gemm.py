"""Measure the rate of one rank's matrix products, by size and dtype."""

import argparse

from bench import micro
from bench.verbs import options

GROUP = "Measure the parts alone"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``gemm``."""
    options.add_measurement(parser, 7, 1.0)
    parser.add_argument("--sizes", type=options.numbers, default=[2 ** k for k in range(6, 13)],
                        metavar="N,...", help="of square matrices (default 64, 128, ... 4096)")
    parser.add_argument("--dtypes", type=options.some_of("float32", "float64"), metavar="NAMES",
                        default=["float32", "float64"], help="(default float32,float64)")
    parser.add_argument("--threads", type=options.numbers, metavar="N,...",
                        help="of BLAS (default: 1 and as many as there are cores)")
    options.add_machine_file(parser, "the rate of products, with the fewest threads")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write; the exit status."""
    return micro.gemm(arguments, comm)
