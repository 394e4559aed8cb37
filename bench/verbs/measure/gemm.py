"""Measure the rate of one rank's matrix products, by size and dtype."""

import argparse

import numpy as np

from bench.command_line import measuring, options
from bench.command_line.publish import publisher
from bench.experiments.products.gemm import measure_gemm, thread_counts
from mm3d.console import say

ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure gemm``."""
    measuring.add_measurement(parser, 7, 1.0)
    parser.add_argument("--sizes", type=options.numbers, default=[2 ** k for k in range(6, 13)],
                        metavar="N,...",
                        help="sizes of the square matrices (default 64,128,...,4096)")
    parser.add_argument("--dtypes", type=options.some_of("float32", "float64"), metavar="NAMES",
                        default=["float32", "float64"],
                        help="dtypes of the matrices (default float32,float64)")
    parser.add_argument("--threads", type=options.numbers, metavar="N,...",
                        help="numbers of BLAS threads (default: 1 and the number of cores)")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure on one rank and write the record; return the exit status."""
    backend = measuring.one_rank_backend("measure gemm", arguments.backend, comm)
    limits, threads = measuring.limits_of(arguments), thread_counts(arguments.threads)
    measuring.check_memory(3 * max(arguments.sizes) ** 2 * max(
        np.dtype(name).itemsize for name in arguments.dtypes), arguments.backend, comm)
    return publisher(arguments, comm)("gemm", lambda: measure_gemm(
        arguments.sizes, arguments.dtypes, threads, backend, limits, arguments.seed, say))
