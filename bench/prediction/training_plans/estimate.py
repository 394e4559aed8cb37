"""Estimate the seconds of a training step and the bytes of a rank, from the work of one layer."""

from functools import cache
from typing import NamedTuple

from bench.cases.variants import itemsize
from bench.prediction.hop_seconds import place_moves, seconds_of_moves, stage_moves
from bench.prediction.seconds import achieved_seconds, collective_terms
from bench.prediction.training_plans.choices import Choice, Training, mesh_strides
from bench.prediction.training_plans.layer_work import LayerBytes, LayerWork
from bench.prediction.training_step import (adamw_seconds, layer_parameters, state_by_kind,
                                            weight_parts)
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.tracing.events import Collective

ARRAYS_OF_ENDS = 4    # of parameters


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
        self.arrays = cost.parameter_arrays(training.gpt.sizes())    # of a layer
        self.sizes, self.moved, self.hop, self.tied, self.adamw, self.state, self.products = map(
            cache, (self._sizes, self._moved, self._hop, self._tied, self._adamw, self._state,
                    self._products))

    def memory(self, choice: Choice, filled: LayerBytes) -> float:
        """Estimate the bytes at the peak of a rank."""
        state = self.state(choice.zero, choice.parts)
        return max(state * parameters + held for parameters, held in self.held(choice, filled))

    def held(self, choice: Choice, filled: LayerBytes) -> tuple[tuple[float, float], ...]:
        """Return the parameters of a rank of the first and the last stage, and bytes beside them.

        They do not depend on what replicas divide.
        """
        stages, chunks = choice.stages, choice.chunks
        micro = self.training.microbatches(choice)
        sizes = self.sizes(choice.scheme, choice.grid, stages)
        first, last, _ = sizes.layers
        behind = grown = 0.0
        if chunks > 1:    # in layers of all chunks of a rank
            most = micro * chunks
            flying = [min(2 * far + (chunks - 1) * stages + 1, most) / chunks
                      for far in (stages - 1, 0)]
        else:
            flying = [min(stages, micro), 1]
            if choice.schedule == "zb-h1":
                behind, grown = min(stages - 1, micro - 1) * filled.operands, filled.grown
        held = (filled.saved * first * flying[0] + grown * (first - 1),
                last * (filled.saved * flying[1] + behind) + grown * (last - 1))
        spent = filled.working, filled.ends_working
        if stages == 1:
            spent = (max(spent), max(spent))
        parameters = [count * sizes.of_layer + extra
                      for count, extra in zip(sizes.layers, sizes.ends)]
        return tuple((of, kept + more) for of, kept, more in zip(parameters, held, spent))

    def _state(self, zero: int, shards: int) -> float:
        """Return the bytes per parameter of a rank's state."""
        return sum(state_by_kind(self.training.dtype, 1.0, zero, shards).values())

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

    def seconds(self, choice: Choice, work: LayerWork, hops: bool = True) -> float:
        """Estimate the seconds of a step; without `hops` a bound from below."""
        stages, strides = choice.stages, choice.strides
        sizes = self.sizes(choice.scheme, choice.grid, stages)
        between = self.hop(choice.scheme, choice.grid, choice.micro,
                           (choice.data // choice.parts, choice.parts, stages),
                           choice.inside) if hops and stages > 1 else (0.0, 0.0)
        total, busy = self._pipelined(choice, work, self._with_replicas(
            choice, work, sizes, strides), between)
        sums = self._last_sums(choice, sizes, strides)
        if self.training.overlap:
            sums = max(0.0, sums - busy)
        share = choice.parts if choice.zero else 1
        return (total + sums + self.adamw(sizes.most / share)
                + self.tied(stages, strides["s"], sizes.parts))

    def alone(self, choice: Choice, work: LayerWork) -> float:
        """Estimate the seconds of a step without hops, replicas and optimizer."""
        return self._pipelined(choice, work, work.forward + work.backward, (0.0, 0.0))[0]

    def _pipelined(self, choice: Choice, work: LayerWork, layer: float,
                   hops: tuple[float, float]) -> tuple[float, float]:
        """Return the seconds of all stages, and those in which one computes a micro-batch.

        Parameters
        ----------
        choice, work
            The plan, and its work.
        layer : float
            Seconds of a layer.
        hops : (float, float)
            The result of `_hop`.
        """
        micro, stages = self.training.microbatches(choice), choice.stages
        sizes = self.sizes(choice.scheme, choice.grid, stages)
        first, last, every = sizes.layers
        ends = sum(work.ends)
        busy = [first * layer, last * layer + ends]
        most, whole = max(busy), every * layer + ends
        others = whole - most
        if choice.chunks > 1:
            total = micro * most + others / choice.chunks + (
                2 * (stages * choice.chunks - 1) * hops[0])
        elif choice.schedule == "zb-h1":
            total = (micro * most + others * (layer - 2 * work.weights) / layer
                     + 2 * (stages - 1 + micro) * hops[1])
        else:
            total = micro * most + others + 2 * (stages - 1 + micro) * hops[1]
        return total, min(busy)

    def _with_replicas(self, choice: Choice, work: LayerWork, sizes: StageSizes,
                       strides: dict[str, int]) -> float:
        """Return the seconds of a layer with what ZeRO 2 and 3 move."""
        if choice.parts == 1 or choice.zero < 2:
            return work.forward + work.backward
        where = choice.parts, strides["d"], sizes.of_layer, self.arrays
        gathered = self.moved("all_gather", *where) * (choice.zero == 3)
        over = gathered, (self.moved("reduce_scatter", *where)
                          + gathered * (1 + (choice.recompute == "full")))
        both = (work.forward, over[0]), (work.backward, over[1])
        return sum(map(max if self.training.overlap else sum, both))

    def _last_sums(self, choice: Choice, sizes: StageSizes, strides: dict[str, int]) -> float:
        """Return the seconds of sums over replicas, and of gathers, at the end of a step."""
        parts, copies = choice.parts, choice.data // choice.parts
        arrays, found = self.arrays * sizes.layers[0] + ARRAYS_OF_ENDS, 0.0
        for kind, moves in (("reduce_scatter", choice.zero < 2), ("all_gather", choice.zero < 3)):
            if moves and parts > 1:
                found += self.moved(kind, parts, strides["d"], sizes.most, arrays)
        if copies > 1:
            found += self.moved("all_reduce", copies, strides["r"], sizes.most / parts, arrays)
        return found

    def _sizes(self, scheme: str, grid: GridShape, stages: int) -> StageSizes:
        """Return the sizes of stages."""
        gpt, parts = self.training.gpt, weight_parts(scheme, grid)
        share, more = divmod(gpt.layers, stages)
        table = gpt.vocab * gpt.hidden / parts
        learned = gpt.architecture.positions == "learned"
        ends = [table + learned * self.training.seq * gpt.hidden / parts, table]
        if stages == 1:
            ends = [ends[0] + table * (not gpt.tied)] * 2
        layer = layer_parameters(scheme, grid, self.training.stack(1, "none", 1).sizes)
        return StageSizes(parts, (share + (more > 0), share, gpt.layers), layer, tuple(ends))

    def _moved(self, kind: str, ranks: int, stride: int, words: float, arrays: int) -> float:
        """Return the seconds of a collective of so many arrays over replicas."""
        size, machine = itemsize(self.training.dtype), self.training.machine
        terms = collective_terms(machine, Collective(kind, "d", ranks, stride, words * size))
        terms["latency"] *= arrays
        return achieved_seconds(machine, terms)

    def _hop(self, scheme: str, grid: GridShape, micro: int, rds: tuple[int, int, int],
             inside: str) -> tuple[float, float]:
        """Return the mean seconds of a hop between stages, and those of the longest.

        The longest is on two nodes if any is, and the first on one node if any is.
        """
        training, per_node = self.training, self.training.machine.ranks_per_node
        stride = mesh_strides(*rds, grid, inside)["s"]
        crossing = min(rds[2] - 2, max(0, per_node // stride - 1))
        mesh = GridShape("rds" + grid.directions, (*rds, *grid.sizes))
        shape = micro, training.seq, training.gpt.hidden
        moves = stage_moves(scheme, grid, grid, shape, {})
        first, longest = (seconds_of_moves(training.machine, *place_moves(
            moves, itemsize(training.dtype), mesh, inside, per_node, (source, source + 1)))[0]
            for source in (0, crossing))
        share = min(1.0, stride / per_node)    # of hops that leave a node
        return share * longest + (1 - share) * first, longest

    def _adamw(self, parameters: float) -> float:
        return adamw_seconds(self.training.machine, parameters, self.training.dtype)

    def _tied(self, stages: int, stride: int, parts: int) -> float:
        """Return the seconds to sum the gradient of a tied table over the first and last stage."""
        gpt, machine = self.training.gpt, self.training.machine
        if not gpt.tied or stages == 1:
            return 0.0
        whole = gpt.vocab * gpt.hidden / parts * itemsize(self.training.dtype)
        return achieved_seconds(machine, collective_terms(machine, Collective(
            "all_reduce", "s", 2, (stages - 1) * stride, int(whole))))
