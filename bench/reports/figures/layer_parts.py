"""Draw a Transformer layer on all ranks: where its activations are, and what travels, by part."""

from typing import Any

from bench.reports.block_tables import OPERANDS, joined_moves
from bench.reports.figures.frames import (FAINT, HEIGHT, INK, PANEL, WIDTH, Moment, Pen,
                                          colour_of)
from mm3d.tracing.layer_moves import LayerStory, LayerPart, Rectangle

LIST, SQUARE, MOVES = 0.4, 5.5, 10.8    # left ends of the parts, of the blocks, of what travels
TOP, BOTTOM = 7.0, 0.9
SHARED = "#EAEAEA"    # of a block that several ranks store


class LayerParts:
    """Draw the parts of a layer, a frame each.

    Attributes
    ----------
    moving : list of bool
        Whether blocks travel, by part: they are listed instead.
    """

    def __init__(self, story: LayerStory) -> None:
        self.story, self.first, self.moving = story, 0, [False] * len(story.parts)

    def draw(self, axes: Any, moment: Moment, scale: float = 1.0) -> None:
        """Draw a part into matplotlib's `axes`; `scale` is that of letters and lines."""
        pen, part = Pen(axes, scale), self.story.parts[moment.step]
        of = "gradient of the output" if self.story.backward else "output"
        pen.text(0.4, 8.4, f"{moment.step + 1}   {part.name}", 19, INK, "left", weight="bold")
        pen.text(0.4, 7.72, f'{of} in the {part.space} space, layout "{part.layout}" of (batch, '
                 f"positions, features)", 13.5, INK, "left")
        pen.text(WIDTH - 0.4, 8.4, f"scheme {self.story.scheme}, grid {self.story.grid}", 13.5,
                 INK, "right")
        self._list(pen, moment.step)
        self._blocks(pen, part)
        self._moves(pen, part)
        pen.text(WIDTH / 2, 0.3, "number and colour of a block: the rank that stores it", 11,
                 FAINT)
        axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect="equal")
        axes.axis("off")

    def _list(self, pen: Pen, current: int) -> None:
        """List the parts with the words of the rank that moves most, the current one in bold."""
        high = (TOP - BOTTOM) / len(self.story.parts)
        for number, part in enumerate(self.story.parts):
            bottom = TOP - (number + 1) * high
            bold = "bold" if number == current else "normal"
            if number == current:
                pen.box((LIST - 0.1, bottom + 0.04, 4.5, high - 0.08), PANEL, INK)
            words = max(map(part.words, range(self.story.grid.ranks)))
            pen.text(LIST, bottom + high / 2, part.name, 12.5, INK, "left", weight=bold)
            pen.text(LIST + 4.25, bottom + high / 2, f"{words} words", 12.5, INK, "right",
                     weight=bold)

    def _blocks(self, pen: Pen, part: LayerPart) -> None:
        """Draw the blocks of the activation: rows are positions, sequence after sequence."""
        rows = self.story.sizes["batch"] * self.story.sizes["seq"]
        columns, side = self.story.sizes["hidden"], 4.7
        top = TOP - 0.55
        owners: dict[Rectangle, list[int]] = {}
        for rank, blocks in enumerate(part.blocks):
            for block in blocks:
                if block[0] < block[1] and block[2] < block[3]:
                    owners.setdefault(block, []).append(rank)
        for (first, last, left, right), ranks in owners.items():
            place = (SQUARE + left * side / columns, top - last * side / rows,
                     (right - left) * side / columns, (last - first) * side / rows)
            colour, pattern = colour_of(ranks[0]) if len(ranks) == 1 else (SHARED, "")
            pen.box(place, colour, INK, pattern)
            text = str(ranks[0]) if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))
            pen.text(place[0] + place[2] / 2, place[1] + place[3] / 2, text, 11, INK)
        pen.text(SQUARE, TOP - 0.3, "features to the right, positions down", 11, FAINT, "left")
        batch = self.story.sizes["batch"]
        pen.text(SQUARE, top - side - 0.3, f"{batch} sequence{'s' * (batch > 1)} of "
                 f"{self.story.sizes['seq']} positions", 11, FAINT, "left")

    def _moves(self, pen: Pen, part: LayerPart) -> None:
        """List what travels in the part."""
        if not part.moved:
            pen.text(MOVES, TOP - 0.3, "nothing travels", 12.5, INK, "left")
        moves = joined_moves(part)
        apart = min(0.95, (TOP - BOTTOM) / max(1, len(moves)))
        for number, one in enumerate(moves):
            top = TOP - 0.3 - apart * number
            pen.text(MOVES, top, OPERANDS.get(one.operand, one.operand), 12.5, INK, "left",
                     weight="bold")
            pen.text(MOVES, top - 0.42 * apart, f"{one.kind.replace('_', '-')} along "
                     f"{one.direction}, {max(one.words)} words", 12.5, INK, "left")
