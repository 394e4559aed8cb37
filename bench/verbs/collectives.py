"""Measure each collective along each direction beside the plain MPI call, under mpirun."""

import argparse

from bench.errors import WrongResult
from bench.experiments.products.collectives import (array_bytes, collective_grid,
                                                    measure_collectives)
from bench.prediction import machine_file, machine_update
from bench.records.journal import claim_folder
from bench.reports.micro_tables import format_record
from bench.command_line import measuring, options
from bench.command_line.number_types import MOST_BYTES
from bench.command_line.publish import publish, report_failure
from mm3d import launcher
from mm3d.console import say

GROUP = "Measure the parts alone"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``collectives``."""
    measuring.add_cluster(parser)
    measuring.add_measurement(parser, 7, 1.0)
    options.add_grid(parser)
    for name, default, about in (
            ("least", 1024, "smallest array (default 1024); each is 4 times as large as the last"),
            ("most", 4 * 2 ** 20, "largest array (default 4194304, 4 MiB)")):
        parser.add_argument(f"--{name}", type=options.whole(1, MOST_BYTES), default=default,
                            metavar="BYTES", help=about)
    options.add_dtype(parser)
    options.add_machine_file(parser, "the cost of each collective, and of the links")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure, write the record and update the machine file; return the exit status."""
    limits = measuring.limits_of(arguments)
    sizes = array_bytes(arguments.least, arguments.most, arguments.dtype)
    measuring.check_memory(2 * arguments.most * comm.size, arguments.backend, comm)
    grid = collective_grid(comm, arguments.grid, arguments.backend)
    machine = machine_update.open_machine(arguments.machine, arguments.base,
                                          launcher.local_ranks(), comm)
    out = claim_folder(arguments.out, comm)
    try:
        record = measure_collectives(grid, sizes, arguments.dtype, limits, arguments.seed,
                                     lambda line: say(line) if comm.rank == 0 else None)
    except WrongResult as wrong:
        return report_failure("collectives", f"{wrong}; no times were written", comm)
    grid.free()
    status = publish(record, out, "collectives", comm, format_record)
    if machine is not None:
        measured = record and machine_update.update_collectives(machine, record)
        status = max(status, machine_file.publish_machine(measured, arguments.machine, comm))
    return status
