"""Estimate the seconds of a training step and the bytes of a rank, from the work of one layer."""

from functools import cache
from typing import NamedTuple

from bench.cases.variants import itemsize
from bench.prediction.layer_blocks import weight_parts
from bench.prediction.memory_fit import state_by_kind
from bench.prediction.pipelines.hop_seconds import place_moves, seconds_of_moves, stage_moves
from bench.prediction.pipelines.pipeline_model import mesh_strides
from bench.prediction.pipelines.training_step import (adamw_seconds, expert_parameters,
                                                      layer_parameters, shards_of_experts,
                                                      table_seconds, unadded_seconds)
from bench.prediction.seconds import achieved_seconds, collective_terms, gemm_seconds
from bench.prediction.training_plans.choices import Choice, Training
from bench.prediction.training_plans.expert_work import (Copies, copies_of_experts,
                                                         gathers_of_counts)
from bench.prediction.training_plans.layer_work import LayerBytes, LayerWork
from mm3d.grid.activations import chunks_of
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.schemes import find_scheme
from mm3d.schemes.closed_form import ProductShape
from mm3d.tracing.events import Collective, Gemm

# Of parameters; those of experts are beside the others of a layer.
ARRAYS_OF_EXPERTS, ARRAYS_OF_ENDS = 4, 4
SURE_OF_OTHERS = 0.85    # of bounds without fused kernels: up to 1.103 exact times in 120 plans
Held = tuple[tuple[float, float, float], ...]    # parameters, those of experts, and other bytes


class StageSizes(NamedTuple):
    """The layers of stages, and the parameters of a rank: those of a layer and of the ends."""

    parts: int    # of a weight
    layers: tuple[int, int, int]    # of the first stage, of the last, of all
    of_layer: float
    ends: tuple[float, float]
    of_experts: float = 0.0    # of a layer, beside the others

    @property
    def parameters(self) -> tuple[tuple[float, float], ...]:
        """Return a rank's parameters in the first stage and the last; of experts second."""
        return tuple((count * self.of_layer + extra, count * self.of_experts)
                     for count, extra in zip(self.layers, self.ends))

    @property
    def most(self) -> tuple[float, float]:
        """Return those of the stage with the most."""
        return max(self.parameters, key=sum)


class Estimator:
    """Estimate plans of one training."""

    def __init__(self, training: Training) -> None:
        self.training = training
        self.sure = 1.0 if training.machine.kernels == "fused" else SURE_OF_OTHERS
        self.arrays = cost.parameter_arrays(training.gpt.sizes())    # of a layer
        (self.sizes, self.moved, self.hop, self.tied, self.adamw, self.state, self.products,
         self.counts, self.head) = map(cache, (
             self._sizes, self._moved, self._hop, self._tied,
             lambda parameters: adamw_seconds(training.machine, parameters, training.dtype),
             self._state, self._products, self._counts, self._head))

    def memory(self, choice: Choice, filled: LayerBytes) -> float:
        """Estimate the bytes at the peak of a rank."""
        return max(self.needed(choice, self.held(choice, filled)))

    def needed(self, choice: Choice, held: Held) -> tuple[float, ...]:
        """Estimate the bytes at the peak of a rank of the stages of `held`.

        `held` is the result of `held` for this plan, or for one with another `zero` and `shards`.
        """
        state = [self.state(choice.zero, shards) for shards in self.shards_of(choice)]
        return tuple(state[0] * shared + state[1] * experts + more
                     for shared, experts, more in held)

    def shards_of(self, choice: Choice) -> tuple[float, float]:
        """Return the replicas among which ZeRO divides a copy of the model, and experts."""
        return choice.parts, shards_of_experts(self.training.gpt.experts, choice.expert_parallel,
                                               choice.parts)

    def held(self, choice: Choice, filled: LayerBytes) -> Held:
        """Return the parameters of a rank of the first and the last stage, and bytes beside them.

        Where W is apart there may be a third: the last stage with one layer more than others has
        more micro-batches that wait for W.  They do not depend on what replicas divide.
        """
        stages, chunks = choice.stages, choice.chunks
        micro = self.training.microbatches(choice)
        sizes = self.sizes(choice.scheme, choice.grid, stages, choice.expert_parallel)
        first, last, every = sizes.layers
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
        found = tuple((*of, kept + more) for of, kept, more in zip(sizes.parameters, held, spent))
        place = every - last * stages - 1    # the last stage with one layer more
        if choice.schedule == "zb-h1" and place > 0:
            kept = first * (filled.saved * min(stages - place, micro)
                            + filled.operands * min(place, micro - 1)) + grown * (first - 1)
            found += (first * sizes.of_layer, first * sizes.of_experts, kept + filled.working),
        return found

    def _state(self, zero: int, shards: int) -> float:
        """Return the bytes per parameter of a rank's state."""
        return sum(state_by_kind(self.training.dtype, 1.0, zero, shards).values())

    def least(self, choice: Choice, passes: float) -> float:
        """Bound `seconds` from below: products at their rate, passes, and the bubble."""
        micro, stages = self.training.microbatches(choice), choice.stages
        share = (stages - 1) / (micro * choice.chunks) * (choice.schedule != "zb-h1")
        layers = micro * self.training.gpt.layers / stages
        return self.sure * ((self.products(choice.recompute) + passes * layers) * (1 + share)
                            - self._unadded(choice))

    def _products(self, recompute: str) -> float:
        """Return the seconds of all products at their rate, divided among all GPUs."""
        training, machine = self.training, self.training.machine
        sizes = training.stack(training.batch, recompute).sizes
        experts = training.gpt.experts
        count = (sum(cost.flops(sizes, experts).values())
                 + cost.flops_again(sizes, recompute, experts))
        return count / (training.gpus * machine.gemm_rate[training.dtype] * machine.achieved.gemm)

    def seconds(self, choice: Choice, work: LayerWork) -> float:
        """Estimate the seconds of a step."""
        stages, strides = choice.stages, choice.strides
        sizes = self.sizes(choice.scheme, choice.grid, stages, choice.expert_parallel)
        between = self.hop(choice.scheme, choice.grid,
                           (choice.micro, -(-self.training.seq // choice.context)), choice.mesh,
                           choice.inside) if stages > 1 else (0.0, 0.0)
        total, busy = self._pipelined(choice, work, self._with_replicas(
            choice, work, sizes, strides), between)
        sums = self._last_sums(choice, sizes, strides)
        if self.training.overlap:
            sums = max(0.0, sums - busy)
        return total + sums + self._after(choice, sizes, strides)

    def bound(self, choice: Choice, work: LayerWork, unsure: int) -> float:
        """Bound the seconds of a step from below: hops, and messages of replicas, take none.

        `unsure` is the number of starts of kernels by which the work of a layer may be too long.
        """
        strides = choice.strides
        sizes = self.sizes(choice.scheme, choice.grid, choice.stages, choice.expert_parallel)
        layer = self._with_replicas(choice, work, sizes, strides, bound=True)
        sums = 0.0 if self.training.overlap else self._last_sums(choice, sizes, strides, 0)
        return self.sure * (self._shortest(choice, work, layer, unsure) + sums
                            + self._after(choice, sizes, strides))

    def _after(self, choice: Choice, sizes: StageSizes, strides: dict[str, int]) -> float:
        """Return the seconds of the optimizer, and of the sum of a tied table's gradient."""
        return (self.adamw(self._divided(choice, 1))
                + self.tied(choice.stages, strides["s"], sizes.parts))

    def alone(self, choice: Choice, work: LayerWork, again: float, unsure: int) -> float:
        """Bound the seconds of a step without replicas and optimizer from below.

        Backward takes `again` seconds more than that of `work`; `unsure` is as of `bound`.
        """
        layer = work.forward + work.backward + again
        return self.sure * self._shortest(choice, work, layer, unsure)

    def _shortest(self, choice: Choice, work: LayerWork, layer: float, unsure: int) -> float:
        """Bound the seconds of all stages from below.

        A stage begins after a forward of those before it, and they end after their backward; but
        where W is apart, only if it runs its own last.
        """
        micro, stages = self.training.microbatches(choice), choice.stages
        sizes = self.sizes(choice.scheme, choice.grid, stages, choice.expert_parallel)
        first, last, every = sizes.layers
        machine, unadded = self.training.machine, self._unadded(choice)
        less = unsure * machine.launch_seconds / machine.achieved.latency
        layer -= less
        if stages == 1:
            return micro * (every * layer + sum(work.ends)) - unadded
        head = self.head(choice.scheme, choice.grid, choice.micro, choice.context)
        place = every - last * stages - 1    # the last stage with one layer more
        passes = [(layer, layer)]    # of a stage, and of those before it
        if choice.schedule == "zb-h1":
            passes = [(layer, work.forward - less), (layer - work.weights, layer - work.weights)]
        return max(micro * (count * own + more) + before * others / choice.chunks
                   for own, others in passes for before, count, more in (
                       (every - last, last, head), (max(0, place) * first, first, 0.0))
                   ) - unadded

    def _head(self, scheme: str, grid: GridShape, micro: int, context: int) -> float:
        """Return the seconds of the products of the head for a micro-batch, backward too."""
        training, machine = self.training, self.training.machine
        rows = micro * sum(map(len, chunks_of(training.seq, context, 0)))
        shape = ProductShape("up", rows, training.gpt.hidden, training.gpt.vocab)
        return 3 / machine.achieved.gemm * sum(
            one.count * gemm_seconds(machine, Gemm(1, *one[:3], training.dtype))
            for one in find_scheme(scheme).local_products(grid, shape))

    def _divided(self, choice: Choice, zero: int) -> float:
        """Return the parameters of the stage with the most, divided from a stage of ZeRO on."""
        sizes = self.sizes(choice.scheme, choice.grid, choice.stages, choice.expert_parallel)
        shards = self.shards_of(choice) if choice.zero >= zero else (1, 1)
        return sum(count / share for count, share in zip(sizes.most, shards))

    def _unadded(self, choice: Choice) -> float:
        """Return the seconds in which the first micro-batch does not add to gradients."""
        return unadded_seconds(self.training.machine, self._divided(choice, 2),
                               self.training.dtype)

    def _pipelined(self, choice: Choice, work: LayerWork, layer: float,
                   hops: tuple[float, float]) -> tuple[float, float]:
        """Return the seconds of all stages, and those in which one computes a micro-batch."""
        micro, stages = self.training.microbatches(choice), choice.stages
        sizes = self.sizes(choice.scheme, choice.grid, stages, choice.expert_parallel)
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
        return total - self._unadded(choice), min(busy)

    def _with_replicas(self, choice: Choice, work: LayerWork, sizes: StageSizes,
                       strides: dict[str, int], bound: bool = False) -> float:
        """Return the seconds of a layer with what ZeRO 2 and 3 move, and counts of choices.

        With `bound` at least: no message takes any, and what is recomputed is not gathered again,
        as the last product is not.
        """
        over = [0.0, 0.0]
        if self.training.gpt.experts:
            over[0] += self.counts(choice.expert_parallel, self._copies(
                choice, strides, (0.0, 0.0))[-1][0])
        for copies, words, arrays in self._copies(choice, strides, (
                sizes.of_layer, sizes.of_experts)) if choice.zero > 1 else ():
            if copies.shards > 1:
                where = copies.shards, copies.near, words, arrays * (not bound)
                gathered = self.moved("all_gather", *where) * (choice.zero == 3)
                over[0] += gathered
                over[1] += (self.moved("reduce_scatter", *where)
                            + gathered * (1 + (choice.recompute == "full" and not bound)))
        both = (work.forward, over[0]), (work.backward, over[1])
        return sum(map(max if self.training.overlap else sum, both))

    def _copies(self, choice: Choice, strides: dict[str, int], words: tuple[float, float]
                ) -> list[tuple[Copies, float, float]]:
        """Return the ranks with copies of the parameters of a rank, and of its experts.

        Each is with its words among `words`, and the number of arrays of a layer.
        """
        parts, near, far = choice.parts, strides["d"], strides["r"]
        whole = Copies(parts, near, choice.replicas // parts, far)
        if not self.training.gpt.experts:
            return [(whole, words[0], self.arrays)]
        own = copies_of_experts(choice.data, parts, choice.expert_parallel, near, far)
        every = self.training.gpt.experts.every    # a router is in place of a perceptron
        return [(whole, words[0], self.arrays - (ARRAYS_OF_EXPERTS - 1) / every),
                (own, words[1], ARRAYS_OF_EXPERTS / every)]

    def _last_sums(self, choice: Choice, sizes: StageSizes, strides: dict[str, int],
                   messages: int = 1) -> float:
        """Return the seconds of sums over replicas, and of gathers, at the end of a step.

        Each array takes as many `messages`, in those of one.
        """
        found = 0.0
        for copies, words, arrays in self._copies(choice, strides, sizes.most):
            arrays = messages * (arrays * sizes.layers[0] + ARRAYS_OF_ENDS)
            for kind, moves in (("reduce_scatter", choice.zero < 2),
                                ("all_gather", choice.zero < 3)):
                if moves and copies.shards > 1:
                    found += self.moved(kind, copies.shards, copies.near, words, arrays)
            if copies.count > 1:
                found += self.moved("all_reduce", copies.count, copies.far,
                                    words / copies.shards, arrays)
        return found

    def _counts(self, parts: int, copies: Copies) -> float:
        """Return the seconds in which replicas learn what tokens have chosen, of a layer."""
        experts, machine = self.training.gpt.experts, self.training.machine
        return sum(achieved_seconds(machine, collective_terms(machine, one))
                   for one in gathers_of_counts(experts, parts, copies)) / experts.every

    def _sizes(self, scheme: str, grid: GridShape, stages: int, experts: int) -> StageSizes:
        """Return the sizes of stages."""
        gpt, parts = self.training.gpt, weight_parts(scheme, grid)
        share, more = divmod(gpt.layers, stages)
        table = gpt.vocab * gpt.hidden / parts
        learned = gpt.architecture.positions == "learned"
        ends = [table + learned * self.training.seq * gpt.hidden / parts, table]
        if stages == 1:
            ends = [ends[0] + table * (not gpt.tied)] * 2
        where = scheme, grid, self.training.stack(1, "none", 1).sizes, gpt.experts
        return StageSizes(parts, (share + (more > 0), share, gpt.layers), layer_parameters(*where),
                          tuple(ends), expert_parameters(*where, experts))

    def _moved(self, kind: str, ranks: int, stride: int, words: float, arrays: int) -> float:
        """Return the seconds of a collective of so many arrays over replicas."""
        size, machine = itemsize(self.training.dtype), self.training.machine
        terms = collective_terms(machine, Collective(kind, "d", ranks, stride, words * size))
        terms["latency"] *= arrays
        return achieved_seconds(machine, terms)

    def _hop(self, scheme: str, grid: GridShape, tokens: tuple[int, int], mesh: GridShape,
             inside: str) -> tuple[float, float]:
        """Return the mean seconds of a hop between stages, and those of the longest.

        The longest is on two nodes if any is, and the first on one node if any is.  `tokens` are
        the sequences of a micro-batch, and a replica's positions in each.
        """
        training, per_node = self.training, self.training.machine.ranks_per_node
        stride = mesh_strides(mesh, inside)["s"]
        crossing = min(mesh["s"] - 2, max(0, per_node // stride - 1))
        moves = stage_moves(scheme, grid, grid, (*tokens, training.gpt.hidden), {})
        first, longest = (seconds_of_moves(training.machine, *place_moves(
            moves, itemsize(training.dtype), mesh, inside, per_node, (source, source + 1)))[0]
            for source in (0, crossing))
        share = min(1.0, stride / per_node)    # of hops that leave a node
        return share * longest + (1 - share) * first, longest

    def _tied(self, stages: int, stride: int, parts: int) -> float:
        """Return the seconds to sum the gradient of a tied table over the first and last stage."""
        gpt = self.training.gpt
        if not gpt.tied or stages == 1:
            return 0.0
        return table_seconds(self.training.machine, gpt.vocab * gpt.hidden / parts,
                             self.training.dtype, (stages - 1) * stride)
