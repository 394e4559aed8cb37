"""Make tables of the steps of a product and of the parts of a layer: what travels, in words."""

from collections import Counter
from typing import Iterable, Sequence

from bench.document import Column, Notes, Part as DocumentPart, Rows, Table
from mm3d.schemes.closed_form import Move
from mm3d.tracing.block_moves import LayerPart, LayerStory, Moved, Story
from mm3d.tracing.block_replay import KEEP

OPERANDS = {"A": "A, activations", "B": "B, weight", "C": "C, activations", "b": "vectors",
            "KV": "keys and values", "row sums": "sums of rows"}
TrafficWords = Counter[tuple[str, str]]    # words of all ranks, by direction and collective


def product_tables(story: Story) -> list[DocumentPart]:
    """Make the tables of a product: its steps, and its words beside the closed form."""
    columns = [Column("step"), Column("does", align="<"), Column("to", align="<"),
               Column("along", align="<"), Column("words", "of a rank"), Column("", "of all")]
    rows, counted = [], Counter()
    for number, step in enumerate(story.steps, 1):
        if step.kind != KEEP:
            rows.append([number, step.kind.replace("_", "-"), step.matrix, step.direction,
                         _span(step.words), sum(step.words)])
            counted[step.direction, step.kind] += sum(step.words)
    (M, K), A = story.shapes["C"], story.shapes["A"]
    spec = ", ".join(f'{name} "{layout}"' for name, layout in story.layouts.items())
    title = (f"{story.scheme}, {story.form} on {story.grid} ranks: C is {M} x {K}, A {A[0]} x "
             f"{A[1]}; layouts {spec}")
    return [Table(title, columns, rows), *_unequal(rows), *_beside(counted, story.closed_form)]


def layer_tables(story: LayerStory) -> list[DocumentPart]:
    """Make the tables of a layer: its parts, and its words beside the closed form."""
    columns = [Column("part"), Column("space", align="<"), Column("layout", align="<"),
               Column("what travels, and along which direction", align="<"),
               Column("words", "of a rank"), Column("", "of all")]
    rows, counted = [], Counter()
    for part in story.parts:
        words = [*map(part.words, range(story.grid.ranks))]
        moved = ", ".join(f"{one.operand} {one.direction}" for one in joined_moves(part))
        rows.append([part.name, part.space, part.layout, moved or "-", _span(words), sum(words)])
        for one in part.moved:
            counted[one.direction, one.kind] += sum(one.words)
    sizes = ", ".join(f"{name} {size}" for name, size in story.sizes.items())
    title = f"{story.scheme}, one layer on {story.grid} ranks: {sizes}"
    return [Table(title, columns, rows), *_unequal(rows), *_beside(counted, story.closed_form)]


def joined_moves(part: LayerPart) -> list[Moved]:
    """Return the collectives of a part, those of one kind of an operand together."""
    found: dict[tuple[str, str, str], tuple[int, ...]] = {}
    for one in part.moved:
        key = one.operand, one.kind, one.direction
        before = found.get(key, (0,) * len(one.words))
        found[key] = tuple(map(sum, zip(before, one.words)))
    return [Moved(*key, words) for key, words in found.items()]


def _beside(counted: TrafficWords, closed_form: Iterable[Move] | None) -> list[DocumentPart]:
    """Make the table of words counted, beside the closed form; none where nothing travels."""
    stated: TrafficWords | None = None if closed_form is None else Counter()
    for move in closed_form or ():
        stated[move.axis, move.collective] += move.words
    rows = [[f"{kind.replace('_', '-')} along {direction}", words,
             "-" if stated is None else stated[direction, kind]]
            for (direction, kind), words in counted.items() if direction]
    columns = [Column("words of all ranks"), Column("counted"), Column("closed form")]
    return [Table("Counted in the running code, beside the closed form", columns, rows)] * bool(
        rows)


def _span(words: Sequence[int]) -> str | int:
    """Return the words of a rank; of ranks that differ each one's, or the least and the most."""
    counts = sorted(Counter(words).items())
    if len(counts) == 1:
        return words[0]
    if len(counts) == 2:
        return ", ".join(f"{count} on {ranks}" for count, ranks in counts) + " ranks"
    return f"{counts[0][0]} to {counts[-1][0]}"


def _unequal(rows: Rows) -> list[DocumentPart]:
    """Say why ranks differ, where they do."""
    return [Notes("Why ranks differ:", [
        "A rank counts the words that it receives in gathers and broadcasts, and those that it "
        "sends in sums: who broadcasts a block, or keeps a sum, counts none of it. Blocks may "
        "also be of different sizes."])] * any(isinstance(row[-2], str) for row in rows)
