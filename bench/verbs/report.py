"""Print the tables of a folder of results, or draw its figures, or write all into an HTML page."""

import argparse
from pathlib import Path

from bench.command_line import options
from bench.errors import UsageError
from bench.records.folder import read_folder
from bench.reports import merit, page, paper_tables
from bench.reports.figures import every_figure
from bench.reports.figures.style import METADATA, NotDrawn
from mm3d.console import say

GROUP = "Look at results"
ON_ALL_RANKS = False
NEEDED = {"format": "", "parts": "", "figure_format": "figures", "talk": "figures",
          "out": "page"}    # "": tables


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``report``."""
    parser.add_argument("folder", metavar="DIR", help=(
        "folder with the .h5 files; with --figures also a trace (.json), drawn beside it"))
    parser.add_argument("--parts", action="store_true", default=None, help=(
        "print the parts of the time of each run, and its figures of merit, instead"))
    parser.add_argument("--figures", nargs="?", const="", metavar="NAMES", help=(
        "draw the figures into the folder instead: all, or those whose names begin so, with "
        "commas between"))
    parser.add_argument("--figure-format", metavar="NAMES", type=options.some_of(*METADATA), help=(
        "png, svg or pdf, or several with commas between (default png)"))
    parser.add_argument("--talk", action="store_true", default=None, help=(
        "with --figures, draw those for a talk: 16:9, large letters, one message"))
    parser.add_argument("--page", action="store_true", help=(
        "write tables and figures into one HTML page instead"))
    parser.add_argument("--out", metavar="FILE", help="the page (default DIR/report.html)")


def run(arguments: argparse.Namespace) -> int:
    """Print the tables, draw the figures, write the page; 1 when one cannot be drawn, else 0."""
    folder, draws = arguments.folder, arguments.figures is not None
    for name, needed in NEEDED.items():
        if getattr(arguments, name) not in (None, "text") and not (
                getattr(arguments, needed) not in (None, False) if needed else
                not draws and not arguments.page):
            raise UsageError(f"--{name.replace('_', '-')} would do nothing here: "
                             + (f"give --{needed} too, or leave it out" if needed else
                                "it is of tables; leave --figures and --page out"))
    if arguments.out:
        path = Path(arguments.out)
        if path.is_dir() or not path.parent.is_dir():
            raise UsageError(f"--out {path}: a file in a folder that is there would do")
    left_out: list[Exception] = []
    if draws:
        drawn, left_out = every_figure.draw_figures(
            folder, tuple(arguments.figure_format or ["png"]), arguments.figures,
            bool(arguments.talk))
        say(*drawn, *[f"not drawn: {why}" for why in left_out])
    if arguments.page:
        path, more = page.write_page(folder, arguments.out)
        more = [why for why in more if str(why) not in map(str, left_out)]    # each is said once
        say(path, *[f"not drawn: {why}" for why in more])
        left_out += more
    if not draws and not arguments.page:
        arguments.show(merit.merit_document(folder) if arguments.parts else
                       paper_tables.make_document(read_folder(folder)))
    return int(any(isinstance(why, NotDrawn) for why in left_out))
