"""Measure the cost of many ranks: starting them, making their grid, a tiny step."""

import argparse

from bench.command_line import options
from bench.document import Column, Notes, Part, Rows, Table
from bench.experiments.startup import CALLS, FailedJob, PHASES, check_cubes, measure_start
from mm3d import launcher
from mm3d.console import complain

ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure start``."""
    parser.add_argument("--ranks", type=options.numbers, default=[8, 27, 64], metavar="N,...",
                        help="numbers of ranks, which must be cubes (default 8,27,64)")


def run(arguments: argparse.Namespace) -> int:
    """Start a job of each number of ranks and print the table; return the exit status."""
    check_cubes(arguments.ranks)
    try:
        found = [(ranks, measure_start(ranks)) for ranks in arguments.ranks]
    except FailedJob as error:
        complain(f"failed: {error}")
        return 1
    arguments.show(table(found))
    return 0


def table(found: list[tuple[int, dict]]) -> list[Part]:
    """Make the table of all jobs, each with its ranks."""
    rows: Rows = [[ranks, one["transport"], *(f"{one[name]:#.3g}" for name in PHASES),
                   f"{1e6 * one['call']:.0f}"] for ranks, one in found]
    columns = [Column("ranks"), Column("transport"), *(Column(name, "(s)") for name in PHASES),
               Column("a small gather", "(us of CPU)")]
    return [Table(f"Many ranks on {launcher.cores()} cores", columns, rows),
            Notes("About these figures:", [
                "once each; a step is forward and backward of one tiny layer; the gather is the "
                f"mean of {CALLS} along x, all that a rank's processor spends on it"])]
