"""Map which kind of grid is the fastest, over numbers of GPUs and rates of links between nodes.

Closed forms of the search estimate all plans at every rate: the map is a model of a model, meant
for where the kinds cross.  At the machine's own rate the fastest are predicted exactly beside.
"""

from dataclasses import dataclass, replace
from typing import Callable, Iterator, Sequence

import msgspec

from bench.errors import UsageError
from bench.prediction.training_plans.choices import Choice, KIND_TITLES, Training, kind_title
from bench.prediction.training_plans.layer_work import Layers
from bench.prediction.training_plans.search import SLACK, Search
from mm3d.grid.shape import GridShape

FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8)    # of the machine's rate, by default


LINE, BOX = "1 x t x 1", "X x Y x Z"    # each with or without a pipeline and replicas
MESH_KINDS: dict[str, Callable[[str, GridShape], bool]] = {
    LINE: lambda scheme, grid: KIND_TITLES[scheme] == "1-D",
    BOX: lambda scheme, grid: kind_title(scheme, grid) == "3-D"}    # several directions divided


@dataclass(frozen=True)
class Best:
    """The fastest plan of a kind, and its estimated seconds."""

    seconds: float
    choice: Choice


@dataclass(frozen=True)
class MapPlace:
    """The fastest plan of each of `MESH_KINDS` that fits, on so many GPUs.

    `rate` is in bytes a second between nodes, in one direction, of a node; `exact` has their
    exactly predicted seconds, at the machine's own rate, and is {} elsewhere.
    """

    gpus: int
    rate: float
    best: dict[str, Best]
    exact: dict[str, float]

    @property
    def gain(self) -> float | None:
        """Return by which share X x Y x Z does more steps than 1 x t x 1; None for want of either.
        """
        if len(self.best) < len(MESH_KINDS):
            return None
        return self.best[LINE].seconds / self.best[BOX].seconds - 1


def map_kinds(asked: Training, gpus: Sequence[int], rates: Sequence[float],
              progress: Callable[[str], None] = lambda line: None) -> Iterator[MapPlace]:
    """Estimate the places of a map, for each number of GPUs at each rate in bytes a second.

    `asked` is on any number of GPUs.

    Raises UsageError when no plan of any kind fits anywhere.
    """
    fits, problems, layers = False, [], Layers(asked)
    for number in gpus:
        here = replace(asked, gpus=number)
        best: dict[float, dict[str, Best]] = {rate: {} for rate in rates}
        for kind, keeps in MESH_KINDS.items():
            progress(f"{number} GPUs: {kind}")
            for rate, one in _best_at_rates(replace(here, keeps=keeps), rates, layers,
                                            problems).items():
                best[rate][kind] = one
        fits |= any(best.values())
        for rate in rates:
            progress(f"{number} GPUs: predicting {rate / 1e9:g} GB/s")
            yield MapPlace(number, rate, best[rate], _exact_seconds(here, best[rate])
                           if rate == asked.machine.network.bytes_per_second else {})
    if not fits:
        others = f"--map {','.join(map(str, gpus))}: no plan on any of these, the last: "
        # Of the first kind, which more numbers of GPUs have a mesh for.
        raise UsageError(others * (len(gpus) > 1) + problems[-len(MESH_KINDS)])


def _exact_seconds(here: Training, best: dict[str, Best]) -> dict[str, float]:
    """Predict plans by dry runs of a step; one that the library cannot run has none."""
    search = Search(here)
    plans = {kind: search.predicted(one.choice) for kind, one in best.items()}
    return {kind: plan.seconds for kind, plan in plans.items() if plan is not None}


def _best_at_rates(here: Training, rates: Sequence[float], layers: Layers,
                   problems: list[str]) -> dict[float, Best]:
    """Return the fastest plan that fits by closed forms, at each rate.

    If none does, return {}, and add to `problems` why.
    """
    found: dict[float, Best] = {}
    for rate in rates:
        network = msgspec.structs.replace(here.machine.network, bytes_per_second=rate)
        machine = msgspec.structs.replace(here.machine, network=network)
        search = Search(replace(here, machine=machine), layers=layers)
        search.limit /= SLACK    # here nothing is looked at again
        try:
            families = search.screen()
        except UsageError as error:    # no plan, or none that fits
            problems.append(str(error))
            return {}
        found[rate] = Best(*min(map(next, families.values()), key=lambda one: one[0]))
    return found
