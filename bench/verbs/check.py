"""Measure every scheme and grid beside the model's predictions, alone or under mpirun."""

import argparse

from bench import check
from bench.verbs import options

GROUP = "Plan and predict"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``check``."""
    parser.add_argument("--machine", required=True, metavar="FILE",
                        help="what calibrate wrote with as many ranks")
    parser.add_argument("--matmul", type=options.shape, action="append", metavar="M,N,K",
                        help="C is M x K, the sum has N terms; may be repeated")
    parser.add_argument("--layer", type=options.sizes("HIDDEN,HEADS,BATCH,SEQ"), action="append",
                        metavar="HIDDEN,HEADS,BATCH,SEQ", help="may be repeated")
    parser.add_argument("--layers", type=int, default=1, metavar="N", help="of each (default 1)")
    parser.add_argument("--rounds", type=int, default=20, metavar="N",
                        help="over all, whose median counts (default 20)")
    options.add_dtype(parser)
    parser.add_argument("--seed", type=options.whole(0), default=0, metavar="N",
                        help="of numbers and order (default 0)")
    parser.add_argument("--out", metavar="DIR",
                        help="where the .h5 file goes (default results/<machine>)")
    options.add_stall(parser)


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write; the exit status."""
    return check.check(arguments, comm)
