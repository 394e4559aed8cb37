"""Represent tables and notes as data, before they are formatted as text, LaTeX or CSV."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Sequence


@dataclass(frozen=True)
class Number:
    """A number and its printed text; CSV has it with all digits.

    `value` is in the unit of its column, or a count; NaN if missing, which CSV leaves empty.
    `text` has its significant digits, with a sign or mark if needed.
    """

    value: float | int
    text: str

    def __str__(self) -> str:
        return self.text


def number_cell(value: float, form: str = ".4g", missing: str = "-") -> Number:
    """Make a cell of a number by the format `form`; a point without digits after it is left out.

    `missing` is the text where it is NaN.
    """
    value = float(value)
    return Number(value, missing if math.isnan(value) else format(value, form).rstrip("."))


@dataclass(frozen=True)
class Column:
    """A column of a table: heading in two lines, alignment, and how to make its cell from a row.

    `group` is a title shared with neighbouring columns.  `align` is ">" to the right, "<" to the
    left (as the first always is), or, in text, "." with points below each other.  `of` returns
    the cell of a row: a text, a count, or a number that `form` and `missing` print, see
    `number_cell`.
    """

    name: str
    unit: str = ""
    group: str = ""
    align: str = ">"
    of: Callable[[Any], Any] | None = None
    form: str = ".4g"
    missing: str = "-"

    def cell(self, row: Any) -> "Cell":
        """Make the cell of a row."""
        found = self.of(row)
        return found if isinstance(found, (str, int, Number)) else number_cell(
            found, self.form, self.missing)

    @property
    def full(self) -> str:
        """Return the heading in one line."""
        return " ".join(filter(None, (self.group, self.name, self.unit)))


Cell = str | int | Number
Rows = list[list[Cell]]


@dataclass(frozen=True)
class Table:
    """Rows under headings, each with a cell for each column."""

    title: str
    columns: Sequence[Column]
    rows: Rows

    def groups(self) -> Iterable[tuple[str, int, int]]:
        """Return the shared titles of columns, "" for none, each with its first and last + 1."""
        place = 0
        for group, columns in itertools.groupby(self.columns, lambda column: column.group):
            first, place = place, place + len(list(columns))
            yield group, first, place

    @property
    def names(self) -> list[str]:
        """Return the headings, each in one line, numbered where one comes again."""
        found = [column.full for column in self.columns]
        return [name + f" {found[:k].count(name) + 1}" * (name in found[:k])
                for k, name in enumerate(found)]

    @property
    def grouped(self) -> bool:
        """Return whether columns share a title."""
        return any(column.group for column in self.columns)

    @property
    def left(self) -> list[bool]:
        """Return which columns are aligned to the left."""
        return [column.align == "<" or k == 0 for k, column in enumerate(self.columns)]


def make_table(title: str, columns: Sequence[Column], rows: Iterable[Any]) -> Table:
    """Make a table with a line for each row, from columns with `of`."""
    return Table(title, columns, [[column.cell(row) for column in columns] for row in rows])


def spread(of: Callable[[Any], Sequence], form: str, group: str = "",
           heads: Sequence[str] = ("median", "low", "high"), units: Sequence[str] = (),
           align: str = ">") -> list[Column]:
    """Make a column for each of the first numbers that `of` returns for a row.

    `of`, `form`, `group` and `align` are as in `Column`; `heads` and `units` the first and second
    line of each, "" for those without a unit.
    """
    return [Column(name, unit, group, align, of=lambda row, k=k: of(row)[k], form=form)
            for k, (name, unit) in enumerate(itertools.zip_longest(heads, units, fillvalue=""))]


@dataclass(frozen=True)
class Notes:
    """Notes under a heading; one that begins with words in capitals and a colon is a warning."""

    heading: str
    items: list[str] = field(default_factory=list)


Part = str | Table | Notes
