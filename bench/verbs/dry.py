"""Say what a rank would do on any number of ranks: products, collectives, memory."""

import argparse
import sys

import mm3d
from bench.cases.variants import Variant
from bench.errors import UsageError
from bench.prediction import machine_model, memory_fit
from bench.reports import dry_tables as tables
from bench.reports.formats import render
from bench.verbs import grids, options
from mm3d import describe
from mm3d.model import cost
from mm3d.model.sizes import SIZES
from mm3d.tracing import dry_run
from mm3d.tracing.trace import Trace

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
    """Print the tables of a dry run; 1 when the model does not fit into ``--memory``."""
    sizes = grids.model_sizes(*(getattr(arguments, name) for name in SIZES))
    if arguments.ranks < 1:
        raise UsageError(f"--ranks {arguments.ranks}: must be at least 1")
    if arguments.scheme not in mm3d.SCHEMES:
        raise UsageError(f"scheme {arguments.scheme!r} is unknown: choose one of "
                         f"{', '.join(mm3d.SCHEMES)}")
    shape = grids.grid(arguments.grid, arguments.scheme, arguments.ranks,
                       arguments.machine or "longhorn", arguments.dtype, sizes,
                       arguments.recompute)
    machine = machine_model.load(arguments.machine, arguments.dtype) if arguments.machine else None
    limit = memory_fit.size(arguments.memory) if arguments.memory else 0
    if limit and arguments.rank:
        raise UsageError("--memory is held against rank 0, which has the most: leave --rank out")
    try:
        shape = shape or mm3d.SCHEMES[arguments.scheme].default_grid(arguments.ranks)
        trace = _trace(arguments, shape, sizes, machine)
    except ValueError as error:
        raise UsageError(str(error)) from error
    grid = mm3d.SCHEMES[arguments.scheme].grid_shape(shape)
    title = (f"scheme {arguments.scheme}, grid {grid}, rank {arguments.rank} of "
             f"{arguments.ranks}; "
             + ", ".join(f"{name} {value}" for name, value in sizes.items())
             + f", {arguments.dtype}, recompute {arguments.recompute}")
    useful = cost.flops(describe(sizes, arguments.causal))
    print(render([title, *tables.tables(trace, useful, machine)]))
    if not limit:
        return 0
    fits, line = memory_fit.verdict(arguments.scheme, tuple(shape), arguments.dtype,
                                    arguments.recompute,
                                    sizes, limit,
                                    Variant(keep=arguments.keep or "none",
                                            causal=arguments.causal))
    print("\n" + line)
    return int(not fits)


def _trace(arguments: argparse.Namespace, shape: tuple[int, ...], sizes: dict[str, int],
           machine: machine_model.Machine | None) -> Trace:
    """Run a step of the rank dry; ValueError when the grid, the rank or an option cannot be."""
    trace_of = dry_run.step if arguments.all_layers else dry_run.extended
    return trace_of(arguments.scheme, arguments.ranks, shape, arguments.rank,
                    options={"keep": arguments.keep} if arguments.keep else {},
                    dtype=arguments.dtype, causal=arguments.causal, recompute=arguments.recompute,
                    block=machine.granule if machine else sys.maxsize, **sizes)
