"""Measure rows at several rates of the links of an emulated cluster: ``run --links``."""

import argparse
from dataclasses import replace
from itertools import product
from pathlib import Path

from bench.cases.case import make_case
from bench.cases.paper import PROPOSED, Row
from bench.cases.selection import equal_token_rows
from bench.cases.variants import Variant
from bench.cluster.spec import Cluster, parse_rate
from bench.command_line import options
from bench.command_line.publish import publish, report_failure
from bench.errors import Failed, UsageError
from bench.experiments.rows.dilation import Dilation
from bench.experiments.rows.link_sweep import SweepPlan, measure_sweep
from bench.experiments.rows.settings import Settings
from bench.records.measurements import Measurements
from mm3d.console import say
from mm3d.model.sizes import SIZES
from mm3d.schemes import find_scheme

OTHER_GRIDS = {64: [(16, 4, 1)]}    # of 3-D beside the cube, by ranks: the planner's first choice
ROUNDS = 3
Rates = list[float | None]
# Options of single rows, with what they are when they are not given.
OF_ROWS = {"warmup": None, "max_repetitions": None, "max_seconds": None, "width": 0.05,
           "traced": None, "node_memory": None, "software_share": None, "trace": None,
           "stop_file": None, "equal_tokens": False}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--links``."""
    parser.add_argument("--links", type=rates, metavar="RATES", help=(
        f"measure on one emulated cluster at each of these rates of its links, such as "
        f"50Mbit,200Mbit,unlimited, {ROUNDS} steps or --repetitions of each, and draw where each "
        f"scheme is the fastest; --grid and --inside, for 3-D, may be several with commas "
        f"between; --overlap measures plans with and without"))


def rates(text: str) -> Rates:
    """Read ``50Mbit,unlimited``; return the rates in ascending order."""
    try:
        found = {parse_rate(word) for word in text.split(",")}
        for link in found:
            Cluster(1, 1, link)    # raises its error
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return sorted(found, key=lambda link: (link is None, link))


def measure_links(arguments: argparse.Namespace, rows: list[Row], variant: Variant,
                  settings: Settings, dilation: Dilation, comm,
                  out: Path) -> tuple[int, list[Measurements]]:
    """Measure and write a sweep of each table; return the exit status and the records.

    Raises
    ------
    UsageError
        When no row is for so many ranks.
    """
    status, records = 0, []
    for table in dict.fromkeys(row.table for row in rows):
        plans = list_plans(arguments, [row for row in rows if row.table == table], variant,
                           comm.size)
        if not plans:
            continue
        try:
            record = measure_sweep(plans, arguments.links, arguments.repetitions or ROUNDS,
                                   settings, dilation, comm, say)
        except Failed as error:
            status = report_failure(f"links {table}", error, comm)
            continue
        status = max(status, publish(record, out, f"links-{table}-p{comm.size:03d}", comm))
        records.append(record)
    if not records and not status:
        raise UsageError(f"--links: no row of --table {arguments.table} --scheme "
                         f"{arguments.scheme} is for {comm.size} ranks: there are rows for "
                         f"{', '.join(map(str, sorted({row.gpus for row in rows})))}")
    return status, records


def check_waits(arguments: argparse.Namespace, settings: Settings) -> None:
    """Refuse ``--links`` outside of an emulated cluster, without ``--work wait``, and beside
    options that it has no use for.

    Raises
    ------
    UsageError
        The same on every rank.
    """
    names = ",".join("unlimited" if link is None else f"{link / 1e6:g}Mbit"
                     for link in arguments.links)
    if Cluster.from_environment() is None:
        raise UsageError(f"--links {names}: links are those of an emulated cluster; give "
                         f"--cluster, such as --cluster 16x4:50Mbit")
    if settings.waits is None:
        raise UsageError(f"--links {names}: ranks share cores, which would be measured, not the "
                         f"links; give --work wait, or --preset emulated")
    useless = [f"--{name.replace('_', '-')}" for name, default in OF_ROWS.items()
               if getattr(arguments, name) != default]
    if useless:
        raise UsageError(f"--links {names} {' '.join(useless)}: leave {' and '.join(useless)} "
                         f"out; a sweep times --repetitions steps at each rate, both batches of "
                         f"each row, and no others")


def list_plans(arguments: argparse.Namespace, rows: list[Row], variant: Variant,
               ranks: int) -> list[SweepPlan]:
    """List the plans of a table on so many ranks; those of other batches than 3-D's twice, and
    those that can overlap also without, if that is wanted.

    Raises
    ------
    UsageError
        When ``--grid`` is no list of grids.
    """
    rows = [row for row in rows if row.gpus == ranks]
    rows += [row for row in equal_token_rows(rows) if row.scheme != PROPOSED and row not in rows]
    sizes = {name: getattr(arguments, name) for name in SIZES}
    cases = [make_case(row, arguments.preset, variant, **sizes) for row in rows]
    try:
        grids = ([options.grid_sizes(word) for word in arguments.grid.split(",")]
                 if arguments.grid else [None, *OTHER_GRIDS.get(ranks, [])])
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--grid {error}") from error
    cubes = list(product(grids, arguments.inside.split(",")))
    plain = replace(variant, overlap=0)
    both = [replace(one, variant=how) for one in cases for how in dict.fromkeys([plain, variant])
            if how == plain or "overlap" in find_scheme(one.row.scheme).options]
    return [SweepPlan(one, *way) for one in both
            for way in (cubes if one.row.scheme == PROPOSED else [(None, "auto")])]
