"""Measure how fast checkpoints are written and read, beside the disk itself, under mpirun."""

import argparse
from pathlib import Path

from bench.agreement import make_on_rank_0
from bench.command_line import measuring
from bench.command_line.config_options import MEASURED_DTYPES, add_fields, read
from bench.command_line.publish import publisher
from bench.experiments.checkpoint import measure_checkpoint
from bench.records.journal import check_folder
from mm3d import ModelSizes
from mm3d.config import Model

ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure checkpoint``."""
    measuring.add_measurement(parser, 5, 30.0)
    sizes = {"layers": 4, "hidden": 1024, "heads": 16}
    add_fields(parser, Model, sizes, sizes)
    parser.add_argument("--disk", metavar="DIR", help=(
        "the disk: a folder for the files, which are removed at the end (default --out)"))
    add_fields(parser, Model, ["dtype"], choices=MEASURED_DTYPES)


def run(arguments: argparse.Namespace, comm) -> int:
    """Verify and measure, and write the record; return the exit status."""
    limits = measuring.limits_of(arguments)
    measuring.check_model_memory(arguments.layers, arguments.hidden, 1, arguments.backend, comm)
    publish = publisher(arguments, comm)
    if arguments.disk:
        make_on_rank_0(lambda: check_folder(arguments.disk, "--disk"), comm)
    sizes = read(ModelSizes, arguments, batch=comm.size, seq=1)
    return publish(f"checkpoint-p{comm.size:03d}", lambda: measure_checkpoint(
        comm, Path(arguments.disk or arguments.out), sizes, arguments.dtype, limits,
        arguments.seed, arguments.backend))
