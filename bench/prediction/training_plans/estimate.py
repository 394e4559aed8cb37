"""Estimate the seconds of a training step and the bytes of a rank, from the work of one layer."""

from functools import cache
from typing import NamedTuple

from bench.cases.variants import itemsize
from bench.prediction.hop_seconds import place_moves, seconds_of_moves, stage_moves
from bench.prediction.seconds import achieved_seconds, collective_terms
from bench.prediction.training_plans.choices import Choice, Training
from bench.prediction.training_plans.layer_work import LayerBytes, LayerWork
from bench.prediction.training_step import (adamw_seconds, state_by_kind,
                                            weight_parts)
from mm3d.model import cost
from mm3d.tracing.events import Collective

ARRAYS_OF_LAYER, ARRAYS_OF_ENDS = 12, 4    # of parameters


class StageSizes(NamedTuple):
    """The layers of stages, and the parameters of a rank: those of a layer and of the ends."""

    parts: int    # of a weight
    layers: tuple[int, int, int]    # of the first stage, of the last, of all
    of_layer: float
    ends: tuple[float, float]

    @property
    def most(self) -> float:
        """Return the parameters of a rank of the stage with the most."""
        return max(count * self.of_layer + extra
                   for count, extra in zip(self.layers, self.ends))


class Estimator:
    """Estimate plans of one training.

    Parameters
    ----------
    training : Training
        What is trained.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.sizes, self.sums, self.hop, self.tied, self.adamw, self.state = map(cache, (
            self._sizes, self._sums, self._hop, self._tied, self._adamw, self._state))
        self.parts, self.products = cache(weight_parts), cache(self._products)

    def memory(self, choice: Choice, filled: LayerBytes) -> float:
        """Estimate the bytes at the peak of a rank."""
        stages, chunks = choice.stages, choice.chunks
        micro = self.training.microbatches(choice)
        sizes = self.sizes(self.parts(choice.scheme, choice.grid), stages)
        state = self.state(choice.zero, choice.data)
        first, last, _ = sizes.layers
        behind = 0.0
        if chunks > 1:    # in layers of all chunks of a rank
            most = micro * chunks
            flying = [min(2 * far + (chunks - 1) * stages + 1, most) / chunks
                      for far in (stages - 1, 0)]
        else:
            flying = [min(stages, micro), 1]
            if choice.schedule == "zb-h1":
                behind = min(stages - 1, micro - 1) * filled.operands
        held = (filled.saved * first * flying[0], last * (filled.saved * flying[1] + behind))
        spent = filled.working, filled.ends_working
        if stages == 1:
            spent = (max(spent), max(spent))
        parameters = [count * sizes.of_layer + extra
                      for count, extra in zip(sizes.layers, sizes.ends)]
        return max(state * of + kept + more
                   for of, kept, more in zip(parameters, held, spent))

    def _state(self, zero: int, data: int) -> float:
        """Return the bytes per parameter of a rank's state."""
        return sum(state_by_kind(self.training.dtype, 1.0, zero, data).values())

    def least(self, choice: Choice, passes: float) -> float:
        """Return a bound of `seconds` from below: products at their rate, passes, and the bubble.
        """
        micro, stages = self.training.microbatches(choice), choice.stages
        share = (stages - 1) / (micro * choice.chunks) * (choice.schedule != "zb-h1")
        layers = micro * self.training.gpt.layers / stages
        return (self.products(choice.recompute) + passes * layers) * (1 + share)

    def _products(self, recompute: str) -> float:
        """Return the seconds of all products at their rate, divided among all GPUs."""
        training, machine = self.training, self.training.machine
        sizes = training.stack(training.batch, recompute).sizes
        count = sum(cost.flops(sizes).values()) + cost.flops_again(sizes, recompute)
        return count / (training.gpus * machine.gemm_rate[training.dtype] * machine.achieved.gemm)

    def seconds(self, choice: Choice, work: LayerWork) -> float:
        """Estimate the seconds of a step."""
        micro, stages = self.training.microbatches(choice), choice.stages
        sizes = self.sizes(self.parts(choice.scheme, choice.grid), stages)
        forward, backward = work.forward, work.backward
        where = choice.data, stages * choice.places
        if choice.data > 1 and choice.zero > 1:
            scattered, gathered = self.sums(*where, sizes.of_layer, ARRAYS_OF_LAYER)
            backward += scattered
            if choice.zero == 3:
                backward += gathered * (1 + (choice.recompute == "full"))
                forward += gathered
        layer = forward + backward
        first, last, every = sizes.layers
        ends = sum(work.ends)
        busy = [first * layer, last * layer + ends]
        most, whole = max(busy), every * layer + ends
        hop = self.hop(choice.scheme, choice.grid, choice.micro, stages, choice.data)
        others = whole - most
        if choice.chunks > 1:
            total = micro * most + others / choice.chunks + 2 * (stages - 1) * hop
        elif choice.schedule == "zb-h1":
            total = (micro * most + others * (layer - 2 * work.weights) / layer
                     + 2 * (stages - 1 + micro) * hop)
        else:
            total = micro * most + others + 2 * (stages - 1 + micro) * hop
        parameters = sizes.most
        if choice.data > 1 and choice.zero < 3:
            scattered, gathered = self.sums(
                *where, parameters, ARRAYS_OF_LAYER * first + ARRAYS_OF_ENDS)
            total += gathered + scattered * (choice.zero < 2)
        share = choice.data if choice.zero else 1
        return (total + self.adamw(parameters / share)
                + self.tied(stages, choice.places, sizes.parts))

    def _sizes(self, parts: int, stages: int) -> StageSizes:
        """Return the sizes of stages where weights are divided in so many parts."""
        gpt = self.training.gpt
        share, more = divmod(gpt.layers, stages)
        table = gpt.vocab * gpt.hidden / parts
        ends = [table + self.training.seq * gpt.hidden / parts, table]
        if stages == 1:
            ends = [ends[0] + table * (not gpt.tied)] * 2
        layer = (12 * gpt.hidden ** 2 + 13 * gpt.hidden) / parts
        return StageSizes(parts, (share + (more > 0), share, gpt.layers), layer, tuple(ends))

    def _sums(self, data: int, stride: int, words: float, arrays: int) -> tuple[float, float]:
        """Return the seconds to sum gradients over replicas, and to gather values."""
        size, machine = itemsize(self.training.dtype), self.training.machine
        found = []
        for kind in ("reduce_scatter", "all_gather"):
            terms = collective_terms(machine, Collective(kind, "d", data, stride, words * size))
            terms["latency"] *= arrays
            found.append(achieved_seconds(machine, terms))
        return tuple(found)

    def _hop(self, scheme: str, grid, micro: int, stages: int, data: int) -> float:
        """Return the seconds of a hop between stages, on two nodes if any of them are."""
        if stages == 1:
            return 0.0
        training, per_node = self.training, self.training.machine.ranks_per_node
        source = min(stages - 2, max(0, per_node // grid.ranks - 1))
        shape = micro, training.seq, training.gpt.hidden
        moves = stage_moves(scheme, grid, grid, shape, {})
        return seconds_of_moves(training.machine, *place_moves(
            moves, itemsize(training.dtype), grid.ranks, stages, data, per_node,
            (source, source + 1)))[0]

    def _adamw(self, parameters: float) -> float:
        return adamw_seconds(self.training.machine, parameters, self.training.dtype)

    def _tied(self, stages: int, places: int, parts: int) -> float:
        """Return the seconds to sum the gradient of a tied table over the first and last stage."""
        gpt, machine = self.training.gpt, self.training.machine
        if not gpt.tied or stages == 1:
            return 0.0
        whole = gpt.vocab * gpt.hidden / parts * itemsize(self.training.dtype)
        return achieved_seconds(machine, collective_terms(machine, Collective(
            "all_reduce", "s", 2, (stages - 1) * places, int(whole))))
