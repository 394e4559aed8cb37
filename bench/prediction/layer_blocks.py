"""Size the blocks of a layer that a rank has, and the elementwise work on them."""

import math
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from bench.cases.variants import itemsize
from bench.prediction.kernels import with_kernels
from mm3d import ModelSizes
from mm3d.grid.layout import divided_directions, without_faces
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.model.architecture import CHOICES, INNER_FACTOR, PLAIN, Architecture
from mm3d.model.experts.options import ExpertOptions
from mm3d.schemes import find_scheme
from mm3d.schemes.closed_form import largest_block
from mm3d.tracing import dry_run
from mm3d.tracing.events import Boundary, Call, Collective, Gemm, MemoryPass, Overlapped, PHASES

ADDED = 3    # numbers that are moved to add one to a gradient
# Arrays of keys or values that backward holds of a whole context, or of a block that goes round.
OF_OTHERS = {"gather": 12, "ring": 8}


@dataclass(frozen=True)
class LayerKind:
    """What decides how much elementwise work each element of activations is.

    `how` is without sizes; a `group` of heads of queries shares one of keys; some of the layers
    have the experts.
    """

    how: Architecture = PLAIN
    group: int = 1
    experts: ExpertOptions | None = None

    @classmethod
    def of(cls, sizes: ModelSizes, experts: ExpertOptions | None = None) -> "LayerKind":
        """Return the kind of the layers of a model."""
        return cls(Architecture(**{name: getattr(sizes.architecture, name) for name in CHOICES}),
                   sizes.group, experts)

    @property
    def layers(self) -> int:
        """Return the layers of a period: one without experts."""
        return self.experts.every if self.experts else 1

    def small(self, hidden: int, batch: int, seq: int) -> ModelSizes:
        """Return the sizes of a period of such layers with 4 heads of keys."""
        how = self.how if self.group == 1 else replace(self.how, kv_heads=4, head=hidden // 4)
        return ModelSizes(self.layers, hidden, 4 * self.group, batch, seq, how)


@cache
def elementwise_coefficients(kernels: str = "numpy", attention: str = "flash",
                             kind: LayerKind = LayerKind(), dtype: str = "float32"
                             ) -> tuple[np.ndarray, np.ndarray]:
    """Return coefficients of the words that elementwise work reads and writes in a layer.

    But for `gradient_words` they are linear in the numbers of `BlockSizes.elements`.  For both
    phases, four small dry runs give the four coefficients; on three ranks heads are uneven.  With
    experts they are the mean of layers with and without.
    """
    rows, found = [], {phase: [] for phase in PHASES}
    for ranks, seq in ((1, 64), (3, 64), (4, 64), (1, 128)):
        sizes = kind.small(256, 4, seq)
        trace = dry_run.trace_step("1d", ranks, **sizes, dtype=dtype, experts=kind.experts)
        trace = with_kernels(trace, kernels, attention, dtype, sizes.head)
        rows.append(BlockSizes("1d", GridShape("x", (ranks,)), sizes).elements())
        added = ADDED * trace.parameters / 2 * (kernels != "fused")    # of values and gradients
        for phase, others in zip(PHASES, (0, added)):
            moved = sum(e.bytes * n for e, n in trace.count(MemoryPass, phase).items()) - others
            found[phase].append(moved / itemsize(dtype) / kind.layers)
    return tuple(np.linalg.solve(np.array(rows), np.array(found[phase]))
                 for phase in PHASES)


@cache
def launches(kernels: str, attention: str, recompute: str, kind: LayerKind,
             dtype: str) -> tuple[int, int]:
    """Count the operations that a rank starts in a period of layers, forward and backward."""
    sizes = kind.small(64, 2, 8)
    trace = with_kernels(dry_run.trace_step("1d", 2, **sizes, recompute=recompute, dtype=dtype,
                                            experts=kind.experts), kernels, attention, dtype,
                         sizes.head)
    return tuple(sum(times for (when, _, event), times in trace.events.items() if when == phase
                     and not isinstance(event, (Boundary, Call, Collective, Overlapped)))
                 for phase in PHASES)


class BlockSizes:
    """Block sizes of the activations on rank 0, which has the largest.

    Positions are divided among `context` grids.
    """

    def __init__(self, name: str, grid: GridShape, sizes: ModelSizes, context: int = 1) -> None:
        self.sizes, self.context = sizes, context
        self.own = -(-sizes.seq // context)    # positions
        outer, inner = find_scheme(name).layouts(grid, sizes.batch, self.own)
        # Parts of activations by sequence, position and feature.
        self.outside, inside = (tuple(
            grid.ranks_along(divided_directions(without_faces(letters)))
            for letters in (*one[0].split(","), one[1])) for one in (outer, inner))
        self.inside = self.sequences, self.positions, self.features = inside
        self.heads = sizes.group * largest_block(sizes.kv_heads, self.features)
        self.batch = largest_block(sizes.batch, self.sequences)
        self.queries = largest_block(self.own, self.positions)

    def attention_products(self, dtype: str) -> Gemm:
        """Return the batch of products of attention in a forward pass."""
        return Gemm(2 * self.batch * self.heads, self.queries, self.sizes.head, self.sizes.seq,
                    dtype)

    @property
    def pieces(self) -> int:
        """Return how many ranks' rows an expert's product has, each in a product of its own."""
        return np.maximum(1, math.prod(self.outside[:2]) // math.prod(self.inside[:2]))

    @property
    def outer_block(self) -> tuple[int, int]:
        """Return the tokens and features of an outer activation."""
        sequences, positions, features = self.outside
        tokens = largest_block(self.sizes.batch, sequences) * largest_block(self.own, positions)
        return tokens, largest_block(self.sizes.hidden, features)

    def elements(self) -> np.ndarray:
        """Count elements of an outer activation, of inner ones and of the scores.

        Inner ones are those of attention, in whole heads with their queries, and a quarter of the
        perceptron's, which is as wide as the outer one by default.
        """
        rows = self.batch * self.queries
        return np.array(np.broadcast_arrays(
            math.prod(self.outer_block),
            rows * self.heads * self.sizes.head,
            rows * largest_block(self.sizes.inner, self.features) / INNER_FACTOR,
            rows * self.sizes.seq * self.heads), float)

    def words_of_others(self, way: str) -> float:
        """Return the words of others' keys and values, and of their gradients, in backward."""
        if self.context == 1:
            return 0.0
        return (OF_OTHERS[way] * self.elements()[1] / self.sizes.group
                * (self.context if way == "gather" else 1))

    def scores_held(self, way: str) -> tuple[float, int]:
        """Return the share of a sequence's scores that are held at once, and arrays of them.

        A rank of a context takes a chunk of queries at a time, with all keys, or those that a
        window leaves, or with a chunk of them.
        """
        if self.context == 1:
            return 1.0, 3
        window = self.sizes.architecture.window or self.sizes.seq
        seen = min(1.0, window / self.sizes.seq + 0.5 / self.context)
        return (0.5 * seen, 3) if way == "gather" else (0.25 / self.context, 2)


def gradient_words(name: str, grid: GridShape, sizes: ModelSizes,
                   experts: ExpertOptions | None) -> float:
    """Return the words of gradients that a rank adds to, of these experts once for each piece."""
    words = cost.parameters(sizes)
    if experts:
        more = experts.count * BlockSizes(name, grid, sizes).pieces - 1    # beside a perceptron
        words += (sizes.layers // experts.every * more * (sizes.architecture.gates + 1)
                  * sizes.hidden * sizes.inner)
    return words / weight_parts(name, grid)


def weight_parts(scheme: str, grid: GridShape) -> int:
    """Return the number of ranks among which a weight is divided: the others hold copies."""
    return grid.ranks_along(name for name in grid if name in find_scheme(scheme).down_weight)
