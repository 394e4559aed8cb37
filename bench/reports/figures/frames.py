"""Draw a product or a layer on all ranks, a frame a step, 16 units wide and 9 high."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Iterator

from bench.reports.figures import style

WIDTH, HEIGHT = 16.0, 9.0    # of a frame, in its own units
INCHES = 9.6    # of its width, for which the sizes of letters are
INK, FAINT, OUTLINE, PANEL = "#1A1A1A", "#505050", "#A5A5A5", "#EFEFEF"
HUES = (style.ORANGE, style.SKY, style.GREEN, style.YELLOW, style.BLUE, style.VERMILION,
        style.PURPLE, style.LIGHT_GREY)
PATTERNS = ("", "////", "....", "xxxx")    # of each further round of colours
DRAWN_RANKS = len(HUES) * len(PATTERNS)
PALER = 0.55    # share of white, so that dark letters are read on all colours


@dataclass(frozen=True)
class Moment:
    """A moment of a story."""

    step: int    # number of the step, -1 before the first
    # How far the blocks have travelled, 0 to 1; None for a still picture, in which they have
    # arrived, with arrows where they came from.
    progress: float | None = None


def colour_of(owner: int | None) -> tuple[str, str]:
    """Return colour and pattern of the blocks of a rank; of a term for None."""
    if owner is None:
        return "#F4F4F4", ""
    hue = HUES[owner % len(HUES)]
    mixed = (round(255 * PALER + int(hue[at:at + 2], 16) * (1 - PALER)) for at in (1, 3, 5))
    return "#" + "".join(f"{one:02X}" for one in mixed), PATTERNS[owner // len(HUES)]


class Pen:
    """Draw boxes, texts and arrows into matplotlib's axes, in one scale."""

    def __init__(self, axes: Any, scale: float, level: int = 0) -> None:
        self.axes, self.scale, self.level = axes, scale, level    # higher levels hide lower ones

    def text(self, x: float, y: float, text: str, size: float, colour: str,
             align: str = "center", **style: Any) -> None:
        """Write a text at a place."""
        self.axes.text(x, y, text, fontsize=size * self.scale, color=colour, ha=align,
                       zorder=3 + self.level,
                       va="center_baseline" if align == "center" else "center", **style)

    def box(self, place: tuple[float, float, float, float], colour: str, edge: str,
            pattern: str = "", dashed: bool = False) -> None:
        """Draw a box."""
        from matplotlib.patches import Rectangle
        self.axes.add_patch(Rectangle(
            place[:2], *place[2:], facecolor=colour, edgecolor=edge, hatch=pattern or None,
            zorder=1 + self.level, linewidth=min(0.8, 10 * min(place[2:])) * self.scale,
            linestyle=(0, (3, 2)) if dashed else "-"))

    def arrow(self, start: tuple[float, float], end: tuple[float, float], **how: Any) -> None:
        """Draw a curved arrow."""
        bend = min(0.25, 0.6 / max(1e-9, math.dist(start, end)))
        self.axes.annotate("", end, start, arrowprops={
            "arrowstyle": "-|>", "connectionstyle": f"arc3,rad={bend:.3f}", "color": INK,
            "linewidth": 1.1 * self.scale, "mutation_scale": 9 * self.scale, "shrinkA": 2,
            "shrinkB": 2} | how)

    def direction(self, name: str, start: tuple[float, float], end: tuple[float, float],
                  active: str) -> None:
        """Draw a direction of the grid with its name, in bold if it is the active one."""
        bold = name == active
        self.arrow(start, end, connectionstyle="arc3", color=INK if bold else OUTLINE,
                   linewidth=(2.6 if bold else 1.0) * self.scale)
        vertical = start[0] == end[0]
        self.text(end[0] + (0 if vertical else 0.2), end[1] - (0.22 if vertical else 0), name,
                  14 if bold else 11, INK if bold else FAINT, weight="bold" if bold else "normal")


STILL, FLIGHT, HOPS = 1300, 100, 5    # milliseconds of a frame at rest and in motion; frames of it
STRIP_INCHES = 8.0    # of a frame's width


def draw_story(path: str | Path, frames: Any) -> Path:
    """Draw all frames of `RankPanels` or `LayerParts`: a .gif that moves, else one picture.

    Raises UsageError when the name has another ending; NotDrawn when it cannot be drawn.
    """
    style.check_picture(path, moving=True)
    if Path(path).suffix == ".gif":
        return style.save_animation(path, [
            (partial(_figure, frames, [moment], INCHES), duration)
            for moment, duration in _moments(frames)])
    moments = [Moment(number) for number in range(frames.first, len(frames.moving))]
    return style.save_picture(path, partial(_figure, frames, moments, STRIP_INCHES), dpi=100)


def _moments(frames: Any) -> Iterator[tuple[Moment, int]]:
    """Iterate over the moments of a moving picture, and their milliseconds."""
    for number in range(frames.first, len(frames.moving)):
        if number >= 0 and frames.moving[number]:
            yield Moment(number, 0.0), STILL
            yield from ((Moment(number, hop / (HOPS + 1)), FLIGHT) for hop in range(1, HOPS + 1))
        yield Moment(number, 1.0), STILL
    yield Moment(len(frames.moving) - 1, 1.0), STILL


def _figure(frames: Any, moments: list[Moment], width: float) -> Any:
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
