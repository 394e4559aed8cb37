"""Measure the 3-D product beside ScaLAPACK's, which must be installed, under mpirun; print it."""

import argparse
import math

import numpy as np

from bench.errors import WrongResult
from bench.experiments.products.scalapack import (Comparison, Products, compare_products,
                                                  load_libraries)
from bench.command_line import measuring, options
from bench.command_line.publish import report_failure
from bench.statistics import median_interval
from mm3d.console import say

GROUP = "Measure the parts alone"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``scalapack``."""
    measuring.add_repetitions(parser, 7, 30.0)
    options.add_shape(parser)
    options.add_grid(parser)
    options.add_dtype(parser)
    parser.add_argument("--block", type=options.numbers, default=[64, 128, 256], metavar="N,...",
                        help="rows and columns of ScaLAPACK's blocks, each size measured (default "
                             "64,128,256)")
    parser.add_argument("--calls", type=options.whole(1), default=5, metavar="N",
                        help="calls in a sample (default 5)")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and print every shape; return the exit status."""
    limits = measuring.limits_of(arguments)
    library, gemm = load_libraries(comm, arguments.dtype)
    status = 0
    for shape in arguments.shape:
        products = Products(library, gemm, comm, shape, arguments.grid, arguments.block,
                            arguments.seed)
        try:
            found = compare_products(products, arguments.calls, limits)
        except WrongResult as wrong:
            status = report_failure(f"{shape} {arguments.dtype}", wrong, comm)
        else:
            if found is not None:
                say(table(found) + "\n")
        products.free()
    return status


def table(found: Comparison) -> str:
    """Format the table of a comparison."""
    from bench.document import Column, Notes, Rows, Table
    from bench.reports.formats import render
    ours, theirs = len(found.transports), len(found.blocks)
    rows: Rows = []
    for k, (name, time) in enumerate(zip(found.subjects, np.median(found.seconds, axis=0))):
        cells = [name, f"{1e3 * time:#.4g}", f"{2e-9 * math.prod(found.shape) / time:.1f}"]
        for ratios in found.speed_ups():
            if 0 <= k - ours < theirs:
                median, low, high, _ = median_interval(ratios[:, k - ours])
                cells += [f"{median:.2f}", f"{low:.2f} - {high:.2f}"]
            else:
                cells += ["", ""]
        rows.append(cells)
    columns = [Column("", "C = A B"), Column("time", "(ms)"), Column("rate", "(GFLOP/s)"),
               *(Column(which, "", f"3d, {name}, is ahead") for name in found.transports
                 for which in ("median", "95 %"))]
    title = (f"{' x '.join(map(str, found.shape))} {found.dtype}, {found.ranks} ranks on "
             f"{found.cores} cores")
    return render([Table(title, columns, rows), Notes("About these figures:", [
        f"{len(found.seconds)} repetitions of {found.calls} call{'s' * (found.calls > 1)} each, "
        f"in random order; times are makespans a call, rates of all ranks.",
        f"The 3-D product and ScaLAPACK multiply by one function, of {found.library}. ScaLAPACK "
        f"moves by MPI.", "Loaded: " + "; ".join(f"{file}: {about}" for file, about in
                                                 found.loaded.items()) + "."])])
