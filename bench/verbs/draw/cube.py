"""Show a product, or a Transformer layer, step by step: which rank holds which block."""

import argparse
from functools import partial
from pathlib import Path

from bench.command_line import options
from bench.command_line.config_options import add_fields
from bench.errors import as_usage_error
from bench.reports import block_tables
from bench.reports.figures import style
from bench.reports.figures.frames import DRAWN_RANKS
from mm3d.config import Division
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme
from mm3d.schemes.scheme import Scheme
from mm3d.tracing.block_moves import (LINEAR_LAYERS, LayerStory, Story, layer_story,
                                      product_story, small_sizes)

FORMS = ("ab", "abt", "atb", *LINEAR_LAYERS, "layer")
MOST_ROWS = 64    # of a matrix, each of which may be a block


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``draw cube``."""
    add_fields(parser, Division, ["scheme", "grid"])
    parser.add_argument("--form", choices=FORMS, metavar="FORM", default="ab", help=(
        "what is computed: ab, abt or atb for C = A B, A B^T or A^T B of plain matrices; up or "
        "down for the linear layers of a block; layer for a whole Transformer layer (default ab)"))
    parser.add_argument("--backward", action="store_true",
                        help="show the gradients dA and dB, instead of C")
    parser.add_argument("--shape", type=options.shape, metavar="M,N,K", help=(
        "C is M x K, a sum of N terms (default: as many of each as ranks)"))
    parser.add_argument("--out", metavar="FILE", help=(
        "draw it: a .gif moves, a .png, .svg or .pdf has a frame for each step"))


def run(arguments: argparse.Namespace) -> int:
    """Print the steps and their words, and draw them; 1 when that fails, else 0."""
    if arguments.out:
        style.check_picture(arguments.out, moving=True)
    scheme = find_scheme(arguments.scheme)
    with as_usage_error():
        grid = scheme.grid_shape(arguments.grid or _default_grid(scheme))
        if grid.ranks > DRAWN_RANKS:
            raise ValueError(f"--grid {grid.compact}: {grid.ranks} ranks are too many to be seen: "
                             f"{DRAWN_RANKS} at most would do")
        story, tables = _story(scheme, grid, arguments)
    arguments.show(tables)
    return style.draw_pictures([partial(_draw, arguments.out, story)]
                               if arguments.out else [])


def _draw(path: str, story: Story | LayerStory) -> Path:
    """Draw the frames of a story."""
    from bench.reports.figures.frames import draw_story
    from bench.reports.figures.rank_panels import LayerParts
    from bench.reports.figures.rank_panels import RankPanels
    return draw_story(path, LayerParts(story) if isinstance(story, LayerStory) else
                      RankPanels(story))


def _story(scheme: type[Scheme], grid: GridShape, arguments: argparse.Namespace) -> tuple:
    """Return what the frames show, and the tables."""
    if arguments.form == "layer":
        if arguments.shape:
            raise ValueError("--shape is that of a product: leave it out, or give another --form")
        layer = layer_story(scheme, grid, small_sizes(scheme, grid), arguments.backward)
        return layer, block_tables.layer_tables(layer)
    shape = arguments.shape or (max(2, grid.ranks),) * 3
    if max(shape) > MOST_ROWS:
        raise ValueError(f"--shape {','.join(map(str, shape))}: sizes to {MOST_ROWS} would do")
    story = product_story(scheme, grid, arguments.form, shape, arguments.backward)
    return story, block_tables.product_tables(story)


def _default_grid(scheme: type[Scheme]) -> tuple[int, ...]:
    """Return the scheme's own grid of 8 ranks, else of 4, else of one."""
    for ranks in (8, 4):
        try:
            return scheme.default_grid(ranks)
        except ValueError:
            pass
    return scheme.default_grid(1)
