"""Format tables and notes as text, reStructuredText, Markdown, LaTeX, JSON or CSV.

A document is a list of parts: `Table`, `Notes`, or a plain string, which is a heading.
"""

import csv
import io
import itertools
import json
import math
import re
import textwrap
from functools import partial
from typing import Callable, Iterable

from bench.document import Cell, Column, Notes, Number, Part, Table

WIDTH = 100


def render(parts: Iterable[Part], form: str = "text") -> str:
    """Format the document in one of `FORMATS`."""
    return FORMATS[form](list(parts))


def format_text(parts: list[Part]) -> str:
    """Format as aligned columns, for a terminal."""
    return "\n\n".join(f"{part.title}\n\n{_aligned(part)}" if isinstance(part, Table) else
                       f"{part.heading}\n{_listed(part, '  - ')}" if isinstance(part, Notes) else
                       part for part in parts)


def _listed(notes: Notes, bullet: str, escape: Callable[[str], str] = str) -> str:
    return "\n".join(textwrap.fill(
        escape(note), WIDTH, initial_indent=bullet, subsequent_indent=" " * len(bullet),
        break_long_words=False, break_on_hyphens=False) for note in notes.items)


def _aligned(table: Table) -> str:
    """Pad each cell to the width of its column; "|" where groups meet."""
    columns, rows = list(table.columns), _pointed(table)
    spans, bars = [], 0
    for (before, *_), (group, first, last) in itertools.pairwise([("", 0, 0), *table.groups()]):
        if before and group:
            for row in (columns, *rows):
                row.insert(first + bars, Column("|", "|") if row is columns else "|")
            bars += 1
        spans += [(group, first + bars, last + bars)] * bool(group)
    heads = [[column.name for column in columns], [column.unit for column in columns]]
    heads = heads if any(column.unit for column in table.columns) else heads[:1]
    widths = [max(map(len, column)) for column in zip(*heads, *rows)]
    for group, first, last in spans:
        widths[last - 1] += max(0, len(group) + 2 - sum(widths[first:last])
                                - 2 * (last - first - 1))
    over = ""
    for group, first, last in spans:
        over = over.ljust(sum(widths[:first]) + 2 * first)
        room = sum(widths[first:last]) + 2 * (last - first - 1)
        over += f" {group} ".center(room, "-" if room >= len(group) + 4 else " ")
    left = [True, *(column.align == "<" for column in columns[1:])]
    lines = ["  ".join(cell.ljust(width) if before else cell.rjust(width)
                       for cell, width, before in zip(row, widths, left)).rstrip()
             for row in [*heads, ["-" * width for width in widths], *rows]]
    return "\n".join([over.rstrip(), *lines] if over else lines)


def _pointed(table: Table) -> list[list[str]]:
    """Pad the cells so that decimal points align."""
    rows = [list(map(str, row)) for row in table.rows]
    for k, column in enumerate(table.columns):
        if column.align == ".":
            longest = max((len(_fraction(row[k])) for row in rows), default=0)
            for row in rows:
                row[k] += " " * (longest - len(_fraction(row[k])))
    return rows


def _fraction(number: str) -> str:
    """Return the decimal point of a number and what follows it."""
    return "".join(number.partition(".")[1:])


def format_markup(form: str, special: str, title: Callable[[str, str], str],
                  parts: list[Part]) -> str:
    """Format in a markup of tabulate's, in which some characters are `special`.

    The function `title` makes one of a heading and "=" or "-".
    """
    from tabulate import tabulate    # where it is needed: ranks that print nothing start sooner
    blank = r"\ " if form == "rst" else ""    # else the row would be joined to the one above
    found = []

    def escaped(words: str) -> str:
        return re.sub(rf"([{special}])", r"\\\1", words)
    for part in parts:
        if isinstance(part, Table):
            rows = [[escaped(str(cell)) or blank for cell in row] for row in part.rows]
            heads = [escaped(column.full) or blank for column in part.columns]
            sides = ["left" if left else "right" for left in part.left]
            found += [title(escaped(part.title), "-"),
                      tabulate(rows, heads, tablefmt=form, disable_numparse=True,
                               colalign=sides if rows else None)]
        elif isinstance(part, Notes):
            found += [f"**{escaped(part.heading)}**", _listed(part, "- ", escaped)]
        else:
            found.append(title(escaped(part), "="))
    return "\n\n".join(found)


LATEX_ESCAPES = {"\\": r"\textbackslash{}", "~": r"\textasciitilde{}", "^": r"\textasciicircum{}",
                 "<": r"\textless{}", ">": r"\textgreater{}", "|": r"\textbar{}",
                 **{character: "\\" + character for character in "&%$#_{}"}}


def format_latex(parts: list[Part]) -> str:
    """Format as LaTeX; the tables need ``\\usepackage{booktabs}``."""
    found = []
    for part in parts:
        if isinstance(part, Table):
            found.append(_latex_table(part))
        elif isinstance(part, Notes):
            items = "\n".join(rf"\item {_latex_escaped(note)}" for note in part.items)
            found.append(f"\\paragraph{{{_latex_escaped(part.heading)}}}\n"
                         f"\\begin{{itemize}}\n{items}\n\\end{{itemize}}")
        else:
            found.append(rf"\section*{{{_latex_escaped(part)}}}")
    return "\n\n".join(found)


def _latex_table(table: Table) -> str:
    def line(cells: Iterable) -> str:
        return " & ".join(_latex_escaped(str(cell)) for cell in cells) + r" \\"
    over = []
    if table.grouped:
        groups = list(table.groups())
        over = [" & ".join(rf"\multicolumn{{{last - first}}}{{c}}{{{_latex_escaped(group)}}}"
                           for group, first, last in groups) + r" \\",
                " ".join(rf"\cmidrule(lr){{{first + 1}-{last}}}"
                         for group, first, last in groups if group)]
    heads = [line(column.name for column in table.columns),
             line(column.unit for column in table.columns)]
    heads = heads if any(column.unit for column in table.columns) else heads[:1]
    return "\n".join([
        r"\begin{table}[ht]", r"\centering", r"\footnotesize",
        rf"\caption{{{_latex_escaped(table.title)}}}",
        rf"\begin{{tabular}}{{{''.join('l' if left else 'r' for left in table.left)}}}",
        r"\toprule", *over, *heads,
        r"\midrule", *map(line, table.rows), r"\bottomrule", r"\end{tabular}", r"\end{table}"])


def _latex_escaped(words: str) -> str:
    return "".join(LATEX_ESCAPES.get(character, character) for character in words)


def format_csv(parts: list[Part]) -> str:
    """Format all tables as one CSV, titles first, with numbers in full and no notes."""
    tables = [part for part in parts if isinstance(part, Table)]
    names = ["table", *dict.fromkeys(name for table in tables for name in table.names)]
    out = io.StringIO()
    writer = csv.DictWriter(out, names, lineterminator="\n")
    writer.writeheader()
    for table in tables:
        for row in table.rows:
            writer.writerow({"table": table.title} | dict(zip(table.names, map(_in_full, row))))
    return out.getvalue().rstrip("\n")


def format_json(parts: list[Part]) -> str:
    """Format as a list of tables, notes and headings; numbers in full, those of no value null."""
    found: list[dict] = []
    for part in parts:
        if isinstance(part, Table):
            found.append({"table": part.title, "columns": part.names, "rows": [
                [cell if not isinstance(cell, Number) else
                 cell.value if math.isfinite(cell.value) else None for cell in row]
                for row in part.rows]})
        elif isinstance(part, Notes):
            found.append({"notes": part.heading, "items": part.items})
        else:
            found.append({"heading": part})
    return json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False)


def _in_full(cell: Cell) -> str | int:
    """Return a cell of CSV: a number with all digits, a count as a whole number."""
    if not isinstance(cell, Number):
        return cell
    if isinstance(cell.value, int):
        return cell.value
    return "" if math.isnan(cell.value) else repr(float(cell.value))


FORMATS: dict[str, Callable[[list[Part]], str]] = {
    "text": format_text,
    "rst": partial(format_markup, "rst", r"\\*`|_", lambda heading, rule: (
        f"{heading}\n{rule * len(heading)}")),
    "markdown": partial(format_markup, "github", r"\\*`|_<#~", lambda heading, rule: (
        f"{'##' if rule == '=' else '###'} {heading}")),
    "latex": format_latex, "json": format_json, "csv": format_csv}
