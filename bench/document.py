"""Represent tables and notes as data, before they are formatted as text, LaTeX or CSV."""

import itertools
import math
from dataclasses import dataclass, field
from typing import Any, Callable, Iterable, Sequence


@dataclass(frozen=True)
class Number:
    """A number and its printed text; CSV has it with all digits.

    Attributes
    ----------
    value : float or int
        The number in the unit of its column, or a count; NaN if missing, which CSV leaves empty.
    text : str
        Its significant digits, with a sign or mark if needed.
    """

    value: float | int
    text: str

    def __str__(self) -> str:
        return self.text


def number_cell(value: float, form: str = ".4g", missing: str = "-") -> Number:
    """Make a cell of a number.

    Parameters
    ----------
    form : str
        The format of its text; a decimal point without digits after it is left out.
    missing : str
        The text where it is NaN.
    """
    value = float(value)
    return Number(value, missing if math.isnan(value) else format(value, form).rstrip("."))


@dataclass(frozen=True)
class Column:
    """A column of a table: heading, alignment, and how to make its cell from a row.

    Attributes
    ----------
    name, unit : str
        The first and the second line.
    group : str
        A title shared with neighbouring columns.
    align : {">", "<", "."}
        To the right, to the left, or, in text, with decimal points below each other; the first
        column of a table is aligned to the left.
    of : callable, optional
        Returns the cell of a row: a text, a count, or a number that `form` prints.
    form, missing : str
        See `number_cell`.
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
    """Rows under headings.

    Attributes
    ----------
    columns : sequence of Column
        The headings.
    rows : list of list of str, int or Number
        The rows, with a cell for each column.
    """

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

    Parameters
    ----------
    of, form, group, align
        As in `Column`.
    heads, units : sequence of str
        The first and the second line of each; those without a unit have none.
    """
    return [Column(name, unit, group, align, of=lambda row, k=k: of(row)[k], form=form)
            for k, (name, unit) in enumerate(itertools.zip_longest(heads, units, fillvalue=""))]


@dataclass(frozen=True)
class Notes:
    """Notes under a heading; one that begins with words in capitals and a colon is a warning."""

    heading: str
    items: list[str] = field(default_factory=list)


Part = str | Table | Notes
