"""Run everything that needs a GPU, one step after another, whatever fails."""

import argparse
from pathlib import Path

from bench.doctor import gpu_suite
from bench.command_line.number_types import number, whole
from mm3d.console import say

GROUP = "This machine"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``gpusuite``."""
    parser.add_argument("out", type=Path, metavar="DIR",
                        help="the folder for logs, summary.txt and results")
    parser.add_argument("--ranks", type=whole(1), default=8, metavar="N",
                        help="ranks of the jobs of several ranks (default 8)")
    parser.add_argument("--limit", type=number(above=True), default=600, metavar="SECONDS",
                        help="the longest that a measurement or the tests may take; a self-test "
                             "may take half of it (default 600)")
    parser.add_argument("--only", metavar="NAME,...",
                        help="run these steps alone (default: all); a wrong name lists them")
    parser.add_argument("--rehearse", action="store_true",
                        help="run the steps on NumPy at tiny sizes, without a GPU")


def run(arguments: argparse.Namespace) -> int:
    """Run the steps and print a line for each; return 1 when one failed, else 0.

    Tests that are all skipped prove nothing: they fail too, but in a rehearsal, which has no GPU.
    """
    out = arguments.out.absolute()
    steps = gpu_suite.list_steps(out, arguments.ranks, arguments.limit, arguments.rehearse)
    status = 0
    for outcome in gpu_suite.run_steps(gpu_suite.select_steps(steps, arguments.only), out):
        say(str(outcome))
        skipped = outcome.skipped and not arguments.rehearse
        status = max(status, int(bool(outcome.problem) or skipped))
    return status
