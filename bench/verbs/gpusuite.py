"""Do all that needs a GPU, one step after another, whatever fails."""

import argparse
from pathlib import Path

from bench.console import say
from bench.doctor import gpu_suite

GROUP = "This machine"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``gpusuite``."""
    parser.add_argument("out", type=Path, metavar="DIR", help="for logs, summary and results")
    parser.add_argument("--ranks", type=int, default=8, metavar="N",
                        help="of the jobs of several ranks (default 8)")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS",
                        help="for a measurement or the tests (default 600)")
    parser.add_argument("--only", metavar="NAME,...", help="of the steps, in their order")
    parser.add_argument("--rehearse", action="store_true", help="on NumPy, without a GPU")


def run(arguments: argparse.Namespace) -> int:
    """Run the steps and print a line for each; 1 when one failed."""
    out = arguments.out.resolve()
    every = gpu_suite.steps(out, arguments.ranks, arguments.limit, arguments.rehearse)
    status = 0
    for outcome in gpu_suite.run(gpu_suite.chosen(every, arguments.only), out):
        say(str(outcome))
        status = max(status, int(bool(outcome.problem)))
    return status
