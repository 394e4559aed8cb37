"""Predict seconds and words of a scheme on a grid by closed forms.

Words are exact; flops and elementwise work follow from the sizes of the blocks.
"""

import math
from dataclasses import dataclass, replace
from functools import cache
from typing import Callable, Iterable, Mapping

import numpy as np

from bench.cases.variants import itemsize
from bench.prediction import machine_model
from bench.prediction.kernels import attention_of, with_kernels
from bench.prediction.seconds import achieved_seconds, collective_terms, gemm_seconds
from mm3d import ModelSizes
from mm3d.grid.layout import divided_directions, without_faces
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.model.architecture import CHOICES, INNER_FACTOR, PLAIN, Architecture
from mm3d.model.attention.costs import context_moves
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.recomputation import parse_policy
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.schemes.closed_form import Move, largest_block
from mm3d.tracing import dry_run
from mm3d.tracing.events import Collective, Gemm, PHASES, Pass

ADDED = 3    # numbers that are moved to add one to a gradient
Price = Callable[[Collective], float]    # in seconds
# Arrays of keys or values that backward holds of a whole context, or of a block that goes round.
OF_OTHERS = {"gather": 6, "ring": 8}


@dataclass(frozen=True)
class Plan:
    """A scheme on a grid with its predicted seconds and words, and its memory.

    Attributes
    ----------
    scheme, grid : str, GridShape
        The scheme, and the sizes of its directions.
    forward, backward : float
        Predicted seconds.
    words : dict of str to float
        Words moved in each phase, mean over the ranks (exact).
    over_bound : float
        Words of the products in a forward pass over their lower bound.
    memory : float
        Peak bytes of rank 0, by a dry run; NaN without one.
    fits : bool
        Whether a rank of the machine has this much memory; True without a dry run.
    traced : bool
        Whether a dry run gave seconds and memory; otherwise closed forms gave the seconds.
    """

    scheme: str
    grid: GridShape
    forward: float
    backward: float
    words: dict[str, float]
    over_bound: float
    memory: float = math.nan
    fits: bool = True
    traced: bool = False

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step."""
        return self.forward + self.backward

    @property
    def order(self) -> tuple[bool, float]:
        """Return the sort key: plans that fit first, then by seconds."""
        return not self.fits, self.seconds


def words_over_bound(name: str, grid: GridShape, sizes: ModelSizes) -> float:
    """Divide the words of all products in a forward pass by their lower bound; NaN if it is 0.

    The model has no experts: no bound is known for products whose rows have different weights.
    """
    moved = least = 0.0
    for product, times in cost.products(sizes).items():
        moves = find_scheme(name).product_moves(grid, product)[0]
        moved += times * sum(m.words for m in moves if grid[m.axis] > 1) / grid.ranks
        least += times * cost.lower_bound(*product.extents, grid.ranks)
    return moved / least if least > 0 else math.nan


@dataclass(frozen=True)
class LayerKind:
    """What decides how much elementwise work each element of activations is.

    Attributes
    ----------
    how : Architecture
        An architecture without sizes.
    group : int
        The heads of queries that share one of keys.
    experts : ExpertOptions, optional
        Options of experts, which some of the layers have.
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
    phases, four small dry runs give the four coefficients; on three ranks heads are uneven.

    Parameters
    ----------
    kernels, attention, kind, dtype : str, str, LayerKind, str
        As of `bench.prediction.machine_model.Machine`; the kind of the layer, with experts the
        mean of those with and without; the type of the values.
    """
    rows, found = [], {phase: [] for phase in PHASES}
    for ranks, seq in ((1, 64), (3, 64), (4, 64), (1, 128)):
        sizes = kind.small(256, 4, seq)
        trace = dry_run.trace_step("1d", ranks, **sizes, dtype=dtype, experts=kind.experts)
        trace = with_kernels(trace, kernels, attention, dtype, sizes.head)
        rows.append(BlockSizes("1d", GridShape("x", (ranks,)), sizes).elements())
        added = ADDED * trace.parameters / 2 * (kernels != "fused")    # of values and gradients
        for phase, others in zip(PHASES, (0, added)):
            moved = sum(e.bytes * n for e, n in trace.count(Pass, phase).items()) - others
            found[phase].append(moved / itemsize(dtype) / kind.layers)
    return tuple(np.linalg.solve(np.array(rows), np.array(found[phase]))
                 for phase in PHASES)


class BlockSizes:
    """Block sizes of the activations on rank 0, which has the largest.

    Parameters
    ----------
    name, grid, sizes : str, GridShape, ModelSizes
        The scheme, the sizes of its directions, and those of the model.
    context : int
        Number of grids among which the positions are divided.
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
        return max(1, math.prod(self.outside[:2]) // math.prod(self.inside[:2]))

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
        return np.array([
            math.prod(self.outer_block),
            rows * self.heads * self.sizes.head,
            rows * largest_block(self.sizes.inner, self.features) / INNER_FACTOR,
            rows * self.sizes.seq * self.heads], float)

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


def screen_grid(name: str, grid: GridShape, machine: machine_model.Machine,
                stack: Stack) -> Plan:
    """Predict a step of a scheme on a grid by closed forms.

    With experts no token is dropped, and all experts' products are as fast as one product.
    """
    (found, words), price = grid_work(name, grid, machine, stack), collective_price(machine)
    bound = math.nan if stack.experts else words_over_bound(name, grid, stack.sizes)
    return Plan(name, grid, *(found[phase].seconds(price) for phase in PHASES), words, bound)


@dataclass(frozen=True)
class PhaseWork:
    """The work of a rank in a phase.

    Attributes
    ----------
    seconds_alone : float
        Of all but collectives.
    collectives : tuple of (Collective, int)
        Those of the phase, and how often each is called.
    """

    seconds_alone: float
    collectives: tuple[tuple[Collective, int], ...]

    def seconds(self, price: Price, strides: Mapping[str, int] | None = None) -> float:
        """Predict the seconds, by default with the grid's own `strides` over the nodes."""
        return self.seconds_alone + sum(
            calls * price(one._replace(stride=strides[one.direction]) if strides else one)
            for one, calls in self.collectives)


def collective_price(machine: machine_model.Machine) -> Price:
    """Return a function that predicts the seconds of a collective, and remembers them."""
    return cache(lambda event: achieved_seconds(machine, collective_terms(machine, event)))


def collectives_of(moves: Iterable[Move], grid: GridShape,
                   size: int) -> tuple[tuple[Collective, int], ...]:
    """Return the collectives of a rank, and how often it calls each, for words of `size` bytes."""
    found = []
    for move in moves:
        g = grid[move.axis]
        if g > 1:
            whole = move.words / grid.ranks * size * g / (g - 1) / move.calls
            whole /= 2 if move.collective == "all_reduce" else 1
            found.append((Collective(move.collective, move.axis, g, grid.stride(move.axis),
                                     whole), move.calls))
    return tuple(found)


def grid_work(name: str, grid: GridShape, machine: machine_model.Machine, stack: Stack,
              context: tuple[int, str] = (1, "gather"), of_rank: ExpertOptions | None = None
              ) -> tuple[dict[str, PhaseWork], dict[str, float]]:
    """Return the work of a rank in each phase, and the words that it moves.

    `context` is the number of grids among which positions are divided, and the way of attention;
    `of_rank` are the experts of a rank, by default all.
    """
    size, whole = itemsize(stack.dtype), stack.sizes
    dtype, recompute, experts = stack.dtype, stack.recompute, stack.experts
    blocks = BlockSizes(name, grid, whole, context[0])
    sizes = replace(whole, seq=blocks.own)    # of a grid
    moves = cost.moves(name, grid, sizes, recompute, experts)
    words = {phase: sum(m.words for m in found.values()) / grid.ranks
             for phase, found in moves.items()}
    flash, scores = attention_of(machine, dtype) == "flash", blocks.attention_products(dtype)
    attention = sizes["layers"] * (scores.flops / machine.gemm_rate[dtype] if flash else
                                   gemm_seconds(machine, scores))
    forward = attention + sum(
        times * local.count * gemm_seconds(machine, Gemm(1, *local[:3], dtype))
        for product, times in cost.products(sizes, experts).items()
        for local in find_scheme(name).local_products(grid, product))
    again = cost.flops_again(whole, recompute, experts) / cost.flops(whole, experts)["forward"]
    backward = (2 + again) * forward
    if machine.kernels != "fused" or flash:    # scores are multiplied once more
        backward += attention / 2
    moved, moved_back = (sizes["layers"] * size * float(coefficients @ blocks.elements())
                         for coefficients in elementwise_coefficients(
                             machine.kernels, attention_of(machine, dtype),
                             LayerKind.of(sizes, experts), dtype))
    # Every policy repeats the elementwise work, and two joined policies repeat it twice.
    chosen = parse_policy(recompute)
    moved_back += (bool(chosen.group_size) + chosen.selective) * moved
    if machine.kernels != "fused":    # within whose products terms of gradients are added
        moved_back += ADDED * size * gradient_words(name, grid, whole, of_rank or experts)
    found = {phase: collectives_of(moves[phase].values(), grid, size) for phase in PHASES}
    if context[0] > 1:
        over = context_moves(name, grid, whole, *context, recompute)
        for phase in PHASES:
            found[phase] += tuple(_over_context(move, context[0], grid, size)
                                  for move in over[phase].values())
    return {phase: PhaseWork(achieved_seconds(machine, {
        "gemm": gemm, "memory": memory / machine.memory_bandwidth}), found[phase])
        for phase, gemm, memory in zip(PHASES, (forward, backward), (moved, moved_back))}, words


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


def _over_context(move: Move, ranks: int, grid: GridShape, size: int) -> tuple[Collective, int]:
    """Return a collective over a context of neighbouring grids, and how often a rank calls it."""
    sent = move.words / (grid.ranks * ranks) * size / move.calls
    if move.collective != "all_to_all":    # the whole, of which a rank does not receive its own
        sent *= ranks / (ranks - 1)
    return Collective(move.collective, move.axis, ranks, grid.ranks, sent), move.calls
