"""Compute the printed numbers of papers again: tables beside them, and what differs."""

from collections import Counter
from typing import Callable, Iterable, Mapping, Sequence

from bench.document import Column, Notes, Number, Part, Table
from bench.papers.numbers import MEANINGS
from bench.papers.paper import Evaluated, Paper, evaluate, list_papers, load_paper
from mm3d.console import complain

MOST_LINES = 12    # of cells that differ, for one column
CARE = (
    "Listed are printed numbers that the relation named below does not give, from any inputs that "
    "round, or are truncated, to the printed ones.",
    "Print does not show whether the number, an input or the relation is wrong, unless a note "
    "says so. No conclusion of a paper is checked here, and some were read from copies of the "
    "text.",
    "Where a formula in print is held against a schedule, its value is what is called printed.")
MOST_COLUMNS = 3    # that are computed, side by side


def paper_tables(paper: Paper, columns: Sequence[Evaluated]) -> list[Part]:
    """Make the tables of a paper, with what was counted, and notes."""
    found = count(columns)
    said = ", ".join(f"{found[mark]} {meaning} ({mark})" for mark, meaning in MEANINGS.items()
                     if found[mark])
    notes = [f"{one.name}: {one.computed.note}" for one in columns
             if one.computed.note and not count([one])["!"]]
    own = [[one for one in columns if one.table is table] for table in paper.tables]
    return [paper.title, *(_table(each[k:k + MOST_COLUMNS]) for each in own
                           for k in range(0, len(each), MOST_COLUMNS)),
            Notes("Cells", [said, *differences(columns)]),
            Notes("Source and notes", [paper.source, *notes])]


def _table(columns: Sequence[Evaluated]) -> Table:
    """Make a table with a line for each row, and two columns for each that is computed."""
    heads, lines = [Column("")], [[cell.row] for cell in columns[0].cells]
    for one in columns:
        printed = any(cell.printed for cell in one.cells)
        heads += [Column(name, group=one.computed.column, align=".")
                  for name in ("printed", "computed")[not printed:]]
        for line, cell in zip(lines, one.cells):
            line += [Number(float(cell.printed.value), cell.printed.text)
                     if cell.printed else "-"] * printed
            mark = f" {cell.verdict}" * (cell.verdict != "-")
            line.append(Number(float(cell.computed), cell.show(cell.computed) + mark))
    return Table(columns[0].table.name, heads, lines)


def count(columns: Iterable[Evaluated]) -> Counter[str]:
    """Count the verdicts of all cells with a printed number."""
    return Counter(cell.verdict for one in columns for cell in one.cells if cell.verdict != "-")


def differences(columns: Iterable[Evaluated]) -> list[str]:
    """Say of cells that differ by how much, of many in a column of the first three; with notes."""
    lines = []
    for one in columns:
        found = [cell for cell in one.cells if cell.verdict == "!"]
        shown = found if len(found) <= MOST_LINES else found[:3]
        lines += [f"{one.name}, {cell.row}: {cell.difference}" for cell in shown]
        if shown != found:
            lines.append(f"{one.name}: {len(found) - len(shown)} more of {len(one.cells)} differ")
        lines += [f"{one.name}: {one.computed.note}"] * bool(found and one.computed.note)
    return lines


def unexpected(columns: Iterable[Evaluated]) -> list[str]:
    """Name the cells with another verdict than the file of the paper states."""
    return [f"{one.name}, {cell.row}: {cell.verdict} and not {cell.expected}, as "
            f"{cell.show(cell.computed)} is computed for "
            f"{cell.printed.text if cell.printed else 'nothing'}"
            for one in columns for cell in one.cells if cell.verdict != cell.expected]


def all_papers(found: Mapping[str, tuple[Paper, Sequence[Evaluated]]]) -> list[Part]:
    """Make one line a paper, and name what differs in any."""
    heads = [Column("paper"), Column("cells"), *(Column(mark) for mark in MEANINGS),
             Column("as expected"), Column("source", align="<")]
    counts = {name: count(columns) for name, (_, columns) in found.items()}
    lines = [[name, counts[name].total(), *(counts[name][mark] for mark in MEANINGS),
              "NO" if unexpected(columns) else "yes", paper.source.partition(",")[0]]
             for name, (paper, columns) in found.items()]
    every = sum(counts.values(), Counter())
    lines.append(["all", every.total(), *(every[mark] for mark in MEANINGS), "", ""])
    return [Table("Printed numbers, computed again from those printed beside them", heads, lines),
            Notes("Meaning", [f"{mark} {meaning}" for mark, meaning in MEANINGS.items()]),
            "reproduce --paper findings lists those that differ."]


def findings(found: Mapping[str, tuple[Paper, Sequence[Evaluated]]]) -> list[Part]:
    """List the printed numbers that do not follow from those beside them, with the relation."""
    number = sum(count(columns)["!"] for _, columns in found.values())
    parts: list[Part] = [Notes(f"{number} printed numbers differ from what those beside them give",
                               CARE)]
    for paper, columns in found.values():
        off = [one for one in columns if count([one])["!"]]
        rows = [[one.name, cell.row, cell.printed.text, cell.within, cell.off]
                for one in off for cell in one.cells if cell.verdict == "!"]
        if off:
            parts += [Table(f"{paper.title}; {paper.source}", [
                Column("where", align="<"), Column("row", align="<"), Column("printed"),
                Column("computed"), Column("printed is more by")], rows),
                Notes("Relation", map(_relation, off))]
    return parts


def _relation(one: Evaluated) -> str:
    """Say by which formula of which numbers a column is computed, with its note."""
    how = one.computed
    given = "; ".join(f"{name}: " + ", ".join(
        f"{each:g}" if isinstance(each, float) else str(each)
        for each in (value if isinstance(value, list) else [value]))
        for name, value in how.given.items())
    said = f"{how.claim}, as printed, beside {how.formula}" if how.claim else how.formula
    return (f"{one.name}: {said.replace('_', ' ')}" + f" ({given})" * bool(given)
            + f"; {how.note}" * bool(how.note))


OF_ALL = {"all": all_papers, "findings": findings}


def recompute(name: str, show: Callable[[list[Part]], None]) -> int:
    """Print the numbers of a paper, published beside computed; 1 if one is not as expected."""
    if name == "list":
        show([Table("Papers", [Column("name"), Column("title", align="<")],
                    [[one, load_paper(one).title] for one in list_papers()])])
        return 0
    names, found = (list_papers() if name in OF_ALL else [name]), {}
    for one in names:
        text = load_paper(one)
        found[one] = text, list(evaluate(text))
        if name in OF_ALL:    # the searches of one take a minute
            complain(f"{len(found)} of {len(names)}: {one}")
    show(OF_ALL[name](found) if name in OF_ALL else paper_tables(*found[name]))
    wrong = [f"  {one}: {line}" for one, (_, columns) in found.items()
             for line in unexpected(columns)]
    if wrong:
        complain(f"\n{len(wrong)} numbers are not as the files expect:", *wrong)
    return int(bool(wrong))
