"""Measure one GPU: products, elementwise kernels, one layer, and a rank's part of each row."""

import argparse

from bench.errors import WrongResult
from bench.experiments.gpu.parts import GpuBenchmark, PARTS, measure_part
from bench.records.journal import claim_folder
from bench.records.measurements import Measurements
from bench.verbs import options
from bench.verbs.publish import failed, publish

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
    """Measure and write the chosen parts, on one rank; the exit status."""
    backend = options.alone("gpu", arguments.backend or "cupy", comm)
    limits = options.limits_of(arguments)
    benchmark = GpuBenchmark(backend, arguments.scale, arguments.graph, limits, arguments.seed)
    out, status = claim_folder(arguments.out, comm), 0
    for part in arguments.part:
        try:
            record = measure_part(benchmark, part)
        except WrongResult as wrong:
            status = failed(f"gpu-{part}", f"{wrong}; no times were written", comm)
        else:
            status = max(status, publish(record, out, record.kind, comm, table))
    return status


def table(record: Measurements) -> str:
    """Format the tables of a record."""
    from bench.reports import micro_tables
    from bench.reports.formats import render
    return render(micro_tables.other_parts(record))
