"""Measure one GPU: products, kernels, a layer, a training step, and a rank's part of each row."""

import argparse
from functools import partial

from bench.command_line import measuring, options
from bench.command_line.publish import measure
from bench.errors import UsageError
from bench.experiments.gpu.parts import GpuBenchmark, PARTS, measure_part
from bench.records.journal import claim_folder
from bench.reports.micro_tables import showing

ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure gpu``."""
    measuring.add_measurement(parser, 10, 5.0)
    parser.add_argument("--part", type=options.some_of(*PARTS), default=list(PARTS),
                        metavar="NAMES",
                        help=f"measure these parts, separated by commas: {', '.join(PARTS)} "
                             f"(default: all)")
    parser.add_argument("--graph", action="store_true", help=(
        "measure the layer also as a CUDA graph, whose kernels are launched at once"))
    parser.add_argument("--scale", default="paper", choices=("paper", "tiny"),
                        help="sizes: those of the paper, or tiny for a rehearsal (default paper)")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write the chosen parts on one rank; return the exit status."""
    if arguments.graph and "layer" not in arguments.part:
        raise UsageError(f"--graph would do nothing here: it is of --part layer, and not of "
                         f"{','.join(arguments.part)}")
    backend = measuring.one_rank_backend("measure gpu", arguments.backend or "cupy", comm)
    limits = measuring.limits_of(arguments)
    benchmark = GpuBenchmark(backend, arguments.scale, arguments.graph, limits, arguments.seed)
    out = claim_folder(arguments.out, comm)
    return max([measure(f"gpu-{part}", partial(measure_part, benchmark, part), out, comm,
                        showing(arguments.show)) for part in arguments.part])
