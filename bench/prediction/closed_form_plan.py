"""Predict seconds and words of a scheme on a grid by closed forms.

Words are exact; flops and elementwise work follow from the sizes of the blocks.
"""

import math
import operator
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Callable, Iterable, Mapping, Sequence

import numpy as np

from bench.cases.variants import itemsize
from bench.prediction import machine_model
from bench.prediction.kernels import attention_of
from bench.prediction.layer_blocks import (ADDED, BlockSizes, LayerKind, elementwise_coefficients,
                                           gradient_words)
from bench.prediction.seconds import achieved_seconds, collective_terms, gemm_seconds
from mm3d import ModelSizes
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.model.attention.costs import context_moves
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.recomputation import parse_policy
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.schemes.closed_form import Move
from mm3d.tracing.events import Collective, Gemm, PHASES

Price = Callable[..., float]    # in seconds, given the fields of an event


@dataclass(frozen=True)
class GridPlan:
    """A scheme on a grid with its predicted seconds, and its words in each phase.

    Words are the mean over the ranks (exact), and those of the products in a forward pass are so
    many times their lower bound.  If `traced`, a dry run gave seconds, and peak bytes of rank 0;
    else closed forms gave the seconds, the memory is NaN, and it `fits`.
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


def _words_over_bound(name: str, grid: GridShape, sizes: ModelSizes) -> float:
    """Divide the words of all products in a forward pass by their lower bound; NaN if it is 0.

    The model has no experts: no bound is known for products whose rows have different weights.
    """
    moved, least, ranks = 0.0, 0.0, int(np.max(grid.ranks))    # of many grids the same
    for product, times in cost.list_products(sizes).items():
        moves = find_scheme(name).product_moves(grid, product)[0]
        moved += times * sum(m.words for m in moves) / ranks
        least += times * cost.lower_bound(*product.extents, ranks)
    return moved / least if least > 0 else math.nan


def screen_grids(candidates: Iterable[tuple[str, GridShape]], machine: machine_model.Machine,
                 stack: Stack) -> list[GridPlan]:
    """Predict a step of each scheme on its grid by closed forms.

    Grids on which a scheme has the same layouts, and divides along the same directions, are
    counted together.  With experts no token is dropped, and all experts' products are as fast as
    one product.
    """
    groups: dict[tuple, dict[int, GridShape]] = {}
    for place, (name, grid) in enumerate(candidates):
        layouts = [find_scheme(name).layouts(grid, *rows)
                   for rows in ((stack.batch, stack.seq), (1, 1))]
        alike = name, grid.ranks, *layouts, *[size == 1 for size in grid.sizes]
        groups.setdefault(alike, {})[place] = grid
    # Of each of many grids, whose numbers are in arrays.
    price = np.frompyfunc(collective_price(machine), len(Collective._fields), 1)
    timed = np.frompyfunc(cache(lambda *gemm: gemm_seconds(machine, Gemm(*gemm))),
                          len(Gemm._fields), 1)
    screen = partial(_screen, machine, stack, price, timed)
    found: dict[int, GridPlan] = {}
    for (name, *_), grids in groups.items():
        found.update(zip(grids, screen(name, [*grids.values()])))
    return [found[place] for place in sorted(found)]


def _screen(machine: machine_model.Machine, stack: Stack, price: Price,
            product_seconds: Price, name: str,
            grids: Sequence[GridShape]) -> list[GridPlan]:
    """Predict a step on each of the grids: of all at once, if the scheme can count them so."""
    grid = grids[0]
    if len(grids) > 1:    # arrays of Python's whole numbers, of which none is too large
        grid = GridShape(grid.directions, [
            np.array(column, object) for column in zip(*(one.sizes for one in grids))])
    try:
        found, words = grid_work(name, grid, machine, stack, product_seconds=product_seconds)
        bound = math.nan if stack.experts else _words_over_bound(name, grid, stack.sizes)
    except (AttributeError, TypeError, ValueError):    # a closed form is of numbers alone
        if len(grids) == 1:
            raise
        return [plan for one in grids
                for plan in _screen(machine, stack, price, product_seconds, name, [one])]
    seconds = [found[phase].seconds(price) for phase in PHASES]
    columns = [np.broadcast_to(np.array(numbers, object), len(grids)).tolist()
               for numbers in (*seconds, *words.values(), bound)]
    return [GridPlan(name, one, forward, backward, dict(zip(words, moved)), over)
            for one, forward, backward, *moved, over in zip(grids, *columns)]


def screen_grid(name: str, grid: GridShape, machine: machine_model.Machine,
                stack: Stack) -> GridPlan:
    """Predict a step of a scheme on a grid, as `screen_grids` does."""
    return screen_grids([(name, grid)], machine, stack)[0]


@dataclass(frozen=True)
class PhaseWork:
    """The seconds of a rank's work in a phase, and its collectives, with how often each is called.
    """

    seconds_alone: float
    collectives: tuple[tuple[Collective, int], ...]

    def seconds(self, price: Price, strides: Mapping[str, int] | None = None) -> float:
        """Predict the seconds, by default with the grid's own `strides` over the nodes."""
        return self.seconds_alone + sum(
            calls * price(*one._replace(stride=strides[one.direction]) if strides else one)
            for one, calls in self.collectives)


def collective_price(machine: machine_model.Machine) -> Price:
    """Return a function that predicts the seconds of a collective, and remembers them."""
    return cache(lambda *event: achieved_seconds(
        machine, collective_terms(machine, Collective(*event))))


def collectives_of(moves: Iterable[Move], grid: GridShape,
                   size: int) -> tuple[tuple[Collective, int], ...]:
    """Return the collectives of a rank, and how often it calls each, for words of `size` bytes."""
    found = []
    for move in moves:
        g = grid[move.axis]
        if move.axis in grid.divided:
            whole = move.words / grid.ranks * size * g / (g - 1) / move.calls
            whole /= 2 if move.collective == "all_reduce" else 1
            found.append((Collective(move.collective, move.axis, g, grid.stride(move.axis),
                                     whole), move.calls))
    return tuple(found)


def grid_work(name: str, grid: GridShape, machine: machine_model.Machine, stack: Stack,
              context: tuple[int, str] = (1, "gather"), of_rank: ExpertOptions | None = None,
              product_seconds: Price | None = None) -> tuple[
                  dict[str, PhaseWork], dict[str, float]]:
    """Return the work of a rank in each phase, and the words that it moves.

    `context` is the number of grids among which positions are divided, and the way of attention;
    `of_rank` are the experts of a rank, by default all; `product_seconds` replaces `gemm_seconds`.
    """
    timed = product_seconds or (lambda *gemm: gemm_seconds(machine, Gemm(*gemm)))
    size, whole = itemsize(stack.dtype), stack.sizes
    dtype, recompute, experts = stack.dtype, stack.recompute, stack.experts
    blocks = BlockSizes(name, grid, whole, context[0])
    sizes = replace(whole, seq=blocks.own)    # of a grid
    moves = cost.moves(name, grid, sizes, recompute, experts)
    words = {phase: sum(m.words for m in found.values()) / grid.ranks
             for phase, found in moves.items()}
    flash, scores = attention_of(machine, dtype) == "flash", blocks.attention_products(dtype)
    attention = sizes["layers"] * (scores.flops / machine.gemm_rate[dtype] if flash else
                                   timed(*scores))
    forward = attention + sum(
        times * local.count * timed(*Gemm(1, *local[:3], dtype))
        for product, times in cost.list_products(sizes, experts).items()
        for local in find_scheme(name).local_products(grid, product))
    again = cost.flops_again(whole, recompute, experts) / cost.flops(whole, experts)["forward"]
    backward = (2 + again) * forward
    if machine.kernels != "fused" or flash:    # scores are multiplied once more
        backward += attention / 2
    elements = blocks.elements().astype(object)
    moved, moved_back = (sizes["layers"] * size
                         * sum(map(operator.mul, coefficients.tolist(), elements))
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


def _over_context(move: Move, ranks: int, grid: GridShape, size: int) -> tuple[Collective, int]:
    """Return a collective over a context of neighbouring grids, and how often a rank calls it."""
    sent = move.words / (grid.ranks * ranks) * size / move.calls
    if move.collective != "all_to_all":    # the whole, of which a rank does not receive its own
        sent *= ranks / (ranks - 1)
    return Collective(move.collective, move.axis, ranks, grid.ranks, sent), move.calls
