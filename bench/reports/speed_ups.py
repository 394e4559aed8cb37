"""Make the table of the speed-up of 3-D over the other schemes."""

import dataclasses
import math

from msgspec.structs import replace

from bench.cases.paper import BASELINES, PROPOSED, Row, title
from bench.cases.selection import select_rows
from bench.document import Cell, Column, Number, Rows, Table, number_cell
from bench.records import model_run
from bench.records.folder import Results
from bench.reports import certainty, over_runs


def speed_up_table(heading: str, name: str, results: Results) -> Table:
    """Make the table of ratios of average step times at equal ranks, published and measured.

    A pair of rows with different batches is followed by the pair with equal batches, if measured.
    """
    rows = {(row.scheme, row.gpus): row for row in select_rows(name)}
    lines: Rows = []
    for cube in (row for row in rows.values() if row.scheme == PROPOSED):
        for other in BASELINES:
            if row := rows.get((other, cube.gpus)):
                lines.append(speed_up_line(f"over {title(other)}", row, cube, results))
                equal = ((replace(row, like=PROPOSED), cube), (row, replace(cube, like=other)))
                lines += [speed_up_line(f"over {title(other)}, equal batches", *pair, results)
                          for pair in equal if any(one.like and results.get(one) for one in pair)]
    batches = [Column("batch", "other"), Column("batch", "3-D")]
    published = [*batches, Column("printed"), Column("recomputed")]
    measured = [*batches, Column("tokens", "other"), Column("tokens", "3-D"), Column("speed-up"),
                Column("low"), Column("high"), Column("runs"), Column("differs")]
    return Table(f"{heading}: speed-up of 3-D", [Column("speed-up"), Column("ranks"), *(
        dataclasses.replace(column, group=group) for group, columns in (
            ("published", published), ("measured", measured)) for column in columns)], lines)


def speed_up_line(name: str, other: Row, cube: Row, results: Results) -> list[Cell]:
    """Make the line of a pair of rows; rows with another's batch have no published figures."""
    cells: list[Cell] = [name, cube.gpus]
    if other.like or cube.like:
        cells += [""] * 4
    else:
        cells += [other.batch, cube.batch, _ratio(other.average, cube.average),
                  _ratio(other.recomputed, cube.recomputed)]
    runs = [results.get(row) for row in (other, cube)]
    if None in runs:
        return [*cells, *[""] * 4, number_cell(math.nan, missing="missing"), *[""] * 4]
    batches = [run.configuration["batch"] for run in runs]
    tokens = [run.configuration["batch"] * run.configuration["seq"] for run in runs]
    found = over_runs.speed_up(*(
        [model_run.average_step_time(run.times, batch)
         for run in over_runs.repeated_runs(results, row)]
        for row, batch in zip((other, cube), batches)))
    bounds = [_cell(found.low), _cell(found.high)] if found.runs > 1 else ["", ""]
    return [*cells, *batches, *tokens, _cell(found.ratio), *bounds, found.runs,
            certainty.compare_repetitions(*runs)]


def speed_up_notes(results: Results) -> list[str]:
    """Explain speed-ups over several runs, and between different batches."""
    cubes = select_rows(schemes=PROPOSED)
    several = any(len(over_runs.repeated_runs(results, cube)) > 1 for cube in cubes)
    said = [over_runs.NOTE] * several
    unequal = any(results.get(cube) and results.get(row)
                  and results.get(cube).configuration["batch"]
                  != results.get(row).configuration["batch"]
                  for cube in cubes for row in select_rows(cube.table)
                  if row.gpus == cube.gpus)
    if not unequal:
        return said
    text = ("Speed-ups are ratios of seconds a sequence. Where the batches of both sides differ, "
            "what a larger batch gains is in them, in the published ones as well.")
    more = "" if results.equal else " --equal-tokens measures both at equal batches."
    return [*said, text + more]


def _ratio(slow: float, fast: float) -> Number:
    return _cell(slow / fast)


def _cell(ratio: float) -> Number:
    return Number(ratio, f"{ratio:.2f}x")
