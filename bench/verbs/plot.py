"""Draw the figures from the files of a folder."""

import argparse

from bench.reports.figures import every_figure
from bench.reports.figures.style import NotDrawn
from bench.command_line import options
from mm3d.console import say

GROUP = "Look at results"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plot``."""
    options.add_folder(parser)
    parser.add_argument("--format", default="png", metavar="NAMES", help=(
        "png, svg or pdf, or several with commas between (default png)"))


def run(arguments: argparse.Namespace) -> int:
    """Draw the figures and name their files; 1 when one cannot be drawn, else 0."""
    formats = tuple(arguments.format.split(","))
    drawn, left_out = every_figure.draw_figures(arguments.folder, formats)
    say(*drawn, *[f"not drawn: {why}" for why in left_out])
    return int(any(isinstance(why, NotDrawn) for why in left_out))
