"""Draw what the ranks of a product hold, a panel each, and the parts of a layer, a frame each.

In a panel A lies to the left of C and B above it, as in a product by hand.  Panels lie as the
ranks in the grid: x downwards, y to the right, and a group for each z.
"""

from functools import cached_property
from typing import Any, Iterator

from bench.reports.block_tables import OPERANDS, joined_moves
from bench.reports.figures.frames import (FAINT, HEIGHT, INCHES, INK, OUTLINE, PANEL, WIDTH,
                                          Moment, Pen, colour_of)
from mm3d.schemes.matrix_product import GRADIENT_PRODUCTS
from mm3d.tracing.block_moves import Story
from mm3d.tracing.block_replay import (GATHERS, KEEP, MULTIPLY, REDUCTIONS, HeldBlocks,
                                       MatrixBlock, ReplayStep, Travel)
from mm3d.tracing.block_moves import LayerPart, LayerStory, Rectangle

LEFT, RIGHT, TOP, BOTTOM = 0.9, 15.7, 6.75, 0.95    # the ranks' part of it
FEW = 8    # ranks, each with its place in letters
GAP, GROUP_GAP = 0.3, 0.75    # between panels, and between those of neighbouring z
INDICES = ("i, j, l: a rank's places along x, y, z, as in the paper; an index that is missing: "
           "the blocks of all of them")
LEGEND = ("number and colour of a block: the rank that it comes from      "
          "Σ, dashed: terms of a sum, still to be added")
SIGNS = {"ab": ("A", "B"), "abt": ("A", "Bᵀ"), "atb": ("Aᵀ", "B")}
TITLES = {"all_gather": "Gather {matrix} along {direction}",
          "broadcast": "Broadcast {matrix} along {direction}",
          "reduce_scatter": "Sum {matrix} along {direction}, and scatter it",
          "reduce": "Sum {matrix} along {direction}, on one rank",
          "all_reduce": "Sum {matrix} along {direction}, on every rank",
          MULTIPLY: "Multiply: {formula}", KEEP: "Each rank keeps its block of {results}"}
ONE_TO_ALL = ("broadcast", "reduce")
INDEX = {"x": "i", "y": "j", "z": "l"}    # the paper's


class RankPanels:
    """Draw the moments of a story; `moving` says of each step whether blocks travel."""

    def __init__(self, story: Story) -> None:
        self.story, self.first = story, -1
        self.moving = [bool(step.travels) for step in story.steps]
        M, N, K = self._extents
        sizes = {"x": 1, "y": 1, "z": 1} | dict(story.grid)
        self.in_a_row = sizes["y"] * sizes["z"] == 1    # the ranks of x lie beside each other
        rows, columns, groups = ((1, sizes["x"], 1) if self.in_a_row else
                                 (sizes["x"], sizes["y"], sizes["z"]))
        # Of many ranks the sums are drawn narrower, so that thin blocks of rows are seen.
        self.few = story.grid.ranks <= FEW
        narrow = 1.0 if self.few else 0.45
        inner = 0.08 * max(M, N, K)
        width = (RIGHT - LEFT - GROUP_GAP * (groups - 1)) / (columns * groups) - GAP
        height = (TOP - BOTTOM) / rows - GAP
        self.unit = min(width / (narrow * N + inner + K), height / (narrow * N + inner + M))
        self.terms, self.gap = narrow * self.unit, inner * self.unit
        self.panel = (N * self.terms + self.gap + K * self.unit + GAP,
                      N * self.terms + self.gap + M * self.unit + GAP)
        group = columns * self.panel[0]
        self.group = group + GROUP_GAP
        self.origin = (0.5 * (LEFT + RIGHT - groups * group - (groups - 1) * GROUP_GAP),
                       0.5 * (TOP + BOTTOM + rows * self.panel[1]))
        self.rows, self.columns = rows, columns

    @cached_property
    def _extents(self) -> tuple[int, int, int]:
        """Return M, N and K."""
        (M, K), A = self.story.shapes["C"], self.story.shapes["A"]
        return M, A[0] if self.story.form == "atb" else A[1], K

    def corner(self, rank: int) -> tuple[float, float]:
        """Return left and top of a rank's panel."""
        at = {"x": 0, "y": 0, "z": 0} | self.story.grid.coordinates(rank)
        row, column = (0, at["x"]) if self.in_a_row else (at["x"], at["y"])
        return (self.origin[0] + at["z"] * self.group + column * self.panel[0],
                self.origin[1] - row * self.panel[1])

    def place(self, rank: int, matrix: str,
              block: MatrixBlock) -> tuple[float, float, float, float]:
        """Return left, bottom, width and height of a block in a rank's panel."""
        rows, columns = block.rows, block.columns
        name = matrix[-1]
        if (name, self.story.form) in (("B", "abt"), ("A", "atb")):    # drawn transposed
            rows, columns = columns, rows
        across, down = (self.terms if name == "A" else self.unit,
                        self.terms if name == "B" else self.unit)
        left, top = self.corner(rank)
        beyond = self._extents[1] * self.terms + self.gap
        left += beyond * (name != "A")
        top -= beyond * (name != "B")
        return (left + columns[0] * across, top - rows[1] * down,
                (columns[1] - columns[0]) * across, (rows[1] - rows[0]) * down)

    def draw(self, axes: Any, moment: Moment, scale: float = 1.0) -> None:
        """Draw a moment into matplotlib's `axes`; `scale` is that of letters and lines."""
        pen = Pen(axes, scale)
        steps = self.story.steps
        step = steps[moment.step] if moment.step >= 0 else None
        before = steps[moment.step - 1].held if moment.step > 0 else self.story.stored
        self._heading(pen, moment.step)
        self._directions(pen, step.direction if step else "")
        moving = step is not None and moment.progress is not None and step.travels
        held = before if step is None or moving and moment.progress < 1 else step.held
        for rank, own in enumerate(held):
            self._panel(pen, rank, own, step)
        if moving:
            above = Pen(axes, scale, level=3)
            for travel in step.travels * (moment.progress < 1):
                self._flying(above, step, travel, moment.progress)
        elif step is not None:
            for travel in step.travels:
                self._arrow(pen, step, travel)
        first, second = SIGNS.get(self.story.form, "AB")
        if any("_" in step_caption(self.story, one) for one in steps):
            pen.text(WIDTH / 2, 0.8, INDICES, 11, FAINT)
        pen.text(WIDTH / 2, 0.5, f"in each rank's panel: {first} lower left, {second} upper "
                 f"right, C lower right, or their gradients", 11, FAINT)
        pen.text(WIDTH / 2, 0.2, LEGEND, 11, FAINT)
        axes.set(xlim=(0, WIDTH), ylim=(0, HEIGHT), aspect="equal")
        axes.axis("off")

    def _heading(self, pen: Pen, number: int) -> None:
        """Write the step, what moves, and its words."""
        story, steps, names = self.story, self.story.steps, self.story.stored[0]
        if number < 0:
            title = f"Each rank stores a block of {'A, B and dC' if 'C' in names else 'A and B'}"
            line = f"scheme {story.scheme}, grid {story.grid}; layouts " + ", ".join(
                f'{name} "{spec}"' for name, spec in story.layouts.items())
        else:
            title = f"{number + 1}   {step_title(story, steps[number])}"
            line = step_caption(story, steps[number])
        words = [sum(step.words) for step in steps]
        pen.text(0.4, 8.4, title, 19, INK, "left", weight="bold")
        pen.text(0.4, 7.72, line, 13.5, INK, "left")
        pen.text(WIDTH - 0.4, 8.4, f"{sum(words[:number + 1])} of {sum(words)} words", 13.5,
                 INK, "right")

    def _directions(self, pen: Pen, active: str) -> None:
        """Draw the directions of the grid beside the panels, the one of the step in bold."""
        left, top = self.origin
        sizes = {"x": 1, "y": 1, "z": 1} | dict(self.story.grid)
        right, bottom = left + self.columns * self.panel[0], top - self.rows * self.panel[1]
        across = "x" if self.in_a_row else "y"
        if sizes[across] > 1:
            pen.direction(across, (left, top + 0.16), (right - GAP, top + 0.16), active)
        if sizes["x"] > 1 and not self.in_a_row:
            pen.direction("x", (left - 0.25, top - 0.1), (left - 0.25, bottom + 0.4), active)
        if sizes["z"] > 1:
            end = left + (sizes["z"] - 1) * self.group + self.columns * self.panel[0] - GAP
            pen.direction("z", (left, top + 0.5), (end, top + 0.5), active)

    def _panel(self, pen: Pen, rank: int, held: HeldBlocks, step: ReplayStep | None) -> None:
        """Draw what a rank holds."""
        left, top = self.corner(rank)
        pen.box((left - 0.07, top - self.panel[1] + GAP - 0.07, self.panel[0] - GAP + 0.14,
                 self.panel[1] - GAP + 0.14), PANEL, "none")
        for name, (rows, columns) in self.story.shapes.items():
            whole = MatrixBlock(None, (0, rows), (0, columns))
            pen.box(self.place(rank, name, whole), "white", OUTLINE)
        half = self._extents[1] * self.terms / 2
        coords = ",".join(map(str, self.story.grid.coordinates(rank).values()))
        pen.text(left + half, top - half, f"rank {rank}\n({coords})" if self.few else str(rank),
                 max(8, min(11, 18 * half)), INK, weight="bold")
        for matrix in self._shown(held, step):
            for block in held[matrix]:
                if block.size:
                    self._block(pen, self.place(rank, matrix, block), block)

    @staticmethod
    def _shown(held: HeldBlocks, step: ReplayStep | None) -> Iterator[str]:
        """Iterate over the matrices to draw: a gradient hides its matrix while it is computed."""
        hidden = {one[-1] for one in held if one[0] == "d"} if step and step.kind == KEEP else (
            {step.result[-1]} if step and step.result[0] == "d" and step.result in held else set())
        for matrix in held:
            gradient = matrix[0] == "d"
            if gradient == (matrix[-1] in hidden):
                yield matrix

    def _block(self, pen: Pen, place: tuple[float, float, float, float], block: MatrixBlock,
               edge: str = INK) -> None:
        colour, pattern = colour_of(block.owner)
        pen.box(place, colour, edge, pattern, block.owner is None)
        text = "Σ" if block.owner is None else str(block.owner)
        size = min(11.0, 0.62 * 72 * INCHES / WIDTH * min(place[2] / max(1, len(text)) * 1.5,
                                                          place[3]))
        if size >= 6:
            pen.text(place[0] + place[2] / 2, place[1] + place[3] / 2, text, size, INK)

    def _flying(self, pen: Pen, step: ReplayStep, travel: Travel, progress: float) -> None:
        """Draw a block on its way."""
        start, end = (self.place(rank, step.matrix, travel.block)
                      for rank in (travel.source, travel.target))
        place = (*(a + (b - a) * progress for a, b in zip(start[:2], end[:2])), *end[2:])
        self._block(pen, place, travel.block)

    def _arrow(self, pen: Pen, step: ReplayStep, travel: Travel) -> None:
        """Draw an arrow from where a block was to where it is.

        Where all ranks of a line send to all, only those between neighbours are drawn.
        """
        stride = self.story.grid.stride(step.direction)
        if step.kind in ONE_TO_ALL or abs(travel.source - travel.target) == stride:
            start, end = (self.place(rank, step.matrix, travel.block)
                          for rank in (travel.source, travel.target))
            pen.arrow(*((left + width / 2, bottom + height / 2)
                        for left, bottom, width, height in (start, end)))


def product_formula(story: Story, result: str) -> str:
    """Return the formula of C, dA or dB, such as "dA = dC Bᵀ"."""
    form = story.form if story.form in SIGNS else "ab"
    names = "AB"
    if result != "C":
        form, names = GRADIENT_PRODUCTS[form]["AB".index(result[-1])]
    shown = ["dC" if name == "C" else name for name in names]
    first, second = (sign.replace(letter, name) for sign, letter, name
                     in zip(SIGNS[form], "AB", shown))
    return f"{result} = {first} {second}"


def step_title(story: Story, step: ReplayStep) -> str:
    """Return what happens in a step, in a line."""
    results = " and ".join(dict.fromkeys(one.result for one in story.steps))
    return TITLES[step.kind].format(matrix=step.matrix, direction=step.direction, results=results,
                                    formula=product_formula(story, step.result))


def step_caption(story: Story, step: ReplayStep) -> str:
    """Return what a step moves, as the layouts call it, and the words of a rank and of all."""
    if step.kind == MULTIPLY:
        return "each rank multiplies the blocks that it holds: no words"
    if step.kind == KEEP:
        return "gathered blocks are given up"
    least, most = min(step.words), max(step.words)
    verb = "receives" if step.kind in GATHERS else "sends"
    who = (f"every rank {verb} {most}" if least == most else f"a rank {verb} {least} to {most}")
    letters = [c for c in story.layouts[step.matrix[-1]] if c in INDEX]
    whole, part = ("".join(INDEX[c] for c in letters if keep or c != step.direction)
                   for keep in (False, True))
    first, then = (whole, part) if step.kind in REDUCTIONS else (part, whole)
    moved = f"{step.matrix}_{first} to {step.matrix}_{then}" if first and first != then and (
        step.kind not in ONE_TO_ALL) else step.matrix
    return (f"{step.kind.replace('_', '-')}, {moved}: {who} words, all {story.grid.ranks} ranks "
            f"{sum(step.words)}")


LIST, SQUARE, MOVES = 0.4, 5.5, 10.8    # left ends of the parts, of the blocks, of what travels
HIGH, LOW = 7.0, 0.9
SHARED = "#EAEAEA"    # of a block that several ranks store


class LayerParts:
    """Draw the parts of a layer, a frame each."""

    def __init__(self, story: LayerStory) -> None:
        # No blocks travel in any frame: they are listed instead.
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
        high = (HIGH - LOW) / len(self.story.parts)
        for number, part in enumerate(self.story.parts):
            bottom = HIGH - (number + 1) * high
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
        top = HIGH - 0.55
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
        pen.text(SQUARE, HIGH - 0.3, "features to the right, positions down", 11, FAINT, "left")
        batch = self.story.sizes["batch"]
        pen.text(SQUARE, top - side - 0.3, f"{batch} sequence{'s' * (batch > 1)} of "
                 f"{self.story.sizes['seq']} positions", 11, FAINT, "left")

    def _moves(self, pen: Pen, part: LayerPart) -> None:
        """List what travels in the part."""
        if not part.moved:
            pen.text(MOVES, HIGH - 0.3, "nothing travels", 12.5, INK, "left")
        moves = joined_moves(part)
        apart = min(0.95, (HIGH - LOW) / max(1, len(moves)))
        for number, one in enumerate(moves):
            top = HIGH - 0.3 - apart * number
            pen.text(MOVES, top, OPERANDS.get(one.operand, one.operand), 12.5, INK, "left",
                     weight="bold")
            pen.text(MOVES, top - 0.42 * apart, f"{one.kind.replace('_', '-')} along "
                     f"{one.direction}, {max(one.words)} words", 12.5, INK, "left")
