"""Select cases by table, scheme, ranks and name."""

from typing import Iterable

import msgspec

from bench.cases.paper import HEADINGS, PAPER, PROPOSED, Row, TITLES, load_tables, unpublished_row
from bench.errors import UsageError, require_known
from mm3d.schemes import find_scheme


def equal_token_rows(rows: Iterable[Row]) -> list[Row]:
    """Make the additional rows that compare 3-D with other schemes at equal batches.

    Where a 3-D row and another scheme's of the same table and ranks have different batches, each
    of the two that is among `rows` is added again with the batch of the other.
    """
    rows, more = list(rows), []
    known = [row for row in dict.fromkeys([*rows, *load_tables().rows]) if not row.like]
    for cube in (row for row in known if row.scheme == PROPOSED):
        for other in known:
            if (other.table, other.gpus) == (cube.table, cube.gpus) and other.batch != cube.batch:
                more += [msgspec.structs.replace(one, like=like) for one, like in (
                    (other, PROPOSED), (cube, other.scheme)) if one in rows]
    return list(dict.fromkeys(more))


def select_rows(tables: str = "all", schemes: str = "paper",
                ranks: int | None = None) -> list[Row]:
    """Select the rows of some tables and schemes: the paper's in its order, then the others.

    Names are separated by commas, or "all"; "all" schemes are those that divide the work, "paper"
    those of the paper.  Rows of a scheme that the paper lacks are of `ranks` ranks, by default of
    each of the table's rank counts for which it has a grid; "all" leaves out schemes without a
    grid.

    UsageError when a name is unknown.
    """
    wanted_tables = _parse_names(tables, list(HEADINGS), "--table")
    wanted_schemes = {"paper": PAPER, "all": [
        name for name in TITLES if find_scheme(name).divides_work]}.get(
            schemes.lower()) or _parse_names(schemes, list(TITLES), "--scheme")
    rows = [row for row in load_tables().rows
            if row.table in wanted_tables and row.scheme in wanted_schemes]
    return rows + [unpublished_row(table, scheme, count) for table in wanted_tables
                   for scheme in wanted_schemes if scheme not in PAPER
                   for count in ([ranks] if ranks else _ranks_with_grid(table, scheme))
                   if schemes.lower() != "all" or _has_grid(scheme, count)]


def rows_by_name(pairs: str, ranks: int) -> list[Row]:
    """Select rows by names such as ``weak:3d,strong:1d``, each once.

    ``weak:3d:1d`` is the 3-D row with the batch of the 1-D row.  Rows of schemes that the paper
    lacks are for `ranks` ranks.  UsageError when a name is unknown, or is not a pair.
    """
    found = []
    for pair in pairs.split(","):
        table, colon, scheme = pair.partition(":")
        if not colon:
            raise UsageError(f"--rows {pair}: give a table and a scheme, as in weak:3d")
        scheme, colon, like = scheme.partition(":")
        if colon:
            like = require_known({name: name for name in TITLES}, like, "--rows")
        found += [msgspec.structs.replace(row, like=like)
                  for row in select_rows(table, scheme, ranks)]
    return list({(row.key, row.like): row for row in found}.values())


def _ranks_with_grid(table: str, scheme: str) -> list[int]:
    """Return the numbers of ranks in `table` for which `scheme` has a grid."""
    return [ranks for ranks in sorted({row.gpus for row in load_tables().rows
                                       if row.table == table}) if _has_grid(scheme, ranks)]


def _has_grid(scheme: str, ranks: int) -> bool:
    """Return whether `scheme` chooses a grid for `ranks` ranks."""
    try:
        find_scheme(scheme).default_grid(ranks)
    except ValueError:
        return False
    return True


def _parse_names(given: str, known: list[str], option: str) -> list[str]:
    names = [name.strip() for name in given.split(",")]
    if given.lower() == "all":
        return known
    return list(dict.fromkeys(require_known({k: k for k in known}, name, option, "all")
                              for name in names))
