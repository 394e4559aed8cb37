"""Measure distributed products beside one process with all cores, under mpirun."""

import argparse
import gc
from pathlib import Path

import numpy as np

from bench.errors import UsageError, WrongResult
from bench.experiments.products.matmul import measure_product
from bench.experiments.products.problem import Problem, product_grid, schemes_with_products
from bench.experiments.products.side_by_side import measure_side_by_side
from bench.instruments import chrome_trace, step_tracing
from bench.instruments.clock import Clock
from bench.instruments.timing import Limits
from bench.records.journal import claim_folder
from bench.reports.micro_tables import format_record
from bench.command_line import measuring, options
from bench.command_line.publish import check_trace_file, publish, report_failure
from mm3d.schemes.matrix_product import FORMS

GROUP = "Measure the parts alone"
ON_ALL_RANKS = True
ALL = "all"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``matmul``."""
    measuring.add_cluster(parser)
    measuring.add_measurement(parser, 7, 30.0)
    options.add_shape(parser)
    options.add_grid(parser)
    parser.add_argument("--scheme", type=options.some_of(*schemes_with_products(), ALL),
                        default=["3d"], metavar="NAMES", help=(
        f"algorithm of the products (default 3d): {', '.join(schemes_with_products())}; several "
        f"with commas: forward by each, in turns, in one table; all: by each that has a grid of "
        f"so many ranks"))
    parser.add_argument("--form", type=options.some_of(*FORMS), default=["ab"], metavar="NAMES",
                        help="forms of the product, separated by commas: ab, abt, atb for "
                             "C = A B, A B^T, A^T B (default ab)")
    options.add_dtype(parser)
    parser.add_argument("--trace", metavar="FILE", help=(
        "write a traced call of each product for chrome://tracing and ui.perfetto.dev; the names "
        "of several products are added to the file's"))
    parser.add_argument("--calls", type=options.whole(1), metavar="N",
                        help="calls in a sample (default: as many as take one process 100 ms)")
    parser.add_argument("--backward", action="store_true",
                        help="measure the gradients dA and dB too")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write every shape and form; return the exit status."""
    limits = measuring.limits_of(arguments)
    measuring.check_memory(np.dtype(arguments.dtype).itemsize * max(
        m * n + n * k + m * k for m, n, k in arguments.shape), arguments.backend, comm)
    out = claim_folder(arguments.out, comm)
    check_trace_file(arguments.trace, comm)
    names = arguments.scheme
    several = names == [ALL] or len(names) > 1
    if several and (arguments.backward or arguments.trace or arguments.grid or arguments.calls):
        raise UsageError(f"--scheme {','.join(names)} measures the forward product of each "
                         f"algorithm on its own grid: leave out --backward, --trace, --grid and "
                         f"--calls")
    if several and (len(set(names)) < len(names) or ALL in names and names != [ALL]):
        raise UsageError(f"--scheme {','.join(names)}: names that differ would do, or all alone")
    status = 0
    for shape in arguments.shape:
        for form in arguments.form:
            gc.collect()
            if several:
                status = max(status, compare_and_write(form, shape, arguments, limits, out, comm))
                continue
            try:
                grid = product_grid(names[0], comm, arguments.grid, arguments.backend)
                problem = Problem(names[0], form, grid, shape, arguments.dtype,
                                  arguments.seed)
            except ValueError as error:
                raise UsageError(str(error)) from error
            sizes = "x".join(map(str, shape))
            name = f"matmul-{names[0]}-{form}-{sizes}-{arguments.dtype}"
            status = max(status, measure_and_write(problem, name, arguments, limits, out))
            problem.grid.free()
            del problem
    return status


def measure_and_write(problem: Problem, name: str, arguments: argparse.Namespace, limits: Limits,
                      out: Path) -> int:
    """Measure, write and trace one product; return the exit status."""
    comm = problem.grid.comm
    try:
        record = measure_product(problem, arguments.backward, arguments.calls, limits,
                                 arguments.seed, arguments.watched)
    except WrongResult as wrong:
        return report_failure(name, wrong, comm)
    status = publish(record, out, name, comm, format_record)
    if arguments.trace:
        clock = Clock(comm)
        phases = ("forward", "backward")[:1 + arguments.backward]
        cases = len(arguments.shape) * len(arguments.form)
        spans = step_tracing.trace_product(problem, phases, clock)
        path = chrome_trace.trace_file(arguments.trace, name, cases)
        status = max(status, chrome_trace.write_trace(path, spans, problem.grid, clock, name))
    return status


def compare_and_write(form: str, shape: tuple[int, int, int], arguments: argparse.Namespace,
                      limits: Limits, out: Path, comm) -> int:
    """Measure several algorithms on one product, and write the record; return the exit status."""
    names = [] if arguments.scheme == [ALL] else arguments.scheme
    name = "-".join(["products", *names, form, "x".join(map(str, shape)), arguments.dtype,
                     f"p{comm.size:03d}"])
    try:
        record = measure_side_by_side(form, shape, arguments.dtype, comm, arguments.backend,
                                      limits, arguments.seed, names or None, arguments.watched)
    except WrongResult as wrong:
        return report_failure(name, wrong, comm)
    return publish(record, out, name, comm, format_record)
