"""Estimate all plans of a training, and keep the fastest of each family that may fit."""

import heapq
import itertools
from copy import copy
from dataclasses import replace
from functools import cache
from operator import itemgetter, le
from typing import Callable, Iterable, Iterator, Self

import numpy as np

from bench.errors import UsageError, as_usage_error
from bench.prediction.closed_form_plan import collective_price
from bench.prediction.layer_blocks import LayerKind
from bench.prediction.training_plans.choices import MOST_ACTIONS, Choice, Training
from bench.prediction.training_plans.dimensions import FIRST, OF_STATE, OF_WORK, list_choices
from bench.prediction.training_plans.estimate import Estimator, Held
from bench.prediction.training_plans.layer_work import (Layer, Layers, LayerWork, layer_bytes,
                                                        screened_work, traced_work, words_of)
from mm3d.grid.shape import GridShape

KEPT = 100          # plans of a family that are looked at, by closed forms the fastest
REFINED = 24        # that fit by dry runs of a layer, in all
OF_FAMILY = 4       # the same, of each family
CERTAIN = 1.1       # of an estimate by closed forms: up to this a plan is as good as those after
SLACK = 1.15        # of memory, by closed forms
TRACED_SLACK = 1.02    # by dry runs of a layer
LEAST_AGAIN = 0.6   # of forward, that backward repeats with the recomputation of all of a layer
# What is known of a plan: a bound of all its work, of its layers, of all but hops; the estimate.
LISTED, ALONE, PLACED, ESTIMATED = range(4)

INFINITE = float("inf")
by_first = itemgetter(0)

Scored = tuple[float, Choice]    # estimated seconds first
States = tuple[Choice, ...]    # what replicas divide
Bounded = tuple[float, Choice, States]    # a bound of them from below, the work, and what fits


class Screening:
    """Estimate all plans of a training, by closed forms and then by dry runs of one layer.

    Parameters
    ----------
    layers : Layers, optional
        Those of a training that differs in GPUs, batch and links alone.

    Raises
    ------
    UsageError
        When experts are not as wide as the perceptron, or one is shared; or the library has no
        such dtype here.
    """

    def __init__(self, training: Training, progress: Callable[[str], None] = lambda line: None,
                 layers: Layers | None = None) -> None:
        experts = training.gpt.experts
        if experts and (experts.design.width or experts.design.shared):
            raise UsageError(f"experts with {experts.design.given()}: trainings are planned with "
                             f"experts as wide as the perceptron, and none shared; bench dry "
                             f"counts others")
        with as_usage_error():
            words_of("none", training.dtype, LayerKind.of(training.gpt.sizes(), experts))
        self.training, own = training, Layers(training)
        self.layers = layers or own
        if self.layers.training != own.training:
            raise ValueError("layers of another model, seq, dtype or machine")
        self.limit = training.machine.memory_bytes
        self.estimator, price = Estimator(training), collective_price(training.machine)
        self.screened: Callable[[Layer], LayerWork] = cache(lambda layer: screened_work(
            layer, self.layers.counted(layer.anywhere._replace(halves=False)), price))
        self.traced: Callable[[Layer], LayerWork] = cache(
            lambda layer: traced_work(training, layer, self.layers.traces(layer.anywhere)))
        self.listed, self.rates, self.placed = map(cache, (
            lambda data: tuple(self.states(data)), self._rates, self._in_every_place))
        self._begin(progress)

    def _begin(self, progress: Callable[[str], None]) -> None:
        """Forget what was counted."""
        self.progress = progress
        self.counts = dict.fromkeys(("candidates", "too large", "layers", "exact"), 0)
        self.least = INFINITE    # bytes of the smallest plan that does not fit

    def within(self, progress: Callable[[str], None],
               keeps: Callable[[str, GridShape], bool] = Training.keeps, stages: int = 0) -> Self:
        """Return a search among some plans, by `Training.keeps` and `stages`.

        No estimate depends on these: it shares all of them.
        """
        found = copy(self)
        found.training = replace(self.training, keeps=keeps, stages=stages)
        found._begin(progress)
        return found

    def choices(self) -> Iterator[Choice]:
        """List all plans."""
        for work in self.works():
            for one in self.states(work.replicas):
                choice = work._replace(zero=one.zero, shards=one.shards)
                yield from (choice._replace(inside=place)
                            for place in self.training.insides(choice))

    def works(self) -> Iterator[Choice]:
        """List all ways to divide the work of a micro-batch, without what replicas divide."""
        return list_choices(self.training, OF_WORK)

    def states(self, data: int) -> Iterator[Choice]:
        """List what so many replicas divide."""
        return list_choices(self.training, OF_STATE, FIRST._replace(data=data))

    def screen(self) -> dict[str, Iterator[Scored]]:
        """Return the `KEPT` best plans of each family by closed forms, the fastest first.

        Raises UsageError when there are none.
        """
        bounded: dict[str, list[Bounded]] = {}
        limit, counts = SLACK * self.limit, self.counts
        for work in self.works():
            filled, passes = self.layers.filled(Layer.of(work, whole=True))
            held = self.estimator.held(work, filled)
            every = len(self.listed(work.replicas))
            states, least = self._split(work, held, limit)
            counts["candidates"] += every
            counts["too large"] += every - len(states)
            self.least = min(self.least, least)
            if states:
                bound = self.estimator.least(work, passes)
                for family, some in self._families(work, states).items():
                    bounded.setdefault(family, []).append((bound, work, some))
        if not self.counts["candidates"]:
            raise UsageError(self._no_mesh())
        if not bounded:
            raise UsageError(self.too_large())
        return {family: itertools.islice(self._fastest(ordered(plans)), KEPT)
                for family, plans in bounded.items()}

    def _split(self, work: Choice, held: Held, limit: float) -> tuple[States, float]:
        """Return of what replicas may divide that with which a plan may fit.

        Beside it are the least bytes of the others, infinite if there are none.
        """
        states = self.listed(work.replicas)
        shared, routed, ends = self.rates(work.replicas, work.expert_parallel)
        lowest, highest = (max(few * parameters + many * experts + more
                               for parameters, experts, more in held) for few, many in ends)
        if highest <= limit:
            return states, INFINITE
        if lowest > limit and lowest >= self.least:    # no smaller than one that was found
            return (), INFINITE
        needed = np.max([shared * parameters + routed * experts + more
                         for parameters, experts, more in held], axis=0)
        fits = needed <= limit
        return (tuple(itertools.compress(states, fits)),
                float(np.min(needed, where=~fits, initial=INFINITE)))

    def smallest(self) -> list[Choice]:
        """Return the plan of each family that needs the least by closed forms, ascending."""
        least: dict[str, tuple[float, Choice]] = {}
        for work in self.works():
            held = self.estimator.held(work, self.layers.filled(Layer.of(work, whole=True))[0])
            shared, routed, _ = self.rates(work.replicas, work.expert_parallel)
            needed = np.max([shared * parameters + routed * experts + more
                             for parameters, experts, more in held], axis=0)
            states = self.listed(work.replicas)
            # Of replicas alone the family depends on the state, of all others on the work.
            for at in range(len(states)) if work.family == "data" else [int(np.argmin(needed))]:
                choice = work._replace(zero=states[at].zero, shards=states[at].shards)
                found = float(needed[at]), choice
                least[choice.family] = min(least.get(choice.family, found), found, key=by_first)
        return [choice for _, choice in sorted(least.values(), key=by_first)]

    def _rates(self, data: int, experts: int
               ) -> tuple[np.ndarray, np.ndarray, list[tuple[float, float]]]:
        """Return the bytes per parameter of what so many replicas divide, and per one of experts.

        After them are the least and the most of both.
        """
        rates = np.array([[self.estimator.state(one.zero, shards)
                           for shards in self.estimator.shards_of(one)] for one in (
            state._replace(expert_parallel=experts) for state in self.listed(data))])
        ends = [(float(few), float(many)) for few, many in (rates.min(axis=0), rates.max(axis=0))]
        return *rates.T, ends

    def _families(self, work: Choice, states: States) -> dict[str, States]:
        """Return by family what replicas may divide."""
        if work.places * work.stages * work.context > 1:    # else the stage of ZeRO decides
            return {work.family: states}
        found: dict[str, list[Choice]] = {}
        for one in states:
            found.setdefault(work._replace(zero=one.zero).family, []).append(one)
        return {family: tuple(some) for family, some in found.items()}

    def _fastest(self, plans: list[Bounded]) -> Iterator[Scored]:
        """Yield the fastest of some plans, for each division of work and stage of ZeRO one.

        The plan with the lowest bound is bounded anew: by its layers alone, then in every place
        by all but hops, which take the longest to price; at last it is estimated.  It is yielded
        once no bound is lower, so none is estimated that is never asked for.
        """
        heap: list = [(bound, LISTED, number, 0, work, states)
                      for number, (bound, work, states) in enumerate(plans)]    # ascending
        yielded: set[tuple[int, int]] = set()
        while heap:
            bound, known, number, place, choice, rest = heapq.heappop(heap)
            if known == LISTED:
                self.progress(f"{choice.family}: {number} of {len(plans)} ways to divide the work "
                              f"estimated")
                heapq.heappush(heap, (self._alone(choice), ALONE, number, 0, choice, rest))
            elif known == ALONE:
                every = (self._in_places(choice._replace(zero=one.zero, shards=one.shards),
                                         self.screened) for one in rest)
                for place, (bound, one, work) in enumerate(itertools.chain.from_iterable(every)):
                    heapq.heappush(heap, (bound, PLACED, number, place, one, work))
            elif (number, choice.zero) in yielded:
                continue
            elif known == PLACED:
                heapq.heappush(heap, (self.estimator.seconds(choice, rest), ESTIMATED, number,
                                      place, choice, None))
            else:
                yielded.add((number, choice.zero))
                yield bound, choice

    def _alone(self, choice: Choice) -> float:
        """Return a bound of the seconds from below: layers alone, in their best place."""
        full = choice.recompute == "full"
        return min(self.estimator.alone(choice, work, LEAST_AGAIN * work.forward * full)
                   for work in self.placed(choice._replace(recompute="none", schedule="1f1b")))

    def _in_every_place(self, choice: Choice) -> list[LayerWork]:
        """Price the layers of a division of work in each place on the nodes, or in the best alone.
        """
        states = [choice._replace(shards=one) for one in self.training.shards(
            choice._replace(zero=1))]
        found = [*map(self.screened, {Layer.of(one._replace(inside=inside)) for one in states
                                      for inside in self.training.insides(one)})]
        parts = [(one.forward, one.backward, *one.ends) for one in found]
        least = min(parts, key=sum)
        best = all(all(map(le, least, one)) for one in parts)    # in each part
        return [found[parts.index(least)]] if best else found

    def _in_places(self, choice: Choice, priced: Callable[[Layer], LayerWork]
                   ) -> Iterator[tuple[float, Choice, LayerWork]]:
        """Yield a plan in each place on the nodes, with a bound of its seconds, and its work."""
        for inside in self.training.insides(choice):
            one = choice._replace(inside=inside) if inside else choice
            work = priced(Layer.of(one))
            yield self.estimator.seconds(one, work, hops=False), one, work

    def _placed(self, choice: Choice) -> Scored:
        """Return the fastest place of a plan on the nodes by dry runs of a layer."""
        return min(((self.estimator.seconds(one, work), one)
                    for _, one, work in self._in_places(choice, self.traced)), key=by_first)

    def refine(self, families: dict[str, Iterable[Scored]]) -> dict[str, list[Scored]]:
        """Return the best plans that fit, by dry runs of a layer, of all and of each family."""
        found: dict[str, list[Scored]] = {family: [] for family in families}
        total = 0

        def enough(family: str, seconds: float) -> bool:
            return total >= REFINED and OF_FAMILY <= sum(
                one <= CERTAIN * seconds for one, _ in found[family])

        def wanted(family: str) -> Iterator[Scored]:
            for seconds, choice in families[family]:
                yield seconds, choice
                if enough(family, seconds):
                    return
        for seconds, choice in heapq.merge(*map(wanted, families), key=by_first):
            if not enough(choice.family, seconds):
                scored = self.scored(choice)
                found[choice.family] += scored
                total += bool(scored)
        return {family: ordered(plans) for family, plans in found.items()}

    def scored(self, choice: Choice) -> list[Scored]:
        """Estimate a plan that is not too large by dry runs of a layer.

        It has the shards, and the place on the nodes, that are the best for it; beside it is the
        plan with all shards in the order of the mesh.
        """
        every = [choice._replace(shards=one) for one in self.training.shards(choice)]
        fitting = [one for one in every if self.may_fit(one)]
        plain = [one._replace(inside="") for one in fitting if one.shards is None]
        found = [*[(self.estimator.seconds(one, self.traced(Layer.of(one))), one)
                   for one in plain],
                 *ordered(map(self._placed, fitting))[:1]]
        return [*dict.fromkeys(ordered(found))]

    def may_fit(self, choice: Choice) -> bool:
        """Return whether a plan fits by dry runs of a layer, or almost."""
        layer = Layer.of(choice).anywhere
        most = TRACED_SLACK * self.limit
        needed = self.estimator.memory(choice, layer_bytes(self.training, layer,
                                                           self.layers.alone(layer)))
        if needed <= most:
            needed = self.estimator.memory(choice, self.traced(layer).filled)
        if needed > most:
            self.least = min(self.least, needed)
        self.counts["layers"] = self.layers.alone.cache_info().currsize
        self.progress(f"{self.counts['layers']} layers run dry")
        return needed <= most

    def too_large(self) -> str:
        training = self.training
        limit, least = (one / 2 ** 30 for one in (training.machine.memory_bytes, self.least))
        few = (f"; more than {MOST_ACTIONS} micro-batches in all stages are not searched, so a "
               f"smaller batch may do too" if training.batch > MOST_ACTIONS else "")
        return (f"--gpus {training.gpus} --model {training.gpt.name}: no plan fits {limit:.3g} "
                f"GiB a GPU; by estimate the smallest needs {least:.3g} GiB: more GPUs would do, "
                f"or a smaller model{few}")

    def _no_mesh(self) -> str:
        training, gpt = self.training, self.training.gpt
        near = (2 ** power for power in reversed(range((training.gpus - 1).bit_length())))
        would = next((f": a number such as {gpus} would do" for gpus in near    # as GPUs often are
                      if any(list_choices(replace(training, gpus=gpus), OF_WORK))), "")
        return (f"--gpus {training.gpus} --batch {training.batch} --model {gpt.name}: no mesh of "
                f"so many GPUs has replicas that divide the batch, at most {gpt.layers} stages, "
                f"and grids that divide {gpt.heads} heads and {gpt.hidden} features{would}")


def ordered(plans: Iterable) -> list:
    """Return plans by ascending seconds."""
    return sorted(plans, key=by_first)
