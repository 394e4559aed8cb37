"""Draw a product, or a layer, on all ranks: a frame a step, as one picture or as one that moves.
"""

import math
from functools import partial
from pathlib import Path
from typing import Any, Iterator

from bench.reports.figures import style
from bench.reports.figures.frames import HEIGHT, INCHES, WIDTH, Moment
from bench.reports.figures.layer_parts import LayerParts
from bench.reports.figures.rank_panels import RankPanels

Frames = RankPanels | LayerParts

STILL, FLIGHT, HOPS = 1300, 100, 5    # milliseconds of a frame at rest and in motion; frames of it
STRIP_INCHES = 8.0    # of a frame's width


def draw_story(path: str | Path, frames: Frames) -> Path:
    """Draw all frames of a product: one after another in a .gif, else in one picture.

    Raises UsageError when the name has another ending; NotDrawn when it cannot be drawn.
    """
    style.check_picture(path, moving=True)
    if Path(path).suffix == ".gif":
        return style.save_animation(path, [
            (partial(_figure, frames, [moment], INCHES), duration)
            for moment, duration in _moments(frames)])
    moments = [Moment(number) for number in range(frames.first, len(frames.moving))]
    return style.save_picture(path, partial(_figure, frames, moments, STRIP_INCHES), dpi=100)


def _moments(frames: Frames) -> Iterator[tuple[Moment, int]]:
    """Iterate over the moments of a moving picture, and their milliseconds."""
    for number in range(frames.first, len(frames.moving)):
        if number >= 0 and frames.moving[number]:
            yield Moment(number, 0.0), STILL
            yield from ((Moment(number, hop / (HOPS + 1)), FLIGHT) for hop in range(1, HOPS + 1))
        yield Moment(number, 1.0), STILL
    yield Moment(len(frames.moving) - 1, 1.0), STILL


def _figure(frames: Frames, moments: list[Moment], width: float) -> Any:
    """Make a figure of frames that are `width` inches wide, two beside each other if several."""
    from matplotlib.figure import Figure
    columns = min(2, len(moments))
    rows = math.ceil(len(moments) / columns)
    figure = Figure(figsize=(columns * width, rows * width * HEIGHT / WIDTH))
    for number, moment in enumerate(moments):
        row, column = divmod(number, columns)
        axes = figure.add_axes((column / columns, 1 - (row + 1) / rows, 1 / columns, 1 / rows))
        frames.draw(axes, moment, width / INCHES)
    return figure
