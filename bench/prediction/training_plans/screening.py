"""Estimate all plans of a training, and keep the fastest of each family that may fit."""

import heapq
import itertools
from copy import copy
from dataclasses import replace
from functools import cache
from operator import itemgetter
from typing import Any, Callable, Iterable, Iterator, Self

import numpy as np

from bench.errors import UsageError, as_usage_error
from bench.prediction.closed_form_plan import collective_price
from bench.prediction.layer_blocks import LayerKind
from bench.prediction.training_plans.choices import MOST_ACTIONS, Choice, Training
from bench.prediction.training_plans.dimensions import (FIRST, OF_STATE, OF_WORK, describe_choice,
                                                        list_choices)
from bench.prediction.training_plans.estimate import Estimator, Held
from bench.prediction.training_plans.layer_work import (Layers, LayerWork, PlannedLayer,
                                                        layer_bytes, layer_words, screened_work,
                                                        traced_work)
from mm3d.grid.shape import GridShape

SLACK = 1.15        # of memory, by closed forms
TRACED_SLACK = 1.02    # by dry runs of a layer
LEAST_AGAIN = 0.6   # of forward, that backward repeats with the recomputation of all of a layer
# Starts of kernels in a layer, of which those of attention are counted for each, and not once in
# a stage; and by how many closed forms may be too long.
UNSURE_TRACED, UNSURE_SCREENED = 3, 20

INFINITE = float("inf")
by_first = itemgetter(0)

Scored = tuple[float, Choice]    # estimated seconds first
States = tuple[Choice, ...]    # what replicas divide
Bounded = tuple[float, Choice, States]    # a bound of them from below, the work, and what fits


class Screening:
    """Estimate all plans of a training, by closed forms and then by dry runs of one layer.

    The layers may be those of a training that differs in GPUs, batch and links alone.  Raises
    UsageError when experts are not as wide as the perceptron, or one is shared; or the library has
    no such dtype here.
    """

    def __init__(self, training: Training, progress: Callable[[str], None] = lambda line: None,
                 layers: Layers | None = None) -> None:
        experts = training.gpt.experts
        if experts and (experts.design.width or experts.design.shared):
            raise UsageError(f"experts with {experts.design.given()}: trainings are planned with "
                             f"experts as wide as the perceptron, and none shared; bench dry "
                             f"counts others")
        with as_usage_error():
            layer_words("none", training.dtype, LayerKind.of(training.gpt.sizes(), experts))
        self.training, own = training, Layers(training)
        self.layers = layers or own
        if self.layers.training != own.training:
            raise ValueError("layers of another model, seq, dtype or machine")
        self.limit = training.machine.memory_bytes
        self.estimator, price = Estimator(training), collective_price(training.machine)
        self.screened: Callable[[PlannedLayer], LayerWork] = cache(lambda layer: screened_work(
            layer, self.layers.counted(layer.anywhere._replace(halves=False)), price))
        self.traced: Callable[[PlannedLayer], LayerWork] = cache(
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
        """Return the plans of each family that may fit, by closed forms the fastest first.

        Raises UsageError when there are none.
        """
        def estimated(choice: Choice) -> list[Scored]:
            return [(self.estimator.seconds(choice, self.screened(PlannedLayer.of(choice))),
                     choice)]
        return {family: refined(plans, estimated) for family, plans in self.bounded().items()}

    def bounded(self) -> dict[str, Iterator[Scored]]:
        """Return the plans of each family that may fit by closed forms, in every place.

        They come with bounds of their seconds from below, which ascend.

        Raises UsageError when there are none.
        """
        bounded: dict[str, list[Bounded]] = {}
        limit, counts = SLACK * self.limit, self.counts
        for work in self.works():
            filled, passes = self.layers.filled(PlannedLayer.of(work, whole=True))
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
        return {family: refined(refined(((bound, (work, states)) for bound, work, states
                                         in ordered(plans)), self._alone), self._in_places)
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
            held = self.estimator.held(work,
                                       self.layers.filled(PlannedLayer.of(work, whole=True))[0])
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

    def _alone(self, plans: tuple[Choice, States]) -> list[tuple[float, tuple[Choice, States]]]:
        """Bound the seconds of layers alone from below, in their best place."""
        choice, _ = plans
        self.progress(f"{choice.family}: {describe_choice(choice)}")
        full = choice.recompute == "full"
        return [(min(self.estimator.alone(choice, work, LEAST_AGAIN * work.forward * full,
                                          UNSURE_SCREENED) for work in self.placed(
            choice._replace(recompute="none", schedule="1f1b"))), plans)]

    def _in_every_place(self, choice: Choice) -> list[LayerWork]:
        """Price the layers of a division of work in each place on the nodes."""
        states = [choice._replace(shards=one) for one in self.training.shards(
            choice._replace(zero=1))]
        return [*map(self.screened, {PlannedLayer.of(one._replace(inside=inside)) for one in states
                                     for inside in self.training.insides(one)})]

    def _in_places(self, plans: tuple[Choice, States]) -> Iterator[Scored]:
        """Bound the seconds of plans in each place on the nodes from below, by closed forms."""
        work, states = plans
        for one in states:
            choice = work._replace(zero=one.zero, shards=one.shards)
            for inside in self.training.insides(choice):
                placed = choice._replace(inside=inside) if inside else choice
                yield self.estimator.bound(placed, self.screened(PlannedLayer.of(placed)),
                                           UNSURE_SCREENED), placed

    def traced_bound(self, choice: Choice) -> list[Scored]:
        """Bound the seconds of a plan from below by dry runs of a layer; nothing if too large."""
        if not self.may_fit(choice):
            return []
        return [(self.estimator.bound(choice, self.traced(PlannedLayer.of(choice)), UNSURE_TRACED),
                 choice)]

    def may_fit(self, choice: Choice) -> bool:
        """Return whether a plan fits by dry runs of a layer, or almost."""
        layer = PlannedLayer.of(choice).anywhere
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


def refined(bounded: Iterable[tuple[float, Any]],
            refine: Callable[[Any], Iterable[tuple[float, Any]]],
            doubt: float = 0) -> Iterator[tuple[float, Any]]:
    """Yield what `refine` makes of items, the lowest numbers first.

    Items come with bounds of these numbers from below, which ascend; `refine` returns any number
    of others with their numbers.  None is refined before its bound is the lowest number; with a
    `doubt` of .01 an item is refined only if its bound is more than 1 % below the lowest number.
    """
    heap: list[tuple[float, int, Any]] = []
    made = itertools.count()
    for bound, item in bounded:
        while heap and heap[0][0] * (1 - doubt) <= bound:
            number, _, found = heapq.heappop(heap)
            yield number, found
        for number, found in refine(item):
            heapq.heappush(heap, (number, next(made), found))
    while heap:
        number, _, found = heapq.heappop(heap)
        yield number, found


def ordered(plans: Iterable) -> list:
    """Return plans by ascending seconds."""
    return sorted(plans, key=by_first)
