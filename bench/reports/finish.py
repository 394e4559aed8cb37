"""Print the tables and draw the figures of a folder, and keep them beside its files."""

from pathlib import Path
from typing import Callable

from bench.records import atomic
from bench.reports.figures.every_figure import plots
from bench.reports.paper_tables import tables


def finish(out: Path, say: Callable[[str], object], figures: bool = True) -> None:
    """Write ``tables.txt`` and, unless `figures` is False, the figures into the folder `out`.

    Parameters
    ----------
    out : Path
        A folder of results.
    say : callable
        Shows a text to the user: the tables, and the names of the figures.
    figures : bool
        Whether to draw the figures.

    Raises
    ------
    StoreError
        When there are no results in `out`.
    OSError
        When a file cannot be written.
    """
    text = tables(out)
    say(f"\n{text}\n")
    atomic.replace(out / "tables.txt", text + "\n")    # a full disk leaves the old ones
    drawn, left_out = plots(out) if figures else ([], [])
    for line in [f"drawn: {path}" for path in drawn] + [f"not drawn: {why}" for why in left_out]:
        say(line)
