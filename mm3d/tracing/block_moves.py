"""Tell, step by step, which blocks of A, B and C each rank of a product holds, and which travel.

The product itself runs dry on every rank.  Its events give the steps and their words; the layouts
of the matrices give the blocks.  Both are compared in each step: what a picture shows to travel is
what the running code counts, and every term of a sum is added once.
"""

from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, Callable, Mapping

from mm3d.arrays import backend as backends
from mm3d.grid.layout import Layout, divided_directions
from mm3d.grid.shape import GridShape
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.scheme import Scheme
from mm3d.tracing.block_replay import HeldBlocks, Recorded, Replay, ReplayStep
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.tracing.events import Collective, Event, Gemm, Observer, Overlapped
from mm3d.tracing.observe import observed
from mm3d.transport.communicators import DryCommunicator

LINEAR_LAYERS = ("up", "down")    # their products; the other forms are of plain matrices


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

    >>> cube = mm3d.SCHEMES["3d"]
    >>> story = product_story(cube, cube.grid_shape((2, 2, 2)), "ab", (8, 8, 8))
    >>> [(step.kind, step.matrix, step.direction, step.words[0]) for step in story.steps[:2]]
    [('all_gather', 'A', 'y', 8), ('all_gather', 'B', 'x', 8)]
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
