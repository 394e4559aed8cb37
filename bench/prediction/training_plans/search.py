"""Search the fastest plans of a training that fit the memory of its GPUs.

Closed forms estimate all plans (`bench.prediction.training_plans.layer_work`).  The best of each
family are estimated again by dry runs of one layer, and the best of these predicted exactly, by
dry runs of a step: only these are returned.
"""

import heapq
import time
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from typing import Callable, Iterable, Iterator

from bench.errors import UsageError
from bench.prediction.pipeline_model import PipelineModel
from bench.prediction.pipeline_seconds import fullest_stage
from bench.prediction.training_plans.choices import Choice, Training
from bench.prediction.training_plans.dimensions import (DIMENSIONS, FIRST, OF_STATE, OF_WORK,
                                                        changed, describe, list_choices)
from bench.prediction.training_plans.estimate import Estimator
from bench.prediction.training_plans.layer_work import (Layer, LayerWork, screened_bytes,
                                                        screened_work, trace_layer, traced_work)
from bench.prediction.training_step import (TrainingStep, memory_by_kind, model_flops,
                                            predict_step, shortened)

KEPT = 100          # plans of a family that closed forms leave
REFINED = 24        # that fit by dry runs of a layer, in all
OF_FAMILY = 4       # the same, of each family
EXACT = 6           # predicted exactly, in all
TRIES = 4           # of a family, or of a changed choice, until one fits
SLACK = 1.15        # of memory, by closed forms
TRACED_SLACK = {False: 1.03, True: 1.15}    # by dry runs of a layer, and with W apart
SURE = 0.95         # of memory, up to which that of a layer needs no dry run of a step
LEAST_AGAIN = 0.6   # of forward, that backward repeats with the recomputation of all of a layer

Scored = tuple[float, Choice]    # estimated seconds first


@dataclass(frozen=True)
class TrainingPlan:
    """A plan that is predicted exactly.

    Attributes
    ----------
    choice, model : Choice, PipelineModel
        The plan.
    step : TrainingStep
        Its predicted seconds.
    """

    choice: Choice
    model: PipelineModel
    step: TrainingStep

    @cached_property
    def memory(self) -> dict[str, float]:
        """Return the peak bytes of a rank by kind, by a dry run of a step, some seconds."""
        return memory_by_kind(self.model)

    @property
    def fullest(self) -> int:
        """Return the stage of the rank that `memory` is of."""
        return fullest_stage(shortened(self.model), optimizer=True)[0]

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step."""
        return self.step.seconds

    @cached_property
    def flops(self) -> dict[str, float]:
        """Return the result of `model_flops`."""
        return model_flops(self.model)


@dataclass(frozen=True)
class Found:
    """What a search has found.

    Attributes
    ----------
    best : TrainingPlan
        The fastest plan that fits.
    families : dict of str to TrainingPlan
        The fastest of each family that fits, the fastest first.
    unfit : list of TrainingPlan
        Plans that were predicted and do not fit.
    changes : dict of str to TrainingPlan or str
        For each of `DIMENSIONS`, the fastest plan that fits and differs from the best in this
        alone; or why there is none.
    refused : dict of str to str
        Why the library cannot run plans that were to be predicted, by their description.
    counts : dict of str to int
        Plans that are "candidates", "too large" by closed forms, "layers" and "exact".
    seconds : float
        Of the search.
    """

    best: TrainingPlan
    families: dict[str, TrainingPlan]
    unfit: list[TrainingPlan]
    changes: dict[str, TrainingPlan | str]
    refused: dict[str, str]
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


class Search:
    """Search the plans of a training.

    Parameters
    ----------
    training : Training
        What is trained.
    progress : callable, optional
        Is given a line on what is done.
    """

    def __init__(self, training: Training,
                 progress: Callable[[str], None] = lambda line: None) -> None:
        self.training, self.progress = training, progress
        self.limit = training.machine.memory_bytes
        self.estimator = Estimator(training)
        self.filled = cache(lambda layer: screened_bytes(training, layer))
        self.screened: Callable[[Layer], LayerWork] = cache(
            lambda layer: screened_work(training, layer))
        self.traces = cache(lambda layer: trace_layer(training, layer))
        self.traced: Callable[[Layer], LayerWork] = cache(
            lambda layer: traced_work(training, layer, self.traces(layer._replace(strides=()))))
        self.predicted = cache(self._predict)
        self.counts = dict.fromkeys(("candidates", "too large", "layers", "exact"), 0)
        self.least = float("inf")    # bytes of the smallest candidate
        self.unfit: list[TrainingPlan] = []
        self.refused: dict[str, str] = {}

    def run(self) -> Found:
        """Return the best plans.

        Raises
        ------
        UsageError
            When there is no plan, or none fits.
        """
        start = time.perf_counter()
        refined = self._refine(self.screen())
        every = _ordered(one for plans in refined.values() for one in plans)[:EXACT]
        best: dict[str, TrainingPlan] = {}
        exact = [plan for _, choice in every if (plan := self.predicted(choice)) is not None]
        families = [(self.predicted(choice) for _, choice in plans[:TRIES])
                    for plans in refined.values()]
        for plans in (sorted(exact, key=lambda one: one.seconds), *families):
            plan = self._first_fitting(plans)
            if plan is not None:
                best.setdefault(plan.choice.family, plan)
        if not best:
            raise UsageError(self._too_large() if self.unfit else self._none_runs())
        ordered = dict(sorted(best.items(), key=lambda one: one[1].seconds))
        fastest = next(iter(ordered.values()))
        changes = {name: self._cheapest(name, fastest.choice) for name in DIMENSIONS}
        self.counts["exact"] = self.predicted.cache_info().currsize
        return Found(fastest, ordered, self.unfit, changes, self.refused, self.counts,
                     time.perf_counter() - start)

    def _first_fitting(self, plans: Iterable[TrainingPlan | None]) -> TrainingPlan | None:
        """Return the first plan that fits, by a dry run of a step."""
        for plan in plans:
            if plan is None:
                continue
            self.progress(f"running a step dry: {describe(plan.choice)}")
            if plan.memory["all"] <= self.limit:
                return plan
            if plan not in self.unfit:
                self.unfit.append(plan)
        return None

    def _none_runs(self) -> str:
        which, why = next(iter(self.refused.items()))
        return (f"--gpus {self.training.gpus} --model {self.training.gpt.name}: the library can "
                f"run none of {len(self.refused)} plans that were predicted; the first, {which}: "
                f"{why}")

    def _too_large(self) -> str:
        training = self.training
        return (f"--gpus {training.gpus} --model {training.gpt.name}: no plan fits "
                f"{self.limit / 2 ** 30:.3g} GiB a GPU; by estimate the smallest needs "
                f"{self.least / 2 ** 30:.3g} GiB: more GPUs would do, or a smaller model")

    def choices(self) -> Iterator[Choice]:
        """List all plans."""
        return list_choices(self.training)

    def works(self) -> Iterator[Choice]:
        """List all ways to divide the work of a micro-batch, without what replicas divide."""
        return list_choices(self.training, OF_WORK)

    def screen(self) -> dict[str, list[Scored]]:
        """Return the best plans of each family by closed forms.

        Raises
        ------
        UsageError
            When there are none.
        """
        bounded: dict[str, list[Scored]] = {}
        states = cache(lambda data: [*list_choices(
            self.training, OF_STATE, FIRST._replace(data=data))])
        for work in self.works():
            filled, passes = self.filled(Layer.of(work, whole=True))
            held, bound = self.estimator.held(work, filled), self.estimator.least(work, passes)
            for one in states(work.data):
                self.counts["candidates"] += 1
                state = self.estimator.state(one.zero, one.parts)
                needed = max(state * parameters + more for parameters, more in held)
                if needed <= SLACK * self.limit:
                    choice = work._replace(zero=one.zero, shards=one.shards)
                    bounded.setdefault(choice.family, []).append((bound, choice))
                else:
                    self.least = min(self.least, needed)
                    self.counts["too large"] += 1
        if not self.counts["candidates"]:
            raise UsageError(self._no_mesh())
        if not bounded:
            raise UsageError(self._too_large())
        return {family: self._fastest(_ordered(plans)) for family, plans in bounded.items()}

    def _fastest(self, plans: list[Scored]) -> list[Scored]:
        """Return the fastest of some plans, which are ordered by a bound from below."""
        heap: list = []    # the slowest first
        for number, (bound, choice) in enumerate(plans):
            worst = -heap[0][0] if len(heap) == KEPT else float("inf")
            if bound > worst:
                break
            if not number % 1000:
                self.progress(f"{choice.family}: {number} of {len(plans)} plans estimated")
            if worst < float("inf") and choice.recompute != "none":
                base = self.screened(Layer.of(choice)._replace(recompute="none"))
                again = LEAST_AGAIN * base.forward * (choice.recompute == "full")
                base = replace(base, backward=base.backward + again)
                if self.estimator.seconds(choice, base) > worst:
                    continue
            seconds, choice = self._placed(choice, self.screened)
            (heapq.heappush if len(heap) < KEPT else heapq.heappushpop)(
                heap, (-seconds, -number, choice))
        return _ordered((-seconds, choice) for seconds, _, choice in heap)

    def _placed(self, choice: Choice, priced: Callable[[Layer], LayerWork]) -> Scored:
        """Return the fastest place of a plan on the nodes."""
        found = [choice._replace(inside=one) for one in self.training.insides(choice)]
        return min((self.estimator.seconds(one, priced(Layer.of(one))), number, one)
                   for number, one in enumerate(found))[::2]

    def _no_mesh(self) -> str:
        training, gpt = self.training, self.training.gpt
        return (f"--gpus {training.gpus} --batch {training.batch} --model {gpt.name}: no mesh of "
                f"so many GPUs has replicas that divide the batch, at most {gpt.layers} stages, "
                f"and grids that divide {gpt.heads} heads and {gpt.hidden} features: a number "
                f"such as {_near(training.gpus)} would do")

    def _refine(self, families: dict[str, list[Scored]]) -> dict[str, list[Scored]]:
        """Return the best plans that fit, by dry runs of a layer, of all and of each family."""
        found: dict[str, list[Scored]] = {family: [] for family in families}
        total = 0
        for _, choice in _ordered(one for plans in families.values() for one in plans):
            if total >= REFINED and len(found[choice.family]) >= OF_FAMILY:
                continue
            scored = self._scored(choice)
            if scored is not None:
                found[choice.family].append(scored)
                total += 1
        return {family: _ordered(plans) for family, plans in found.items()}

    def _scored(self, choice: Choice, places: bool = True) -> Scored | None:
        """Estimate a plan by dry runs of a layer; None if it is too large.

        With `places` it is the plan in its best place on the nodes.
        """
        layer = Layer.of(choice)._replace(strides=())
        filled = self.traced(layer).filled
        self.counts["layers"] = self.traces.cache_info().currsize
        self.progress(f"{self.counts['layers']} layers run dry")
        if self.estimator.memory(choice, filled) > TRACED_SLACK[layer.halves] * self.limit:
            return None
        if places:
            return self._placed(choice, self.traced)
        return self.estimator.seconds(choice, self.traced(Layer.of(choice))), choice

    def _predict(self, choice: Choice) -> TrainingPlan | None:
        """Predict a plan exactly; None for one that the library cannot run."""
        self.progress(f"predicting {describe(choice)}")
        training = self.training
        try:
            model = training.model(choice)
            return TrainingPlan(choice, model, predict_step(
                model, training.machine, overlap=training.overlap, inside=choice.inside))
        except ValueError as error:
            self.refused[describe(choice)] = str(error)
            return None

    def _cheapest(self, name: str, best: Choice) -> TrainingPlan | str:
        """Return the fastest plan that fits and differs in one choice, or why there is none."""
        screened, others = [], [*changed(self.training, name, best)]
        for choice in others:
            filled, _ = self.filled(Layer.of(choice, whole=True))
            if self.estimator.memory(choice, filled) <= SLACK * self.limit:
                screened.append((self.estimator.seconds(
                    choice, self.screened(Layer.of(choice))), choice))
        refined = [one for _, choice in _ordered(screened)[:OF_FAMILY]
                   if (one := self._scored(choice, False)) is not None]
        for _, choice in _ordered(refined)[:TRIES]:
            plan = self.predicted(choice)
            if plan is not None and self._fits(plan):
                return plan
        return "none fits" if others else "no other"

    def _fits(self, plan: TrainingPlan) -> bool:
        """Return whether a plan fits, by a dry run of a step where that of a layer is unsure."""
        needed = self.estimator.memory(plan.choice, self.traced(Layer.of(plan.choice)).filled)
        return needed < SURE * self.limit or plan.memory["all"] <= self.limit


def _ordered(plans: Iterable[Scored]) -> list[Scored]:
    """Return plans by ascending seconds."""
    return sorted(plans, key=lambda one: one[0])


def _near(gpus: int) -> int:
    """Return the greatest power of two below a number, as numbers of GPUs often are."""
    return 1 << (gpus - 1).bit_length() - 1 if gpus > 1 else 1
