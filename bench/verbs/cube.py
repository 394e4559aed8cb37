"""Draw which rank of a cube holds which block."""

import argparse
from functools import partial

from bench.reports.figures import cube, style

GROUP = "Plan and predict"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``cube``."""
    parser.add_argument("file", metavar="FILE", help="the picture, such as cube.png")


def run(arguments: argparse.Namespace) -> int:
    """Draw the picture and name its file; 1 when it cannot be drawn, else 0."""
    return style.draw_pictures([partial(cube.draw_cube, arguments.file)])
