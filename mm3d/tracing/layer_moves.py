"""Tell, part by part, where one Transformer layer has its activations, and what travels.

The layer runs dry on every rank; its events give the collectives and their words.
"""

from dataclasses import dataclass
from typing import Any, Callable, Mapping

from mm3d.grid.activations import Space
from mm3d.grid.layout import without_faces
from mm3d.grid.shape import GridShape
from mm3d.model.cost import moves
from mm3d.model.transformer import Transformer
from mm3d.schemes.closed_form import Move
from mm3d.schemes.scheme import Scheme
from mm3d.tracing.block_moves import run_dry
from mm3d.tracing.events import Collective, LayerEvent

Rectangle = tuple[int, int, int, int]    # rows and columns: first, last + 1


@dataclass(frozen=True)
class Moved:
    """Describe a collective: what it moves, and the words of each rank."""

    operand: str
    kind: str
    direction: str
    words: tuple[int, ...]


@dataclass(frozen=True)
class LayerPart:
    """Describe a part of a layer: its output and its collectives."""

    name: str    # name in the model, such as "mlp.up"
    # Space of its output (in backward, of the gradient that it is given): "outer" or "inner".
    space: str
    layout: str    # layout of that, (batch, positions, features)
    # By rank, its rectangles of (all positions, features), in units of the given sizes.
    blocks: tuple[tuple[Rectangle, ...], ...]
    moved: tuple[Moved, ...]    # the collectives, in order

    def words(self, rank: int) -> int:
        """Return the words of a rank in all collectives of the part."""
        return sum(one.words[rank] for one in self.moved)


@dataclass(frozen=True)
class LayerStory:
    """Describe a Transformer layer on all ranks."""

    scheme: str
    grid: GridShape
    sizes: Mapping[str, int]    # hidden, heads, batch, seq
    parts: tuple[LayerPart, ...]    # in the order in which they are computed
    backward: bool
    closed_form: tuple[Move, ...]    # the collectives in closed form, with the words of all ranks


def layer_story(scheme: type[Scheme], grid: GridShape, sizes: Mapping[str, int],
                backward: bool = False) -> LayerStory:
    """Run one Transformer layer dry on every rank of a grid, and return its parts.

    `sizes` are hidden, heads, batch and seq.  In backward the last part is the first.  Raises
    ValueError when the scheme cannot use the grid, or sizes do not go together.
    """
    model, recorded = run_dry(scheme, grid, lambda own: _layer(own, sizes, backward),
                              (LayerEvent, Collective))
    spaces = {layer.name: _space_of(layer) for chain in model.layers.layers
              for layer in chain.layers}
    parts: list[list] = []
    for events in recorded:
        event = events[0].event
        if isinstance(event, LayerEvent):
            parts += [[event, []]] * (event.name in spaces)    # not the residual around them
        else:
            parts[-1][1].append(Moved(events[0].operand, event.kind, event.direction,
                                      tuple(one.words for one in events)))
    return LayerStory(scheme.name, grid, dict(sizes), tuple(
        _part(event.part, spaces[event.name], model, moved) for event, moved in parts),
        backward, tuple(moves(scheme.name, grid, model.sizes)[
            "backward" if backward else "forward"].values()))


def _layer(scheme: Scheme, sizes: Mapping[str, int],
           backward: bool) -> tuple[Transformer, Callable]:
    """Make one layer on one rank, and its pass."""
    model = Transformer(scheme, layers=1, **sizes)
    x, dy = model.random("input"), model.random("output gradient")
    if not backward:
        return model, lambda: model.forward(x)
    _, saved = model.forward(x)
    return model, lambda: model.backward(dy, saved)


def small_sizes(scheme: type[Scheme], grid: GridShape) -> dict[str, int]:
    """Return sizes of a layer in which every rank of a grid has heads, features and rows.

    The batch is the smallest one, so that positions are divided where the scheme can.
    """
    ranks = grid.ranks
    for batch in range(1, ranks + 1):
        sequences = (without_faces(rows).partition(",")[0]
                     for rows, *_ in scheme.layouts(grid, batch, ranks))
        if all(grid.ranks_along(one) <= batch for one in sequences):
            break
    return {"hidden": 4 * ranks, "heads": ranks, "batch": batch, "seq": max(2, ranks)}


def _space_of(layer: Any) -> Space:
    """Return the space of a layer's output."""
    return layer.space if hasattr(layer, "space") else layer.vector.space


def _part(name: str, space: Space, model: Transformer, moved: list[Moved]) -> LayerPart:
    shape = batch, seq, features = space.batch, space.seq, model.hidden
    layout = space.layout()
    blocks = []
    for coords in space.grid.shape.all_coordinates():
        sequences, positions, columns = layout.slices(space.grid, shape, coords)
        blocks.append(tuple((number * seq + positions.start, number * seq + positions.stop,
                             columns.start, columns.stop)
                            for number in range(sequences.start, sequences.stop)))
    return LayerPart(name, "outer" if space is model.outer else "inner", layout.spec,
                     tuple(blocks), tuple(moved))
