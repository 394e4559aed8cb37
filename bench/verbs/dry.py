"""Say what a rank would do on any number of ranks: products, collectives, memory."""

import argparse

from bench import dry
from bench.verbs import options

GROUP = "Plan and predict"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``dry``."""
    options.add_model(parser)
    parser.add_argument("--scheme", default="3d", help="the parallelism (default 3d)")
    parser.add_argument("--grid", metavar="XxYxZ",
                        help="sizes of the grid's directions, or auto for the planner's choice")
    parser.add_argument("--rank", type=int, default=0, metavar="N",
                        help="which rank (default 0, whose blocks are the largest)")
    parser.add_argument("--keep", choices=("none", "weight", "both"),
                        help="gathered operands kept for backward in 3d (default none)")
    options.add_recompute(parser)
    parser.add_argument("--memory", metavar="SIZE", help=(
        "of a rank, such as '16 GB': say whether the model fits, or which --recompute would, and "
        "end with status 1 if it does not"))
    parser.add_argument("--causal", action="store_true", help="attention looks backward only")
    parser.add_argument("--all-layers", action="store_true",
                        help="run all layers instead of extending three, which gives the same")
    parser.add_argument("--machine", metavar="NAME", help=(
        "also predict seconds on this machine, and plan for it with --grid auto (for longhorn, if "
        "none is given)"))


def run(arguments: argparse.Namespace) -> int:
    """Print the report; the exit status."""
    return dry.run(arguments)
