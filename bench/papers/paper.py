"""Read the papers in ``printed``, and evaluate their cells."""

import inspect
from dataclasses import dataclass
from fractions import Fraction
from importlib import resources
from pathlib import Path
from typing import Any, Callable, Iterator, Mapping

import msgspec

from bench.cases.paper import load_tables
from bench.errors import UsageError, require_known
from bench.papers.numbers import (MEANINGS, ComparedCell, ExactInterval, Rounded, compute,
                                  compute_reach, judge_number)
from bench.text_files import decode, read_text

ENDING = ".toml"
Value = bool | int | float | str    # a text of digits is rounded, another number is exact


class Computed(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A printed column that is computed, or a heading for what is not printed.

    Attributes
    ----------
    expect : str
        The verdict of each row, a sign of `MEANINGS`, or - where nothing is printed.
    given : dict
        Arguments: the name of a column or constant, a number, a text, or a list of such.  Other
        arguments are the columns and constants of their names.
    unit : number
        What 1 in the column stands for.
    claim : str
        Instead of a printed column: the formula in print, with the same arguments.
    searched : bool
        Whether less is better, and was searched for.
    """

    column: str
    formula: str
    expect: str = ""
    given: dict[str, Value | list[Value]] = {}
    unit: int | float = 1
    claim: str = ""
    searched: bool = False
    note: str = ""


class PrintedTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A printed table: rows, the columns that name them, and the columns that are computed.

    Instead of columns and rows, `cases` names a table of `bench.cases`.
    """

    name: str
    cells: list[Computed]
    columns: list[str] = []
    rows: list[list[Value]] = []
    label: list[str] = []
    constants: dict[str, Value] = {}
    cases: str = ""


class Paper(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of a file: authors and subject, where it is printed and what was seen of it,
    its tables, texts among them, and constants that all have in common."""

    title: str
    source: str
    tables: list[PrintedTable]
    constants: dict[str, Value] = {}


@dataclass(frozen=True)
class Evaluated:
    """A computed column of a table: a cell for each row."""

    table: PrintedTable
    computed: Computed
    cells: list[ComparedCell]

    @property
    def name(self) -> str:
        """Return the names of the table and of the column."""
        return f"{self.table.name}, {self.computed.column}"


def list_papers() -> list[str]:
    """List the papers in alphabetical order."""
    return sorted(file.name.removesuffix(ENDING)
                  for file in resources.files("bench.papers").joinpath("printed").iterdir()
                  if file.name.endswith(ENDING))


def load_paper(name: str) -> Paper:
    """Read a paper by its name, or a file of the same form by its path; UsageError otherwise."""
    path: Any = Path(name)
    if not name.endswith(ENDING):
        known = require_known({one: one for one in list_papers()}, name, "paper",
                              f"list, all, findings or a file NAME{ENDING} would do too")
        path = resources.files("bench.papers").joinpath("printed", known + ENDING)
    text = read_text(path, name, "a file such as those in bench/papers/printed")
    try:
        return decode(text, Paper)
    except ValueError as error:
        raise UsageError(f"paper {name}: {error}; files in bench/papers/printed would do"
                         ) from error


def evaluate(paper: Paper) -> Iterator[Evaluated]:
    """Compute all columns of a paper; UsageError where its file is not complete."""
    from bench.papers.formulas import FORMULAS    # not needed to list papers
    for table in paper.tables:
        rows = _rows_of(table)
        for one in table.cells:
            where = f"{paper.title}, {table.name}, {one.column}"
            formulas = [require_known(FORMULAS, name, f"{where}: formula")
                        for name in (one.formula, one.claim) if name]
            shown = one.column not in rows[0] and not one.claim    # nothing is printed
            expected = one.expect or "-" * len(rows) * shown
            if len(expected) != len(rows) or set(expected) - {"-", *MEANINGS}:
                raise UsageError(f"{where}: expect {one.expect!r}: one of {' '.join(MEANINGS)} or "
                                 f"- for each of {len(rows)} rows would do")
            cells = []
            for row, verdict in zip(rows, expected):
                try:
                    label = " ".join(str(row[name]) for name in table.label or [*row][:1])
                    known = {name: _number(value) for name, value in (
                        paper.constants | table.constants | row).items()}
                    cells.append(ComparedCell(label, *_judge(one, formulas, known), verdict))
                except (ArithmeticError, TypeError, ValueError, LookupError) as error:
                    why = {ZeroDivisionError: "a division by 0", KeyError: (
                        f"label {error}: a name of a column would do")}.get(type(error), error)
                    raise UsageError(f"{where}, {[*row.values()][0]}: {why}") from error
            yield Evaluated(table, one, cells)


def _rows_of(table: PrintedTable) -> list[dict[str, Value]]:
    """Return the rows of a table by column; UsageError unless there are some of equal length."""
    columns, rows = table.columns, table.rows
    if table.cases:    # whose times have three decimals in print
        columns = ["scheme", "ranks", "batch", "hidden", "forward", "backward", "average"]
        rows = [[one.scheme, one.gpus, one.batch, one.hidden, *(
            f"{time:.3f}" for time in (one.forward, one.backward, one.average))]
            for one in load_tables().rows if one.table == table.cases]
    if twice := [name for name in columns if columns.count(name) > 1]:
        raise UsageError(f"{table.name}: {columns.count(twice[0])} columns are called "
                         f"{twice[0]!r}: one would do")
    for row in rows or [[]]:
        if len(row) != len(columns) or not row:
            raise UsageError(f"{table.name}: the row {row} has {len(row)} values: one for each of "
                             f"{len(columns) or 'some'} columns would do")
    return [dict(zip(columns, row)) for row in rows]


def _number(value: Value) -> Any:
    """Return a number as it counts: a text of digits is rounded, all else is exact."""
    if isinstance(value, float):
        return Fraction(str(value))
    return (Rounded.read(value) or value) if isinstance(value, str) else value


def _judge(one: Computed, formulas: list[Callable[..., Any]], known: Mapping[str, Any]
           ) -> tuple[Rounded | None, Fraction, ExactInterval, str]:
    """Return the printed number of a cell, the computed one, its interval, and the verdict."""
    taken = {name: None for each in formulas for name in inspect.signature(each).parameters}
    if unknown := one.given.keys() - taken:
        raise ValueError(f"given {min(unknown)!r}: {', '.join(taken)} would do")
    unit, every = Fraction(str(one.unit)), [_collect(each, one.given, known) for each in formulas]
    found = compute(formulas[0], every[0]) / unit
    if one.claim:
        value = compute(formulas[1], every[1]) / unit
        return (Rounded(f"{float(value):g}", value, Fraction(0)), found, (found, found),
                "=" if value == found else "!")
    printed = known.get(one.column, "")
    if not isinstance(printed, Rounded) and printed != "":
        raise ValueError(f"{printed!r} is no printed number: a text of digits would do")
    printed = printed or None
    return printed, found, *judge_number(printed, found, lambda: tuple(
        end / unit for end in compute_reach(formulas[0], every[0])), one.searched)


def _collect(formula: Callable[..., Any], given: Mapping[str, Any], known: Mapping[str, Any]
             ) -> dict[str, Any]:
    """Return the arguments of a formula: those given, else the columns and constants so named."""
    found = {}
    for name, one in inspect.signature(formula).parameters.items():
        if name in given or name in known:
            found[name] = _resolve(given.get(name, name), known, one.annotation is str)
        elif one.default is one.empty:
            raise ValueError(f"{formula.__name__} needs {name}: a column or a constant of this "
                             f"name would do, or given = {{{name} = ...}}")
    return found


def _resolve(value: Any, known: Mapping[str, Any], text: bool) -> Any:
    """Return what a value stands for, which is a number unless it may be a `text`."""
    if isinstance(value, list):
        return [_resolve(one, known, text) for one in value]
    found = known.get(value) if isinstance(value, str) else _number(value)
    if text:
        return found if isinstance(found, str) else value
    found = Rounded.read(value) if found is None else found
    if found is None or isinstance(found, str):
        raise ValueError(f"{value!r} is neither a number nor a column or constant of numbers")
    return found
