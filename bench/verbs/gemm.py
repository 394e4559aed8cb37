"""Measure the rate of one rank's matrix products, by size and dtype."""

import argparse

import numpy as np

from bench.errors import WrongResult
from bench.experiments.products.gemm import measure_gemm, thread_counts
from bench.prediction import machine_file, machine_update
from bench.records.journal import claim_folder
from bench.reports.micro_tables import format_record
from bench.command_line import measuring, options
from bench.command_line.publish import publish, report_failure

GROUP = "Measure the parts alone"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``gemm``."""
    measuring.add_measurement(parser, 7, 1.0)
    parser.add_argument("--sizes", type=options.numbers, default=[2 ** k for k in range(6, 13)],
                        metavar="N,...",
                        help="sizes of the square matrices (default 64,128,...,4096)")
    parser.add_argument("--dtypes", type=options.some_of("float32", "float64"), metavar="NAMES",
                        default=["float32", "float64"],
                        help="dtypes of the matrices (default float32,float64)")
    parser.add_argument("--threads", type=options.numbers, metavar="N,...",
                        help="numbers of BLAS threads (default: 1 and the number of cores)")
    options.add_machine_file(parser, "the rate of products, with the fewest threads")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure on one rank, write the record, update the machine file; return the exit status."""
    backend = measuring.one_rank_backend("gemm", arguments.backend, comm)
    limits = measuring.limits_of(arguments)
    threads = thread_counts(arguments.threads)
    measuring.check_memory(3 * max(arguments.sizes) ** 2 * max(
        np.dtype(name).itemsize for name in arguments.dtypes), arguments.backend, comm)
    machine = machine_update.open_machine(arguments.machine, arguments.base, 1, comm)
    out = claim_folder(arguments.out, comm)
    try:
        record = measure_gemm(arguments.sizes, arguments.dtypes, threads, backend, limits,
                              arguments.seed)
    except WrongResult as wrong:
        return report_failure("gemm", f"{wrong}; no times were written", comm)
    status = publish(record, out, "gemm", comm, format_record)
    if machine is not None:
        measured = machine_update.update_products(machine, record)
        status = max(status, machine_file.publish_machine(measured, arguments.machine, comm))
    return status
