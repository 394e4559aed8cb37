"""Print the tables of a folder of results, or draw its figures, or write all into an HTML page."""

import argparse
from pathlib import Path

from bench.command_line import options
from bench.errors import UsageError
from bench.records.folder import read_folder
from bench.records.run_file import report_left_out
from bench.reports.figures import METADATA

GROUP = "Look at results"
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
    """Print tables, draw figures, write the page; 1 when one is not drawn or a file left out."""
    # Each way to show results imports its own: tables need no figures, and these no tables.
    path, draws = Path(arguments.folder), arguments.figures is not None
    if draws or arguments.page:
        from bench.reports.figures import every_figure
        from bench.reports.figures.style import report_drawn
    for name, needed in NEEDED.items():
        if getattr(arguments, name) not in (None, "text") and not (
                getattr(arguments, needed) not in (None, False) if needed else
                not draws and not arguments.page):
            raise UsageError(f"--{name.replace('_', '-')} would do nothing here: "
                             + (f"give --{needed} too, or leave it out" if needed else
                                "it is of tables; leave --figures and --page out"))
    if arguments.out:
        page_file = Path(arguments.out)
        if page_file.is_dir() or not page_file.parent.is_dir():
            raise UsageError(f"--out {page_file}: a file in a folder that is there would do")
    formats: list[str] = arguments.figure_format or ["png"]
    told: list[Exception] = []
    if draws and path.suffix == ".json" and not path.is_dir() and not arguments.page:
        if arguments.talk:
            raise UsageError(f"--talk is for results: leave it out, {path} is a trace")
        return report_drawn(*every_figure.draw_trace_file(path, formats, arguments.figures))
    found = read_folder(path)
    statuses = [report_left_out(found.problems)]
    if draws:
        files, told = every_figure.draw_figures(found, formats, arguments.figures,
                                                bool(arguments.talk))
        statuses.append(report_drawn(files, told))
    if arguments.page:
        from bench.reports.finish import write_page
        file, more = write_page(found, arguments.out)
        statuses.append(report_drawn([file], [    # each is said once
            why for why in more if str(why) not in map(str, told)]))
    if not draws and not arguments.page:
        if arguments.parts:
            from bench.reports.merit import merit_document as make_document
        else:
            from bench.reports.paper_tables import make_document
        arguments.show(make_document(found))
    return max(statuses)
