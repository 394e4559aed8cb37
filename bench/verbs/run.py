"""Measure the selected rows that have as many ranks as the job, under mpirun."""

import argparse
import random
from dataclasses import replace
from pathlib import Path
from typing import Callable, Sequence

from bench.agreement import broadcast_from_rank_0
from bench.cases import variants
from bench.cases.case import Case, check_verifiable, make_case, row_stack, shuffle_cases
from bench.cases.paper import Row
from bench.cases.selection import equal_token_rows, rows_by_name, select_rows
from bench.cases.variants import Variant
from bench.cluster.spec import rate_text
from bench.command_line import measuring, row_options, waiting
from bench.command_line.config_options import add_fields, read_grid, told
from bench.command_line.publish import check_trace_file, publish_row
from bench.errors import UsageError
from bench.experiments.rows.dilation import set_links
from bench.experiments.rows.row import measure_case
from bench.experiments.rows.settings import Settings, check_backend, check_grids
from bench.instruments.stopping import stop_file_exists
from bench.instruments import chrome_trace, slow_links
from bench.instruments.peaks import measure_peaks
from bench.prediction import machine_model, node_memory
from bench.records import model_run, run_file
from bench.records.journal import claim_folder
from bench.records.measurements import Group
from bench.records.notes import split_checks
from mm3d.arrays import backend as backends
from mm3d.config import Division, Model
from mm3d.console import say
from mm3d.model.sizes import SIZES
from mm3d.tracing.events import PHASES

GROUP = "Measure the paper's tables"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``."""
    row_options.add_row_options(parser)
    add_fields(parser, Model, SIZES, told(Model, SIZES, **dict.fromkeys(SIZES, ": the preset's")))
    parser.add_argument("--rows", metavar="NAMES", help=(
        "measure these rows, instead of --table and --scheme: weak:3d,strong:1d; weak:3d:1d is "
        "the row of 3d with the batch of 1d"))
    add_fields(parser, Division, ["grid"], about="{}, or auto for the planner's choice", type=str)
    parser.add_argument("--inside", default="auto", metavar="AXIS", help=(
        "the direction of the grid that stays inside a node, where ranks fill one node after the "
        "other (default auto: the one that moves the most words)"))
    parser.add_argument("--trace", metavar="FILE", help=(
        "write the last traced step of each row for chrome://tracing and ui.perfetto.dev; the "
        "names of several rows are added to the file's"))
    parser.add_argument("--stop-file", metavar="FILE", help=(
        "when this file exists, end the row with the repetitions done so far and begin no other, "
        "as a job does near its time limit"))
    parser.add_argument("--links", type=measuring.rates, metavar="RATES", help=(
        "in an emulated cluster with --work wait: measure the rows at each of these rates of its "
        "links, such as 50Mbit,200Mbit,unlimited, and draw which is the fastest where, with all "
        "others of the folder that waited as long"))


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure every selected row of `comm.size` ranks; return the exit status."""
    rows = rows_of_names(arguments, comm.size)
    settings, variant = read_row_settings(arguments, rows, comm)
    cases = make_cases(rows, comm.size, arguments, variant)
    check_verifiable(cases)
    check_grids(cases, settings, comm)
    out = claim_folder(arguments.out, comm)
    trace = check_trace_file(arguments.trace, comm, arguments.traced)
    if comm.rank == 0:
        unnamed = [f"results in {out}"] * (arguments.out is None)
        for line in [*unnamed, *describe_left_out(arguments.rows, comm.size)]:
            say(line)
    peaks = None if variant.waits else measure_peaks(
        backends.get(arguments.backend), variant.dtype, comm, quick=arguments.preset == "tiny")
    statuses = []
    for rate, there in at_rates(settings, arguments.links):
        if rate and comm.rank == 0:
            say(f"links of {rate}:")
        for one in shuffle_cases(cases, settings.order):
            file = trace and chrome_trace.trace_file(
                trace, f"{one.name}-{rate}".rstrip("-"), len(cases) * len(arguments.links or [0]))
            status, line = publish_row(
                one, lambda: measure_row(one, there, peaks, comm, file is not None),
                lambda found: write_row(found, one, out, file), out, comm)
            if settings.dilation:    # as they were, for whatever follows in this cluster
                set_links(settings.dilation.link, comm, settings.dilation.change)
            slow = slow_links.find_slow_nodes(comm)
            if slow and comm.rank == 0:
                say(*slow)
            # Nobody has named a row of --equal-tokens: it may be left out for lack of memory.
            spared = arguments.rows is None and one.row.like and line.startswith("left out")
            statuses.append(0 if spared else status)
    if arguments.links:
        from bench.reports.figures.link_sweep import show_rates    # other rows draw nothing
        statuses.append(comm.bcast(comm.rank == 0 and show_rates(out, arguments.show)))
    return max(statuses)


def at_rates(settings: Settings,
             links: Sequence[float | None] | None) -> list[tuple[str, Settings]]:
    """List rates of the links in random order, each with settings for it; "" as they are."""
    if not links:
        return [("", settings)]
    return [(rate_text(link), replace(settings, dilation=replace(settings.dilation, link=link)))
            for link in random.Random(settings.order).sample(links, len(links))]


def read_row_settings(arguments: argparse.Namespace, rows: list[Row],
                      comm) -> tuple[Settings, Variant]:
    """Return the settings and the variant that the options give to all rows."""
    warmup, limits = row_options.step_counts(arguments)
    grid = grid_chooser(arguments, comm)
    check_backend(arguments.backend, comm)
    library = backends.get(arguments.backend)
    variant, memory = row_options.variant(arguments, library), row_options.node_memory(arguments)
    variants.check_variant(variant, (row.scheme for row in rows), library, arguments.recompute)
    order = comm.bcast(random.SystemRandom().randrange(2 ** 31) if arguments.order is None
                       else arguments.order)
    waits, dilation = waiting.waits_and_dilation(arguments, comm)
    if arguments.links and not dilation:
        raise UsageError("--links: rates are those of the links of an emulated cluster, while "
                         "ranks wait for their work; give --cluster, such as --cluster "
                         "16x4:50Mbit, and --preset emulated or --work wait")
    return Settings(
        warmup=warmup, limits=limits, order=order, backend=arguments.backend, seed=arguments.seed,
        traced=row_options.traced_steps(arguments), recompute=arguments.recompute, grid=grid,
        inside=arguments.inside, watched=arguments.watched,
        stop=lambda: bool(arguments.stop_file) and stop_file_exists(Path(arguments.stop_file)),
        fits=lambda one, sizes, comm: node_memory.check_row_fits(
            one, sizes, arguments.recompute, library, comm, memory),
        waits=waits, dilation=dilation), variant


def rows_of_names(arguments: argparse.Namespace, ranks: int) -> list[Row]:
    """List the rows that the options name; for a scheme that the paper lacks, of `ranks` ranks."""
    if arguments.rows is None:
        rows = select_rows(arguments.table, arguments.scheme, ranks)
    else:
        for option, default in (("table", "all"), ("scheme", "paper")):
            value = getattr(arguments, option)
            if value != default:
                raise UsageError(f"--rows {arguments.rows} --{option} {value}: leave one of them "
                                 f"out; --rows names both the table and the scheme")
        rows = rows_by_name(arguments.rows, ranks)
    return rows + (equal_token_rows(rows) if arguments.equal_tokens else [])


def describe_left_out(pairs: str | None, ranks: int) -> list[str]:
    """Describe, a line each, the `pairs` of ``--rows`` without a row for `ranks` ranks."""
    lines = []
    for pair in dict.fromkeys(pairs.split(",") if pairs else ()):
        counts = sorted({row.gpus for row in rows_by_name(pair, ranks)})
        if ranks not in counts:
            lines.append(f"left out: {pair.strip()} of --rows, which has no row for {ranks} "
                         f"rank{'s' * (ranks > 1)}: its rows are for "
                         f"{', '.join(map(str, counts))}")
    return lines


def make_cases(rows: list[Row], ranks: int, arguments: argparse.Namespace,
               variant: Variant) -> list[Case]:
    """Make the cases of all `rows` that are for `ranks` ranks; UsageError when there are none."""
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
    """Return the function that gives a case the grid of ``--grid``; None without."""
    name = arguments.machine or "cpu"
    if arguments.grid == "auto":
        broadcast_from_rank_0(lambda: machine_model.load_machine(name, arguments.dtype), comm)
    elif arguments.machine and row_options.chosen_work(arguments) == "compute":
        raise UsageError(f"--machine {name}: only --grid auto plans for a machine; give both, or "
                         f"leave --machine out")
    if arguments.grid is None:
        return None
    return lambda one: broadcast_from_rank_0(lambda: read_grid(
        arguments.grid, one.row.scheme, comm.size, name,
        row_stack(one.variant, one.sizes, arguments.recompute)), comm)


def measure_row(one: Case, settings: Settings, peaks: Group | None, comm, traced: bool) -> tuple:
    """Measure a case, with the memory that idle pools give back; as `measure_case`."""
    backends.get(settings.backend).release_idle_memory()
    return measure_case(one, settings, peaks, comm, traced)


def write_row(found: tuple, one: Case, out: Path, trace: Path | None) -> tuple[int, str]:
    """Write the record and the trace; return the exit status, and what the row's line says."""
    record, document = found
    path = run_file.write_run(record, out, one.name)
    status = chrome_trace.write_file(trace, document) if trace else 0
    return status, f"{summarize(record)}, {path.name}"


def summarize(record: model_run.Run) -> str:
    """Return in a line the times of a step and its difference from the serial scheme's."""
    forward, backward = (model_run.typical(record.samples[phase]) for phase in PHASES)
    serial, own = split_checks(record.checks)
    error = max(check.error for check in serial)
    checked = "a smaller model differs" if own else "differs"
    worst = max((check.share for check in own), default=0.0)
    step = f", residuals up to {worst:.1g} of their tolerance" if own else ""
    slowed = (f", links and waits slowed {record.dilation:.2g} times"
              if record.configuration.get("dilation", 1) != 1 else "")
    return (f"forward {forward:.3g} s, backward {backward:.3g} s{slowed}, {checked} from serial "
            f"by {error:.1g}{step}")
