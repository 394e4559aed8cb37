"""Measure each collective along each direction beside the plain MPI call, under mpirun."""

import argparse

from bench.command_line import measuring, options
from bench.command_line.config_options import MEASURED_DTYPES, add_fields
from bench.command_line.publish import publisher
from bench.experiments.products.collectives import (array_bytes, collective_grid,
                                                    measure_collectives)
from mm3d.config import Division, Model
from mm3d.console import say

ON_ALL_RANKS = True
MOST_BYTES = 2 ** 40    # of an array


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure collectives``."""
    measuring.add_shared(parser, "cluster")
    measuring.add_measurement(parser, 7, 1.0)
    add_fields(parser, Division, ["grid"])
    for name, default, about in (
            ("least", 1024, "smallest array (default 1024); each is 4 times as large as the last"),
            ("most", 4 * 2 ** 20, "largest array (default 4194304, 4 MiB)")):
        parser.add_argument(f"--{name}", type=options.whole(1, MOST_BYTES), default=default,
                            metavar="BYTES", help=about)
    add_fields(parser, Model, ["dtype"], choices=MEASURED_DTYPES)


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write the record; return the exit status."""
    limits = measuring.limits_of(arguments)
    sizes = array_bytes(arguments.least, arguments.most, arguments.dtype)
    measuring.check_memory(2 * arguments.most * comm.size, arguments.backend, comm)
    grid = collective_grid(comm, arguments.grid, arguments.backend)
    status = publisher(arguments, comm)("collectives", lambda: measure_collectives(
        grid, sizes, arguments.dtype, limits, arguments.seed,
        lambda line: say(line) if comm.rank == 0 else None))
    grid.free()
    return status
