"""Measure distributed products beside one process with all cores, under mpirun."""

import argparse

from bench import matmul
from bench.products import schemes
from bench.verbs import options
from mm3d.matrix_product import FORMS

GROUP = "Measure the parts alone"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``matmul``."""
    options.add_measurement(parser, 7, 30.0)
    options.add_shape(parser)
    options.add_grid(parser)
    parser.add_argument("--scheme", default="3d", choices=schemes(), help="(default 3d)")
    parser.add_argument("--form", type=options.some_of(*FORMS), default=["ab"], metavar="NAMES",
                        help="of C = AB, AB^T, A^T B: ab, abt, atb, with commas (default ab)")
    options.add_dtype(parser)
    parser.add_argument("--trace", metavar="FILE", help=(
        "write a traced call of each product for chrome://tracing and ui.perfetto.dev; with "
        "several products each has its name in the file's"))
    parser.add_argument("--calls", type=options.whole(1), metavar="N",
                        help="in a sample (default: as many as take one process 100 ms)")
    parser.add_argument("--backward", action="store_true", help="measure dA and dB too")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write; the exit status."""
    return matmul.matmul(arguments, comm)
