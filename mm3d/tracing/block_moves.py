"""Tell, step by step, what ranks hold and what travels, in a product and in a Transformer layer.

The product itself runs dry on every rank.  Its events give the steps and their words; the layouts
of the matrices give the blocks.  Both are compared in each step: what a picture shows to travel is
what the running code counts, and every term of a sum is added once.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, Mapping

from mm3d.arrays import backend as backends
from mm3d.grid.activations import Space
from mm3d.grid.layout import Layout, divided_directions, without_faces
from mm3d.grid.shape import GridShape
from mm3d.model.cost import moves
from mm3d.model.transformer import Transformer
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.scheme import Scheme
from mm3d.tracing.block_replay import HeldBlocks, Recorded, Replay, ReplayStep
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.tracing.events import Collective, Event, Gemm, LayerEvent, Observer, Overlapped
from mm3d.tracing.observe import observed
from mm3d.transport.communicators import DryCommunicator

LINEAR_LAYERS = ("up", "down")    # their products; the other forms are of plain matrices
Rectangle = tuple[int, int, int, int]    # rows and columns: first, last + 1


@dataclass(frozen=True)
class Story:
    """Describe a product on all ranks: what they store, and the steps."""

    # Name of the scheme; "ab", "abt" or "atb" for plain matrices, "up" or "down" for the linear
    # layers of a Transformer.
    scheme: str
    form: str
    grid: GridShape
    # Global shapes and layouts of "A", "B" and "C".
    shapes: Mapping[str, tuple[int, int]]
    layouts: Mapping[str, str]
    stored: tuple[HeldBlocks, ...]    # by rank, the blocks before the first step, by matrix
    steps: tuple[ReplayStep, ...]
    # The collectives in closed form, with the words of all ranks; None where there is none.
    closed_form: tuple[Move, ...] | None


class _WordRecorder(Observer):
    """List the events of a rank on a grid, with the words that it counts from each to the next."""

    sizes = False

    def __init__(self, grid: Any, kinds: tuple[type, ...]) -> None:
        self.grid, self.kinds = grid, (*kinds, Overlapped)
        self.found: list[Recorded] = []
        grid.reset_traffic()

    def enter(self, event: Event, barrier: Any = None) -> None:
        if isinstance(event, Overlapped):
            raise ValueError("blocks are under way while ranks multiply, so that steps do not "
                             "follow each other: a scheme without overlap would do")
        self.count()
        self.found.append(Recorded(event, self.operand, 0))

    def count(self) -> None:
        """Count the words of the last event: its traffic is complete when the next one begins."""
        if self.found:
            words = sum(one.words for one in self.grid.traffic().values())
            self.found[-1] = replace(self.found[-1], words=words)
        self.grid.reset_traffic()


def run_dry(scheme: type[Scheme], grid: GridShape,
            make: Callable[[Scheme], tuple[Any, Callable[[], Any]]],
            kinds: tuple[type, ...]) -> tuple[Any, list[tuple[Recorded, ...]]]:
    """Run dry on every rank of a grid what `make` returns for its scheme, with default options.

    That is a model, as `mm3d.tracing.observe.observed` takes it, and what to call.  Returns the
    model of rank 0; and the events of these kinds in order, each with those of all ranks.  Raises
    ValueError when the scheme cannot use the grid.
    """
    scheme.check_grid(grid)
    backend = backends.get(DryBackend())
    models, found = [], []
    for rank in range(grid.ranks):
        own = scheme(DryCommunicator(grid.ranks, rank), grid, backend)
        model, run = make(own)
        recorder = _WordRecorder(own.grid, kinds)
        with observed(own.grid, recorder, model):
            run()
        recorder.count()
        models.append(model)
        found.append(recorder.found)
    return models[0], [*zip(*found, strict=True)]


def product_story(scheme: type[Scheme], grid: GridShape, form: str, shape: tuple[int, int, int],
                  backward: bool = False) -> Story:
    """Run a product dry on every rank of a grid, and return its steps.

    `form` is "ab", "abt" or "atb" of plain matrices, C = A B, A B^T or A^T B; or C = A B of the
    linear layer that leads "up" into the inner space of activations, or "down" from it.  `shape`
    is M, N, K: C is M x K, a sum of N terms.  In `backward` the steps are those of dA and dB.

    Raises ValueError when the scheme has no products of plain matrices, or cannot use the grid;
    when a size is so small that ranks have nothing to multiply.  Raises RuntimeError when blocks
    and events do not agree, which is an error of the program.
    """
    if form not in LINEAR_LAYERS and scheme.matrix_product is None:
        raise ValueError(f"scheme {scheme.name!r} has no products of plain matrices: the form "
                         f"{' or '.join(LINEAR_LAYERS)}, of a layer, would do")
    make = _layer_product if form in LINEAR_LAYERS else _matrix_product
    model, recorded = run_dry(scheme, grid, lambda own: make(own, form, shape, backward),
                              (Gemm, Collective))
    replay = Replay("ab" if form in LINEAR_LAYERS else form, grid, model.layouts, shape)
    stored = replay.stored("ABC" if backward else "AB")
    try:
        steps = tuple(replay.steps(recorded, backward))
    except (RuntimeError, IndexError) as error:
        if min(shape) >= grid.ranks:
            raise
        raise ValueError(f"--shape {','.join(map(str, shape))}: some of the {grid.ranks} ranks "
                         f"have nothing to multiply: sizes from {grid.ranks} would do") from error
    return Story(scheme.name, form, grid, replay.shapes,
                 {name: layout.spec for name, (layout, _) in model.layouts.items()},
                 stored, steps, _closed_form(scheme, grid, form, shape, backward))


def _matrix_product(scheme: Scheme, form: str, shape: tuple[int, int, int],
                    backward: bool) -> tuple[SimpleNamespace, Callable]:
    product = scheme.matrix_product(scheme.grid, form, shape)
    layouts = {name: (product.layouts[name], product.shapes[name]) for name in "ABC"}
    A, B, C = _empty_blocks(scheme.grid, layouts)
    run = partial(product.backward, C, A, B) if backward else partial(product.forward, A, B)
    return SimpleNamespace(product=product, layouts=layouts), run


def _layer_product(scheme: Scheme, form: str, shape: tuple[int, int, int],
                   backward: bool) -> tuple[SimpleNamespace, Callable]:
    M, N, K = shape
    # Rows are sequences of one position, or positions of one sequence where these are divided.
    rows = {dim for one in scheme.layouts(scheme.grid.shape, M, 1)
            for dim, letters in enumerate(one[0].split(",")) if divided_directions(letters)}
    if len(rows) > 1:
        raise ValueError(f"M = {M} rows are divided by batch and position: a multiple of the "
                         f"{scheme.grid.size} ranks would do")
    sizes = (1, M) if 1 in rows else (M, 1)
    source, target = scheme.spaces(*sizes)[::1 if form == "up" else -1]
    product = scheme.product(source, target, (N, K), (1, 1))
    layouts = {"A": (source.layout(), (*sizes, N)), "B": (product.weight, (N, K)),
               "C": (target.layout(), (*sizes, K))}
    A, B, C = _empty_blocks(scheme.grid, layouts)
    run = partial(product.forward, A, B)
    if backward:
        run = partial(product.backward, C, B, run()[1])
    chain = SimpleNamespace(layers=[SimpleNamespace(product=product)])    # as `observed` sees one
    return SimpleNamespace(layers=chain, layouts=layouts), run


def _empty_blocks(grid: Any, layouts: Mapping[str, tuple[Layout, tuple[int, ...]]]) -> list:
    return [grid.backend.empty(layout.local_shape(grid, shape), "float32")
            for layout, shape in layouts.values()]


def _closed_form(scheme: type[Scheme], grid: GridShape, form: str, shape: tuple[int, int, int],
                 backward: bool) -> tuple[Move, ...] | None:
    """Return the collectives that the scheme states, along directions of several ranks."""
    if form in LINEAR_LAYERS:
        moves = scheme.product_moves(grid, ProductShape(form, *shape))[backward]
    else:
        moves = None if backward else scheme.matrix_product.forward_moves(grid, form, shape)
    return None if moves is None else tuple(move for move in moves if grid[move.axis] > 1)


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
    spaces = {layer.name: layer.space if hasattr(layer, "space") else layer.vector.space
              for chain in model.layers.layers for layer in chain.layers}    # of their outputs
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
