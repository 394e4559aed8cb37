"""Measure one GPU: products, elementwise kernels, one layer, and a rank's part of each row."""

import argparse

from bench import gpu
from bench.gpucases import PARTS
from bench.verbs import options

GROUP = "Measure the parts alone"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``gpu``."""
    options.add_measurement(parser, 10, 5.0)
    parser.add_argument("--part", type=options.some_of(*PARTS), default=list(PARTS),
                        metavar="NAMES", help=f"of {', '.join(PARTS)} (default: all)")
    parser.add_argument("--graph", action="store_true", help=(
        "measure the layer also as a CUDA graph, all of a step launched at once"))
    parser.add_argument("--scale", default="paper", choices=("paper", "tiny"),
                        help="full size, or a rehearsal (default paper)")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write; the exit status."""
    return gpu.gpu(arguments, comm)
