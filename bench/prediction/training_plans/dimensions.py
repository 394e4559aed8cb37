"""State what plans of a training choose, in order, and list all plans and those of one change.

A dimension has some fields of a `Choice`, and lists their values for the fields before it.  A new
choice is a line here, a field of `Choice`, and its price in `estimate`.
"""

import re
from dataclasses import dataclass
from typing import Any, Callable, Iterable, Iterator

from bench.prediction.training_plans.choices import (Choice, FEW_GPUS, KIND_TITLES, MOST_ACTIONS,
                                                     MOST_CHUNKS, MOST_CONTEXT, MOST_NODES,
                                                     PLANNED_POLICIES, PLANNED_SCHEDULES,
                                                     PLANNED_SCHEMES, Training, kind_title)
from mm3d import schemes
from mm3d.grid.shape import GridShape
from mm3d.model import recomputation
from mm3d.training import schedules

ZERO = range(4)
FIRST = Choice(1, 0, 1, "1f1b", 1, "1d", GridShape("x", (1,)), "none")


@dataclass(frozen=True)
class Dimension:
    """What a plan chooses: some fields of a `Choice`, and a text that says what was chosen.

    `listed` returns their values, of several fields as tuples, for those of dimensions before.
    """

    fields: tuple[str, ...]
    listed: Callable[[Training, Choice], Iterable[Any]]
    said: Callable[[Choice], str]

    def values(self, training: Training, choice: Choice) -> Iterator[dict[str, Any]]:
        """List the values by field."""
        for value in self.listed(training, choice):
            yield dict(zip(self.fields, value if len(self.fields) > 1 else (value,)))


DIMENSIONS = {
    "grid": Dimension(("scheme", "grid"), lambda training, one: training.shapes,
                      lambda one: _grid_of(one)),
    "context": Dimension(("context", "way"), Training.contexts,
                         lambda one: f"{one.context}" + f" {one.way}" * (one.context > 1)),
    "stages": Dimension(("data", "stages"),
                        lambda training, one: training.meshes(one.places * one.context),
                        lambda one: f"{one.stages}, data {one.data}"),
    "experts": Dimension(("expert_parallel",), Training.expert_parallels,
                         lambda one: f"on {one.expert_parallel}"),
    "micro-batch": Dimension(("micro",), Training.micros, lambda one: str(one.micro)),
    "schedule": Dimension(("schedule",), Training.schedules, lambda one: one.schedule),
    "recompute": Dimension(("recompute",), lambda training, one: PLANNED_POLICIES,
                           lambda one: one.recompute),
    "ZeRO": Dimension(("zero",), lambda training, one: ZERO if one.replicas > 1 else ZERO[:1],
                      lambda one: str(one.zero)),
    "shards": Dimension(("shards",), Training.shards, lambda one: str(one.shards or "all")),
    "inside nodes": Dimension(("inside",), Training.insides, lambda one: inside_nodes(one))}
# of a micro-batch
OF_WORK = ("grid", "context", "stages", "experts", "micro-batch", "schedule", "recompute")
OF_STATE = ("ZeRO", "shards")    # what replicas divide


def searched(training: Training) -> list[str]:
    """List the dimensions in which plans of a training differ."""
    known = {"experts": training.gpt.experts is not None, "context": training.long}
    return [name for name in DIMENSIONS if known.get(name, True)]


def list_choices(training: Training, names: Iterable[str] = tuple(DIMENSIONS),
                 start: Choice = FIRST) -> Iterator[Choice]:
    """List the plans with all values of some dimensions; the others are those of `start`."""
    first, *rest = names
    for value in DIMENSIONS[first].values(training, start):
        one = start._replace(**value)
        if rest:
            yield from list_choices(training, rest, one)
        else:
            yield one


def changed(training: Training, name: str, best: Choice) -> Iterator[Choice]:
    """List the plans that differ from `best` in one dimension.

    Other stages and contexts are in place of replicas, other grids have as many ranks.  What has
    but one value beside the other choice, such as ZeRO without replicas, has that.
    """
    for one in list_choices(training, [name], best):
        data, more = divmod(training.gpus, one.places * one.stages * one.context)
        if not more and one.places == best.places:
            found = _completed(training, one._replace(data=data))
            if found not in (None, best):
                yield found


def _completed(training: Training, choice: Choice) -> Choice | None:
    """Return a plan whose every choice is among the values; None where several others are."""
    for one in DIMENSIONS.values():
        known = [*one.values(training, choice)]
        if {name: getattr(choice, name) for name in one.fields} in known:
            continue
        if len(known) != 1:
            return None
        choice = choice._replace(**known[0])
    return choice


def _grid_of(choice: Choice) -> str:
    """Name a grid, and its kind where that of the scheme is another."""
    kind = kind_title(choice.scheme, choice.grid)
    return f"{choice.scheme} {choice.grid.compact}" + f" ({kind})" * (
        kind != KIND_TITLES[choice.scheme])


def inside_nodes(choice: Choice) -> str:
    """Name the direction of more than one rank that varies fastest over the nodes."""
    several = [name for name, size in choice.mesh.items() if size > 1]
    return choice.inside or ["-", *several][-1]


def describe_choice(choice: Choice) -> str:
    """Describe a plan in a line."""
    shards = f" in {choice.shards} shards" if choice.shards else ""
    inside = f", {choice.inside} inside nodes" if choice.inside else ""
    experts = f", experts on {choice.expert_parallel}" if choice.expert_parallel > 1 else ""
    context = f" context {choice.context} {choice.way}" if choice.context > 1 else ""
    return (f"data {choice.data}{context} ZeRO {choice.zero}{shards}{experts}, "
            f"{choice.stages} stages {choice.schedule}, micro-batch {choice.micro}, "
            f"{choice.scheme} {choice.grid.compact}, recompute {choice.recompute}{inside}")


def pruned(training: Training) -> str:
    """Say which plans a search does not consider."""
    others = {"schedules": (schedules.all_builders(), PLANNED_SCHEDULES), "recompute": (
        [re.sub(r"\d+", "N", name) for name in recomputation.POLICIES], PLANNED_POLICIES),
        "schemes": (schemes.registry(), {*PLANNED_SCHEMES, "serial"})}
    found = [f"{name} {', '.join(dict.fromkeys(one for one in known if one not in of_plans))}"
             for name, (known, of_plans) in others.items()]
    found += [f"more than {MOST_CHUNKS} chunks of a rank", "stages with grids of their own",
              "1 x P x 1 of 3d, which divides as 1d-sp does",
              "replicas or interleaved stages with unequal numbers of sequences or layers",
              "ranks without a sequence, position or head",
              "orders of the mesh over nodes with more than one direction in another place"]
    if training.gpt.experts:
        found.append("stages that part the layers between two with experts")
    if training.long:
        found.append(f"contexts of more than {MOST_CONTEXT} ranks, or beside stages of more ranks "
                     f"than a node has")
    if training.gpus > FEW_GPUS:
        found.append(f"above {FEW_GPUS} GPUs, stages of more ranks than {MOST_NODES} nodes have, "
                     f"{training.most_places}, and more shards than one has, unless all replicas")
    if training.batch > MOST_ACTIONS:
        found.append(f"more than {MOST_ACTIONS} micro-batches in all stages")
    return "; ".join(found)
