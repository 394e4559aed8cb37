"""Measure the selected rows that have as many ranks as the job, under mpirun."""

import argparse
import gc
import random
from pathlib import Path
from typing import Callable

from bench.agreement import of_rank_0
from bench.cases.case import Case, make_case
from bench.cases.paper import Row
from bench.cases.selection import equal_token_rows, rows_by_name, select_rows, shuffle_cases
from bench.cases.variants import Variant
from bench.checks import layer_residuals
from bench.console import say
from bench.errors import Failed, LeftOut, StoreError, UsageError
from bench.experiments.rows.row import Measured, measure
from bench.experiments.rows.settings import Settings, check_variant, usable, verifiable
from bench.instruments import chrome_trace, timing
from bench.instruments.peaks import measure_peaks
from bench.instruments.clock import wait_patiently
from bench.prediction import machine_model, node_memory
from bench.records import journal, run_file
from bench.records.journal import claim_folder
from bench.records.measurements import Group
from bench.verbs import grids, row_options
from bench.verbs.publish import trace_file
from mm3d.arrays import backend as backends
from mm3d.model.sizes import SIZES
from mm3d.tracing.events import PHASES

GROUP = "Measure the paper's tables"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``."""
    row_options.add_rows(parser)
    for name in SIZES:
        parser.add_argument(f"--{name}", type=int, metavar="N", help="instead of the preset's")
    parser.add_argument("--rows", metavar="NAMES", help=(
        "instead of --table and --scheme: both of each row, such as weak:3d,strong:1d; "
        "weak:3d:1d is the row of 3d with the batch of 1d"))
    parser.add_argument("--grid", metavar="XxYxZ", help=(
        "sizes of the grid's directions, or auto for the planner's choice"))
    parser.add_argument("--machine", metavar="NAME", help=(
        "the machine that the planner of --grid auto plans for (default cpu)"))
    parser.add_argument("--inside", default="auto", metavar="AXIS", help=(
        "the direction of the grid that stays inside a node, where ranks fill nodes one after "
        "the other (default auto: the one that moves the most words)"))
    parser.add_argument("--trace", metavar="FILE", help=(
        "write the last traced step of each row for chrome://tracing and ui.perfetto.dev; with "
        "several rows each has its name in the file's"))
    parser.add_argument("--stop-file", metavar="FILE", help=(
        "when this file exists, end the row with the repetitions that there are, and begin no "
        "other: what a job does that nears its time limit"))


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure every selected row that has `comm.size` ranks; the exit status.

    Raises
    ------
    UsageError
        When no row has that many ranks, or an argument cannot be meant.
    StoreError
        When the results folder cannot be written.
    """
    rows = selected(arguments, comm.size)
    warmup, limits = row_options.step_counts(arguments)
    grid = grid_chooser(arguments, comm)
    usable(arguments.backend, comm)
    library = backends.get(arguments.backend)
    variant, memory = row_options.variant(arguments, library), row_options.node_memory(arguments)
    check_variant(variant, rows, library, arguments.recompute)
    cases = verifiable(fitting(rows, comm.size, arguments, variant))
    order = comm.bcast(random.SystemRandom().randrange(2 ** 31) if arguments.order is None
                       else arguments.order)
    out = claim_folder(arguments.out, comm)
    settings = Settings(
        warmup=warmup, limits=limits, order=order, backend=arguments.backend, seed=arguments.seed,
        traced=row_options.traced_steps(arguments), recompute=arguments.recompute, grid=grid,
        inside=arguments.inside, watched=arguments.watched, stop=stopper(arguments.stop_file),
        fits=lambda one, sizes, comm: node_memory.check_memory(
            one, sizes, arguments.recompute, library, comm, memory))
    trace = trace_file(arguments.trace, comm, arguments.traced)
    if comm.rank == 0:
        for line in left_out(arguments.rows, comm.size):
            say(line)
    peaks = measure_peaks(library, variant.dtype, comm)
    return max([report(one, settings, peaks, comm, out,
                       trace and chrome_trace.trace_file(trace, one.name, len(cases)),
                       extra=arguments.rows is None and bool(one.row.like))
                for one in shuffle_cases(cases, order)])


def selected(arguments: argparse.Namespace, ranks: int) -> list[Row]:
    """List the rows that the options name; of a scheme that the paper lacks for `ranks` ranks.

    Raises
    ------
    UsageError
        When a name is unknown, or rows are named in both ways.
    """
    if arguments.rows is None:
        rows = select_rows(arguments.table, arguments.scheme, ranks)
        return rows + (equal_token_rows(rows) if arguments.equal_tokens else [])
    for option in ("table", "scheme"):
        value = getattr(arguments, option)
        if value != "all":
            raise UsageError(f"--rows {arguments.rows} --{option} {value}: leave one of them out; "
                             f"--rows names both the table and the scheme")
    rows = rows_by_name(arguments.rows, ranks)
    return rows + (equal_token_rows(rows) if arguments.equal_tokens else [])


def left_out(pairs: str | None, ranks: int) -> list[str]:
    """Name, a line each, the `pairs` of ``--rows`` without a row for `ranks` ranks."""
    lines = []
    for pair in dict.fromkeys(pairs.split(",") if pairs else ()):
        counts = sorted({row.gpus for row in rows_by_name(pair, ranks)})
        if ranks not in counts:
            lines.append(f"left out: {pair.strip()} of --rows, which has no row for {ranks} "
                         f"rank{'s' * (ranks > 1)}: its rows are for "
                         f"{', '.join(map(str, counts))}")
    return lines


def fitting(rows: list[Row], ranks: int, arguments: argparse.Namespace,
            variant: Variant) -> list[Case]:
    """Make cases of those of `rows` that are for `ranks` ranks, in this variant.

    Raises
    ------
    UsageError
        When there are none.
    """
    sizes = {name: getattr(arguments, name) for name in SIZES}
    cases = [make_case(row, arguments.preset, variant, **sizes)
             for row in rows if row.gpus == ranks]
    if cases:
        return cases
    counts = sorted({row.gpus for row in rows})
    chosen = (f"--rows {arguments.rows}" if arguments.rows is not None else
              f"--table {arguments.table} --scheme {arguments.scheme}")
    message = (f"no row of {chosen} is for {ranks} rank{'s' * (ranks > 1)}: there are rows for "
               f"{', '.join(map(str, counts))} ranks, as in mpirun -n {counts[0]} python -m bench "
               f"run")
    if ranks == 1:
        message += (". If more ranks were started, the launcher started worlds of one: mpirun and "
                    "mpi4py belong to different MPI libraries; use the mpirun of the MPI that "
                    "this Python's mpi4py loads")
    raise UsageError(message)


def grid_chooser(arguments: argparse.Namespace,
                 comm) -> Callable[[Case], tuple[int, ...]] | None:
    """Return the function that gives a case the grid of ``--grid``; None without.

    Raises
    ------
    UsageError
        On every rank, when nothing is planned for ``--machine``, there is no such machine, or it
        has no rate for the dtype.
    """
    name = arguments.machine or "cpu"
    if arguments.grid == "auto":
        of_rank_0(lambda: machine_model.load_machine(name, arguments.dtype), comm)
    elif arguments.machine:
        raise UsageError(f"--machine {name}: only --grid auto plans for a machine; give both, or "
                         f"leave --machine out")
    if arguments.grid is None:
        return None
    return lambda one: of_rank_0(lambda: grids.grid(
        arguments.grid, one.row.scheme, comm.size, name, one.variant.dtype,
        one.sizes, arguments.recompute), comm)


def stopper(file: str | None) -> Callable[[], bool]:
    """Return the function that says whether the stop file exists; never without one."""
    return lambda: file is not None and Path(file).exists()


def report(one: Case, settings: Settings, peaks: Group | None, comm, out: Path,
           trace: Path | None, extra: bool = False) -> int:
    """Measure one case, write its files, and say in a line of rank 0 how it ended.

    Parameters
    ----------
    one : Case
        The case, of as many ranks as `comm` has.
    settings : Settings
        How it is measured.
    peaks : Group or None
        The machine's rates, on rank 0; see `bench.instruments.peaks.measure_peaks`.
    comm : mpi4py.MPI.Intracomm
        All ranks; each must call this.
    out : Path
        The folder of results.
    trace : Path or None
        The file of its trace.
    extra : bool
        Whether it may be left out for lack of memory: nobody has named it.

    Returns
    -------
    int
        0 when all was written, or the row may be left out and is; the same on every rank.
    """
    # What the last row held goes back before this one asks for memory.
    gc.collect()
    backends.get(settings.backend).trim()
    try:
        found = measure(one, settings, peaks, comm, trace is not None)
        outcome = written(found, one, out, trace) if comm.rank == 0 else None
        wait_patiently(comm)    # while rank 0 writes
        status, line = comm.bcast(outcome)
    except LeftOut as error:
        status, line = int(not extra), f"left out: {one.title}: {error}"
    except Failed as error:
        status, line = 1, f"failed: {one.title}: {error}"
    if comm.rank == 0:
        journal.journal_of(out).write("row", row=one.name, outcome=line.partition(":")[0],
                                      line=line)
        say(line)
    return status


def written(found: Measured, one: Case, out: Path, trace: Path | None) -> tuple[int, str]:
    """Write the record and the trace; the exit status, and the line that says how it ended."""
    if journal.superseded(out):
        return 1, f"failed: {one.title}: another reproduce has taken over {out.name}"
    try:
        path = run_file.write_run(found.record, out, one.name)
    except StoreError as error:
        return 1, f"failed: {one.title}: {error}"
    status = chrome_trace.write_file(trace, found.trace) if trace else 0
    return status, f"done: {one.title}: {summary(found.record)}, {path.name}"


def summary(record: run_file.Run) -> str:
    """Say in a line the times of a step and by how much it differs from the serial scheme's."""
    forward, backward = (timing.typical(record.samples[phase]) for phase in PHASES)
    serial, own = layer_residuals.apart(record.checks)
    error = max(check.error for check in serial)
    checked = "a smaller model differs" if own else "differs"
    worst = max((check.error / check.tolerance for check in own), default=0.0)
    step = f", residuals up to {worst:.1g} of their tolerance" if own else ""
    return (f"forward {forward:.3g} s, backward {backward:.3g} s, {checked} from serial by "
            f"{error:.1g}{step}")
