"""Print the tables from the files of a folder."""

import argparse

from bench.reports import formats, merit, paper_tables
from bench.command_line import options
from mm3d.console import say

GROUP = "Look at results"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``table``."""
    options.add_folder(parser)
    parser.add_argument("--parts", action="store_true", help=(
        "print the parts of the time of each run, and its figures of merit, instead"))
    options.add_format(parser, formats.FORMATS)


def run(arguments: argparse.Namespace) -> int:
    """Print the tables; 0."""
    if arguments.parts:
        say(formats.render(merit.merit_document(arguments.folder), arguments.format))
    else:
        say(paper_tables.format_tables(arguments.folder, arguments.format))
    return 0
