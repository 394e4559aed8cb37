"""Measure distributed products beside one process, each other, or ScaLAPACK's, under mpirun."""

import argparse
import gc
import math
from typing import Callable

import numpy as np

from bench.command_line import measuring, options
from bench.command_line.config_options import MEASURED_DTYPES, add_fields
from bench.command_line.publish import check_trace_file, publisher, report_failure
from bench.errors import UsageError, WrongResult, as_usage_error
from bench.experiments.products.matmul import measure_product
from bench.experiments.products.problem import Problem, product_grid
from bench.experiments.products.side_by_side import measure_side_by_side
from bench.instruments import chrome_trace, step_tracing
from bench.instruments.clock import Clock
from bench.statistics import median_interval
from mm3d import launcher
from mm3d.config import Division, Model
from mm3d.console import say
from mm3d.schemes.matrix_product import FORMS
from mm3d.schemes import algorithms_with_products

ON_ALL_RANKS = True
ALL = "all"
BLOCKS, CALLS = [64, 128, 256], 5    # of ScaLAPACK, by default


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure matmul``."""
    measuring.add_shared(parser, "cluster")
    measuring.add_measurement(parser, 7, 30.0)
    parser.add_argument("--shape", type=options.shape, action="append", required=True,
                        metavar="M,N,K",
                        help="measure C = A B, where C is M x K and the sums have N terms; N "
                             "alone for cubes; may be repeated")
    add_fields(parser, Division, ["grid"])
    add_fields(parser, Division, ["scheme"], {"scheme": ["3d"]}, (
        f"algorithm of the products: {', '.join(algorithms_with_products())}; several with "
        f"commas: forward by each, in turns, in one table; all: by each that has a grid of so "
        f"many ranks"), type=options.some_of(*algorithms_with_products(), ALL), metavar="NAMES")
    parser.add_argument("--form", type=options.some_of(*FORMS), default=["ab"], metavar="NAMES",
                        help="forms of the product, separated by commas: ab, abt, atb for "
                             "C = A B, A B^T, A^T B (default ab)")
    add_fields(parser, Model, ["dtype"], choices=MEASURED_DTYPES)
    parser.add_argument("--trace", metavar="FILE", help=(
        "write a traced call of each product for chrome://tracing and ui.perfetto.dev; the names "
        "of several products are added to the file's"))
    parser.add_argument("--calls", type=options.whole(1), metavar="N", help=(
        f"calls in a sample (default: as many as take one process 100 ms; {CALLS} beside "
        f"ScaLAPACK)"))
    parser.add_argument("--backward", action="store_true",
                        help="measure the gradients dA and dB too")
    parser.add_argument("--beside", choices=("scalapack",), help=(
        "measure the 3-D product beside ScaLAPACK's, which must be installed, and print the "
        "table alone"))
    parser.add_argument("--block", type=options.numbers, metavar="N,...", help=(
        "rows and columns of ScaLAPACK's blocks, each size measured (default "
        f"{','.join(map(str, BLOCKS))})"))


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write every shape and form; return the exit status."""
    limits = measuring.limits_of(arguments)
    _refuse_contradictions(arguments)
    if arguments.beside:
        return _measure_beside_scalapack(arguments, limits, comm)
    measuring.check_memory(np.dtype(arguments.dtype).itemsize * max(
        m * n + n * k + m * k for m, n, k in arguments.shape), arguments.backend, comm)
    publish = publisher(arguments, comm)
    check_trace_file(arguments.trace, comm)
    measure_one = _measure_several if _is_several(arguments) else _measure_alone
    status = 0
    for shape in arguments.shape:
        for form in arguments.form:
            gc.collect()
            status = max(status, measure_one(form, shape, arguments, limits, publish,
                                             comm))
    return status


def _is_several(arguments: argparse.Namespace) -> bool:
    """Return whether several algorithms take turns."""
    return arguments.scheme == [ALL] or len(arguments.scheme) > 1


def _refuse_contradictions(arguments: argparse.Namespace) -> None:
    """Raise UsageError for options that have no use beside each other."""
    names = arguments.scheme
    if arguments.beside:
        idle = [f"--{name}" for name, default in (
            ("scheme", ["3d"]), ("form", ["ab"]), ("trace", None), ("backward", False),
            ("backend", None)) if getattr(arguments, name) != default]
        if idle:
            raise UsageError(f"--beside {arguments.beside} measures C = A B by 3d, on NumPy: "
                             f"leave out {' and '.join(idle)}")
    elif arguments.block:
        raise UsageError("--block would do nothing here: give --beside scalapack too, or leave "
                         "it out")
    elif _is_several(arguments):
        if arguments.backward or arguments.trace or arguments.grid or arguments.calls:
            raise UsageError(f"--scheme {','.join(names)} measures the forward product of each "
                             f"algorithm on its own grid: leave out --backward, --trace, --grid "
                             f"and --calls")
        if len(set(names)) < len(names) or ALL in names and names != [ALL]:
            raise UsageError(f"--scheme {','.join(names)}: names that differ would do, or all "
                             f"alone")


def _measure_alone(form: str, shape: tuple[int, int, int], arguments: argparse.Namespace, limits,
                   publish: Callable[..., int], comm) -> int:
    """Measure, write and trace one product; return the exit status."""
    with as_usage_error():
        grid = product_grid(arguments.scheme[0], comm, arguments.grid, arguments.backend)
        problem = Problem(arguments.scheme[0], form, grid, shape, arguments.dtype, arguments.seed)
    name = f"matmul-{arguments.scheme[0]}-{form}-{'x'.join(map(str, shape))}-{arguments.dtype}"
    done = []    # whether there is something to trace

    def work():
        record = measure_product(problem, arguments.backward, arguments.calls, limits,
                                 arguments.seed, arguments.watched)
        done.append(True)
        return record
    status = publish(name, work)
    if arguments.trace and done:
        clock = Clock(comm)
        phases = ("forward", "backward")[:1 + arguments.backward]
        spans = step_tracing.trace_product(problem, phases, clock)
        path = chrome_trace.trace_file(arguments.trace, name,
                                       len(arguments.shape) * len(arguments.form))
        status = max(status, chrome_trace.write_trace(path, spans, grid, clock, name))
    grid.free()
    return status


def _measure_several(form: str, shape: tuple[int, int, int], arguments: argparse.Namespace,
                     limits, publish: Callable[..., int], comm) -> int:
    """Measure several algorithms on one product, and write the record; return the exit status."""
    names = [] if arguments.scheme == [ALL] else arguments.scheme
    name = "-".join(["products", *names, form, "x".join(map(str, shape)), arguments.dtype,
                     f"p{comm.size:03d}"])
    return publish(name, lambda: measure_side_by_side(
        form, shape, arguments.dtype, comm, arguments.backend, limits, arguments.seed,
        names or None, arguments.watched))


def _measure_beside_scalapack(arguments: argparse.Namespace, limits, comm) -> int:
    """Measure every shape beside ScaLAPACK's product, and print it; return the exit status."""
    from bench.experiments.products import scalapack
    library, gemm = scalapack.load_libraries(comm, arguments.dtype)
    status = 0
    for shape in arguments.shape:
        products = scalapack.ScalapackProducts(library, gemm, comm, shape, arguments.grid,
                                               arguments.block or BLOCKS, arguments.seed)
        try:
            seconds = scalapack.compare_products(products, arguments.calls or CALLS, limits)
        except WrongResult as wrong:
            status = report_failure(f"{shape} {arguments.dtype}", wrong, comm)
        else:
            if comm.rank == 0:
                arguments.show(_scalapack_table(products, arguments.calls or CALLS, seconds))
                say()
        products.free()
    return status


def _scalapack_table(products, calls: int, seconds: dict[str, np.ndarray]) -> list:
    """Make the table of what `bench.experiments.products.scalapack.compare_products` returns."""
    from bench.document import Column, Notes, Rows, Table
    from bench.experiments.products.scalapack import describe_loaded
    ours = [*seconds][:len(products.ours)]
    theirs = [*seconds][len(ours):len(ours) + len(products.theirs)]
    rows: Rows = []
    for name, each in seconds.items():
        time = np.median(each)
        cells = [name, f"{1e3 * time:#.4g}", f"{2e-9 * math.prod(products.shape) / time:.1f}"]
        for own in ours:
            if name in theirs:
                median, low, high, _ = median_interval(each / seconds[own])
                cells += [f"{median:.2f}", f"{low:.2f} - {high:.2f}"]
            else:
                cells += ["", ""]
        rows.append(cells)
    columns = [Column("", "C = A B"), Column("time", "(ms)"), Column("rate", "(GFLOP/s)"),
               *(Column(which, "", f"3d, {name}, is ahead") for name in products.ours
                 for which in ("median", "95 %"))]
    title = (f"{' x '.join(map(str, products.shape))} {products.dtype}, {products.comm.size} "
             f"ranks on {launcher.cores()} cores")
    return [Table(title, columns, rows), Notes("About these figures:", [
        f"{len(each)} repetitions of {calls} call{'s' * (calls > 1)} each, "
        f"in random order; times are makespans a call, rates of all ranks.",
        f"The 3-D product and ScaLAPACK multiply by one function, of {products.gemm.file}. "
        f"ScaLAPACK moves by MPI.", "Loaded: " + "; ".join(
            f"{file}: {about}" for file, about in describe_loaded().items()) + "."])]
