"""Write all results of a folder into one HTML page."""

import argparse

from bench.reports import page
from bench.command_line import options
from mm3d.console import say

GROUP = "Look at results"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``report``."""
    options.add_folder(parser)
    parser.add_argument("--out", metavar="FILE", help="the page (default DIR/report.html)")


def run(arguments: argparse.Namespace) -> int:
    """Write the page and name its file; 0."""
    say(page.write_page(arguments.folder, arguments.out))
    return 0
