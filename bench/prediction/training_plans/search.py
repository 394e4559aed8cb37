"""Search the fastest plans of a training that fit the memory of its GPUs.

Closed forms (`bench.prediction.training_plans.layer_work`) bound the seconds of all plans from
below, and dry runs of one layer bound more closely those that could be the fastest of a family.
What could be so still is predicted exactly, by dry runs of a step: only these are returned.
"""

import time
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Callable, Iterable

from bench.errors import UsageError
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.pipelines.pipeline_seconds import fullest_stage
from bench.prediction.pipelines.training_step import (TrainingStep, flops_of_step, memory_by_kind,
                                                      predict_step)
from bench.prediction.training_plans.choices import FEW_GPUS, Choice, Training
from bench.prediction.training_plans.dimensions import changed, describe_choice, searched
from bench.prediction.training_plans.layer_work import Layers, PlannedLayer
from bench.prediction.training_plans.screening import SLACK, Scored, Screening, ordered, refined

DOUBT = 0.01        # of the seconds of a family's best, on more than `FEW_GPUS`
TRIES = 4           # of a changed choice, until one fits
NEAR = 0.95         # of the memory of one end of a pipeline, by which the other needs no dry run
SURE = 0.95         # of memory, up to which that of a layer needs no dry run of a step


@dataclass(frozen=True)
class TrainingPlan:
    """A plan that is predicted exactly; `ends` are those of stages that may be the fullest."""

    choice: Choice
    model: PipelineModel
    step: TrainingStep
    ends: str = "both"

    @cached_property
    def fullest(self) -> tuple[int, int, int]:
        """Return what `fullest_stage` does, by a dry run of a step that takes some seconds.
        """
        return fullest_stage(self.model, optimizer=True, ends=self.ends)

    @property
    def memory(self) -> dict[str, float]:
        """Return the peak bytes of a rank by kind."""
        return memory_by_kind(self.model, *self.fullest)

    @property
    def seconds(self) -> float:
        """Return the predicted seconds of a step."""
        return self.step.seconds

    @cached_property
    def flops(self) -> dict[str, float]:
        """Return the result of `flops_of_step`."""
        return flops_of_step(self.model)


@dataclass(frozen=True)
class Found:
    """What a search has found: the fastest plan that fits, also of each family, fastest first.

    The best of a family may be slower than its fastest, by a `doubt` of its seconds.  `changes`
    are for each of the dimensions the fastest plan that fits and differs from the best in this
    alone, none faster than the best; or why there is none.  `unfit` are plans that were predicted
    and do not fit, `refused` why the library cannot run plans, by their description, and `counts`
    those that are "candidates", "too large" by closed forms, "layers" and "exact".
    """

    best: TrainingPlan
    families: dict[str, TrainingPlan]
    unfit: list[TrainingPlan]
    changes: dict[str, TrainingPlan | str]
    refused: dict[str, str]
    counts: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    doubt: float = 0.0


class Search(Screening):
    """Search the plans of a training; parameters as of `Screening`, attributes as of `Found`."""

    def __init__(self, training: Training, progress: Callable[[str], None] = lambda line: None,
                 layers: Layers | None = None) -> None:
        super().__init__(training, progress, layers)
        self.doubt = DOUBT * (training.gpus > FEW_GPUS)
        self.exact = cache(self._exact)

    def _begin(self, progress: Callable[[str], None]) -> None:
        super()._begin(progress)
        self.unfit: list[TrainingPlan] = []
        self.refused: dict[str, str] = {}

    def run(self, compares: bool = True) -> Found:
        """Return the best plans; the changes of the best only where it `compares`.

        Raises UsageError when there is no plan, or none fits.
        """
        start = time.perf_counter()
        best = {family: plan for family, plans in self.bounded().items()
                if (plan := self._fastest(plans)) is not None}
        if not best:
            raise UsageError(self.too_large() if self.unfit or not self.refused
                             else self._none_runs())
        fastest = min(best.values(), key=lambda one: one.seconds)
        changes = self.changes(fastest) if compares else {}
        while faster := [one for one in changes.values() if isinstance(one, TrainingPlan)
                         and one.seconds < fastest.seconds]:    # by less than the doubt
            fastest = min(faster, key=lambda one: one.seconds)
            best[fastest.choice.family] = fastest
            changes = self.changes(fastest)
        families = dict(sorted(best.items(), key=lambda one: one[1].seconds))
        self.counts["exact"] = self.exact.cache_info().currsize
        return Found(fastest, families, self.unfit, changes, self.refused, self.counts,
                     time.perf_counter() - start, self.doubt)

    def nearest(self, most: int) -> list[TrainingPlan]:
        """Return plans that do not fit, those that lack the least first.

        They are those that were predicted, and of each family the smallest by closed forms.
        """
        smallest = [plan for choice in self.smallest()[:most]
                    if (plan := self.predicted(choice)) is not None]
        found = {plan.choice: plan for plan in (*self.unfit, *smallest)
                 if plan.memory["all"] > self.limit}
        return sorted(found.values(), key=lambda one: one.memory["all"])[:most]

    def changes(self, best: TrainingPlan) -> dict[str, TrainingPlan | str]:
        """Return the result of `_cheapest` for each dimension."""
        return {name: self._cheapest(name, best.choice) for name in searched(self.training)}

    def _fastest(self, plans: Iterable[Scored]) -> TrainingPlan | None:
        """Return the fastest of the plans that fit by a dry run of a step, given by bounds."""
        def exact(choice: Choice) -> list[tuple[float, TrainingPlan]]:
            plan = self.predicted(choice)
            return [] if plan is None else [(plan.seconds, plan)]
        for _, plan in refined(refined(plans, self.traced_bound), exact, self.doubt):
            self.progress(f"running a step dry: {describe_choice(plan.choice)}")
            if plan.memory["all"] <= self.limit:
                return plan
            self.least = min(self.least, plan.memory["all"])
            if plan not in self.unfit:    # of an earlier run
                self.unfit.append(plan)
        return None

    def _none_runs(self) -> str:
        which, why = next(iter(self.refused.items()))
        return (f"--gpus {self.training.gpus} --model {self.training.gpt.name}: the library can "
                f"run none of {len(self.refused)} plans that were predicted; the first, {which}: "
                f"{why}")

    def predicted(self, choice: Choice) -> TrainingPlan | None:
        """Predict a plan exactly; None for one that the library refuses, which is noted."""
        self.progress(f"predicting {describe_choice(choice)}")
        plan = self.exact(choice)
        if isinstance(plan, TrainingPlan):
            return plan
        self.refused[describe_choice(choice)] = plan
        return None

    def _exact(self, choice: Choice) -> TrainingPlan | str:
        training = self.training
        try:
            model = training.model(choice)
            step = predict_step(model, training.machine, overlap=training.overlap,
                                inside=choice.inside)
            filled = self.traced(PlannedLayer.of(choice).anywhere).filled
            first, last, *between = self.estimator.needed(choice, self.estimator.held(
                choice, filled))
            first = max(first, *between, 0.0)
            ends = ("first" if last <= NEAR * first else "last" if first <= NEAR * last
                    else "both")
            return TrainingPlan(choice, model, step, ends)
        except ValueError as error:
            return str(error)

    def _cheapest(self, name: str, best: Choice) -> TrainingPlan | str:
        """Return the fastest plan that fits and differs in one choice, or why there is none."""
        screened, others = [], [*changed(self.training, name, best)]
        for choice in others:
            filled, _ = self.layers.filled(PlannedLayer.of(choice, whole=True))
            if self.estimator.memory(choice, filled) <= SLACK * self.limit:
                screened.append((self.estimator.seconds(
                    choice, self.screened(PlannedLayer.of(choice))), choice))
        refined = [(self.estimator.seconds(choice, self.traced(PlannedLayer.of(choice))), choice)
                   for _, choice in ordered(screened)[:TRIES] if self.may_fit(choice)]
        for _, choice in ordered(refined)[:TRIES]:
            plan = self.predicted(choice)
            if plan is not None and self._fits(plan):
                return plan
        return "none fits" if others else "no other"

    def _fits(self, plan: TrainingPlan) -> bool:
        """Return whether a plan fits, by a dry run of a step where that of a layer is unsure."""
        needed = self.estimator.memory(plan.choice,
                                       self.traced(PlannedLayer.of(plan.choice)).filled)
        return needed < SURE * self.limit or plan.memory["all"] <= self.limit
