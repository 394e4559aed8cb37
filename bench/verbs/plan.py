"""Rank every scheme and grid by predicted time, with words and memory."""

import argparse
import time

from bench.errors import UsageError
from bench.prediction import machine_model, planner
from bench.reports.formats import render
from bench.reports.plan_tables import plan_remarks, plan_table
from bench.command_line import grids, options
from mm3d.model.sizes import SIZES

GROUP = "Plan and predict"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan``."""
    options.add_model(parser)
    options.add_machine(parser)
    parser.add_argument("--top", type=int, default=12, metavar="N",
                        help="number of plans to print (default 12)")
    options.add_recompute(parser)
    options.add_pictures(parser)
    options.add_format(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the plans; 0.

    Raises
    ------
    UsageError
        When there are fewer than 2 ranks or no plan to print.
    """
    ranks, dtype, recompute = arguments.ranks, arguments.dtype, arguments.recompute
    if ranks < 2 or arguments.top < 1:
        raise UsageError(f"--ranks {ranks} --top {arguments.top}: at least 2 ranks and one plan "
                         f"would do")
    machine = machine_model.load_machine(arguments.machine, dtype)
    sizes = grids.model_sizes(*(getattr(arguments, name) for name in SIZES))
    start = time.perf_counter()
    found = planner.rank_plans(ranks, machine, dtype, recompute,
                               max(arguments.top, planner.TRACED_OF_MANY),
                               **sizes)
    took = time.perf_counter() - start
    shown = found[:arguments.top]
    fits = [planner.describe_fit(one, machine, dtype, sizes) for one in shown]
    title = (f"{ranks} ranks; " + ", ".join(f"{key} {value}" for key, value in sizes.items())
             + f", {dtype}, recompute {recompute}")
    print(render([machine.about, title, plan_table(shown, fits),
                  plan_remarks(found, sizes, ranks, took)], arguments.format))
    if arguments.pictures:
        from bench.reports.figures.prediction import draw_plans
        for path in draw_plans(arguments.pictures, ranks, machine, dtype, recompute, sizes):
            options.name_file(path, arguments.format)
    return 0
