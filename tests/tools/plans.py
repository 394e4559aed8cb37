"""Plans of small trainings, and what holds of every search among them and of every layer."""
from typing import Callable

import pytest
from msgspec import structs

from bench.prediction.closed_form_plan import collective_price
from bench.prediction.machine_model import load_machine
from bench.prediction.model_file import ModelFile
from bench.prediction.training_plans import search
from bench.prediction.training_plans.choices import Choice, Training
from bench.prediction.training_plans.layer_work import (LayerWork, PlannedLayer, screen_layer,
                                                        screened_work, trace_layer, traced_work)
from bench.prediction.training_plans.screening import UNSURE_SCREENED, UNSURE_TRACED


def training(gpt: ModelFile, gpus: int, batch: int, mib: float) -> Training:
    """A training in 16 bits on nodes of 4 GPUs with little memory."""
    machine = structs.replace(load_machine("dgx-a100"), ranks_per_node=4,
                              memory_bytes=mib * 2 ** 20)
    return Training(gpt, gpus, batch, gpt.seq, "float16", machine)


class Few(search.Search):
    """A search among the plans that `likes` and `states_liked` take, so few that each can be
    predicted exactly; without changed choices, which may be others."""

    def __init__(self, asked: Training, likes: Callable[[Choice], bool],
                 likes_state: Callable = lambda one: True) -> None:
        super().__init__(asked)
        self.likes, self.likes_state = likes, likes_state

    def works(self):
        return filter(self.likes, super().works())

    def states(self, data):
        return filter(self.likes_state, super().states(data))

    def changes(self, best):
        return {}


def check_best(asked: search.Search) -> tuple[list, list]:
    """Check that a search finds the best plan of each family that fits, and bounds none above
    its seconds; return all plans, predicted exactly, and those that fit."""
    found = asked.run()
    every = [plan for choice in asked.choices() if (plan := asked.predicted(choice))]
    fitting = [plan for plan in every if plan.memory["all"] <= asked.limit]
    assert len(fitting) < len(every) and not asked.refused    # the memory decides
    best = {}
    for plan in fitting:
        best[plan.choice.family] = min(plan.seconds, best.get(plan.choice.family, plan.seconds))
        for work, unsure in ((asked.screened, UNSURE_SCREENED), (asked.traced, UNSURE_TRACED)):
            bound = asked.estimator.bound(plan.choice, work(PlannedLayer.of(plan.choice)), unsure)
            assert bound <= plan.seconds, (plan.choice, unsure)
    assert {family: plan.seconds for family, plan in found.families.items()} == best
    assert [*found.families] == sorted(best, key=best.__getitem__)
    assert found.best.seconds == min(best.values())
    assert not any(isinstance(one, search.TrainingPlan) and one.seconds < found.best.seconds
                   for one in found.changes.values())
    return every, fitting


def works_of(asked: Training, layer: PlannedLayer, error: float,
             traces: tuple = ()) -> tuple[LayerWork, LayerWork]:
    """The work of a layer by closed forms and by its dry run, whose seconds are this near."""
    near = screened_work(layer, screen_layer(asked, layer.anywhere),
                         collective_price(asked.machine))
    exact = traced_work(asked, layer, traces or trace_layer(asked, layer.anywhere))
    for name in ("forward", "backward"):
        assert getattr(near, name) == pytest.approx(getattr(exact, name), rel=error), layer
    return near, exact
