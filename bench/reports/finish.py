"""Write the tables and figures of a folder of results into it."""

import traceback
from pathlib import Path

from bench.records import atomic
from bench.reports.figures.every_figure import draw_figures
from bench.reports.paper_tables import format_tables
from mm3d.console import complain, say


def write_tables_and_figures(out: Path, figures: bool = True) -> None:
    """Print the tables and the names of the figures, and write them into the folder `out`.

    The tables are in ``tables.txt``.

    Parameters
    ----------
    out : Path
        A folder of results.
    figures : bool
        Whether to draw the figures.

    Raises
    ------
    StoreError
        When there are no results in `out`.
    OSError
        When a file cannot be written.
    """
    text = format_tables(out)
    say(f"\n{text}\n")
    atomic.replace(out / "tables.txt", text + "\n")    # a full disk leaves the old file
    if not figures:
        return
    try:
        drawn, left_out = draw_figures(out)
    except Exception:
        # An error of the program, which nothing hides; but all runs and tables are on the disk,
        # and a picture decides nothing about the run that has measured them.
        complain(traceback.format_exc())
        return
    say(*[f"drawn: {path}" for path in drawn], *[f"not drawn: {why}" for why in left_out])
