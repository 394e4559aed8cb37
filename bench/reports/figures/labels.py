"""Place labels in a figure's panels, clear of other labels and of markers."""

from dataclasses import dataclass
from typing import Sequence

PixelBox = tuple[float, float, float, float]    # left, bottom, right, top, in pixels


@dataclass(frozen=True)
class Label:
    """A text with its possible places: points of the panel's data, each with an offset in points.

    The first free place is taken.  Without one, an `optional` text is left out; another goes where
    it covers the least.
    """

    panel: object
    text: str
    places: Sequence[tuple[tuple[float, float], tuple[float, float]]]
    colour: str = "black"
    optional: bool = False


def places_beside(x: float, y: float) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """List the places around a marker, the right of it first."""
    return [((x, y), offset) for offset in (
        (9, 0), (-9, 0), (9, 5), (9, -5), (-9, 5), (-9, -5), (0, 9), (0, -9), (17, 0), (-17, 0),
        (0, 17), (0, -17))]


def place_labels(figure, labels: Sequence[Label], markers: Sequence[tuple[object, float, float]],
                 lines: Sequence[tuple[object, float, float, float]] = (),
                 size: float = 7) -> None:
    """Write labels, after all else is drawn and the panels have their limits.

    Labels choose places in their order.  To be left free are `markers`, (panel, x, y), of the
    letters' `size` in points, and horizontal `lines`, (panel, left, right, y).
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    renderer = FigureCanvasAgg(figure).get_renderer()
    figure.draw_without_rendering()    # the layout places the panels
    half = size * figure.dpi / 72 / 2
    taken: list[PixelBox] = []
    for panel, x, y in markers:
        at = panel.transData.transform((x, y))
        taken.append((*(at - half), *(at + half)))
    for panel, left, right, y in lines:
        taken.append((*panel.transData.transform((left, y)),
                      *(panel.transData.transform((right, y)) + 1)))
    for label in labels:
        written = []
        for where, offset in label.places:
            text = label.panel.annotate(
                label.text, where, xytext=offset, textcoords="offset points", fontsize=size,
                color=label.colour, ha="center", va="center", annotation_clip=False)
            box = text.get_window_extent(renderer).extents
            inside = label.panel.get_window_extent(renderer).extents
            outside = _overlap(box, box) - _overlap(box, inside)
            cost = sum(_overlap(box, other) for other in taken) + outside
            written.append((cost, len(written), text, tuple(box)))
            if not cost:
                break
        *worse, best = sorted(written, reverse=True)
        if label.optional and best[0]:
            worse.append(best)
        else:
            taken.append(best[3])
        for _, _, text, _ in worse:
            text.remove()


def _overlap(a: PixelBox, b: PixelBox) -> float:
    """Compute the area that two boxes have in common."""
    width, height = (min(a[k + 2], b[k + 2]) - max(a[k], b[k]) for k in (0, 1))
    return max(width, 0) * max(height, 0)
