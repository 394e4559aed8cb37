"""Compute the printed numbers of papers again, and say which are not as their files expect."""

from typing import Callable

from bench.document import Column, Part, Table
from bench.papers import paper, tables
from mm3d.console import complain

OF_ALL = {"all": tables.all_papers, "findings": tables.findings}


def recompute(name: str, show: Callable[[list[Part]], None]) -> int:
    """Print the numbers of a paper, published beside computed; 1 if one is not as expected."""
    if name == "list":
        show([Table("Papers", [Column("name"), Column("title", align="<")],
                    [[one, paper.load_paper(one).title] for one in paper.list_papers()])])
        return 0
    names, found = (paper.list_papers() if name in OF_ALL else [name]), {}
    for one in names:
        text = paper.load_paper(one)
        found[one] = text, list(paper.evaluate(text))
        if name in OF_ALL:    # the searches of one take a minute
            complain(f"{len(found)} of {len(names)}: {one}")
    show(OF_ALL[name](found) if name in OF_ALL else tables.paper_tables(*found[name]))
    wrong = [f"  {one}: {line}" for one, (_, columns) in found.items()
             for line in tables.unexpected(columns)]
    if wrong:
        complain(f"\n{len(wrong)} numbers are not as the files expect:", *wrong)
    return int(bool(wrong))
