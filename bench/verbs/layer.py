"""Measure one Transformer layer beside one process' PyTorch, under mpirun."""

import argparse

from bench import layer
from bench.verbs import options

GROUP = "Measure the parts alone"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``layer``."""
    options.add_measurement(parser, 7, 60.0)
    parser.add_argument("--hidden", type=options.numbers, default=[512, 1024, 2048],
                        metavar="N,...", help="(default 512,1024,2048)")
    parser.add_argument("--head", type=int, default=64, metavar="N",
                        help="features of a head (default 64)")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="(default 8)")
    parser.add_argument("--seq", type=int, default=512, metavar="N", help="(default 512)")
    options.add_dtype(parser)
    parser.add_argument("--scheme", default="3d", metavar="NAME", help="(default 3d)")
    options.add_grid(parser)
    parser.add_argument("--torch", metavar="PYTHON", help=(
        "an interpreter that has PyTorch, which the layer is then verified with and measured "
        "beside (default: verified with the serial scheme, measured alone)"))
    parser.add_argument("--overlap", action="store_true", help=(
        "measure it also with communication that goes on while ranks multiply"))


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write; the exit status."""
    return layer.layer(arguments, comm)
