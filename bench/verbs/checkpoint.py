"""Measure how fast checkpoints are written and read, beside the disk itself, under mpirun."""

import argparse
from pathlib import Path

from bench.command_line import measuring, options
from bench.command_line.publish import publish, report_failure
from bench.errors import WrongResult
from bench.experiments.checkpoint import measure_checkpoint
from bench.records.journal import claim_folder
from bench.reports.micro_tables import format_record
from mm3d import ModelSizes

GROUP = "Measure the parts alone"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``checkpoint``."""
    measuring.add_measurement(parser, 5, 30.0)
    parser.add_argument("--layers", type=options.whole(1), default=4, metavar="N",
                        help="layers of the model (default 4)")
    parser.add_argument("--hidden", type=options.whole(1), default=1024, metavar="N",
                        help="features of a token; a layer has 12 N^2 weights (default 1024)")
    parser.add_argument("--heads", type=options.whole(1), default=16, metavar="N",
                        help="attention heads (default 16)")
    parser.add_argument("--folder", metavar="DIR", help=(
        "the disk: a folder for the files, which are removed at the end (default --out)"))
    options.add_dtype(parser)


def run(arguments: argparse.Namespace, comm) -> int:
    """Verify and measure, and write the record; return the exit status."""
    limits = measuring.limits_of(arguments)
    measuring.check_model_memory(arguments.layers, arguments.hidden, 1, arguments.backend, comm)
    out = claim_folder(arguments.out, comm)
    sizes = ModelSizes(arguments.layers, arguments.hidden, arguments.heads, comm.size, 1)
    try:
        record = measure_checkpoint(comm, Path(arguments.folder or out), sizes, arguments.dtype,
                                    limits, arguments.seed, arguments.backend)
    except WrongResult as wrong:
        return report_failure("checkpoint", f"{wrong}; no times were written", comm)
    return publish(record, out, f"checkpoint-p{comm.size:03d}", comm, format_record)
