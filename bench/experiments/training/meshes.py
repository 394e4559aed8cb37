"""List the meshes whose trainings are compared, and which of them must be equal to the bit."""

import math
from dataclasses import replace
from typing import Any, Callable

from mm3d.config import Division
from mm3d.model.experts.options import ExpertOptions
from mm3d.training.schedules import all_builders

SERIAL = Division(scheme="serial")
SCHEDULES = tuple(name for name in all_builders() if name != "auto")


def ranks_of_mesh(mesh: Division) -> int:
    """Return how many ranks a mesh has."""
    return mesh.data * mesh.stages * math.prod(mesh.grid or (1,))


def _family_of(mesh: Division) -> tuple[Any, ...]:
    """Return the settings that fix the order of all sums; meshes that share them agree in bits.

    Stages, schedules, ZeRO and recomputation change no sum: a stage sees its micro-batches in
    ascending order, whatever the schedule, and every stage of ZeRO sums over replicas in the
    order of ranks.  But ZeRO 2 and 3 sum over replicas before they sum over micro-batches.
    Replicas that divide experts sum the experts' gradients over other replicas.
    """
    return (mesh.scheme, mesh.grid, mesh.data, mesh.shards, mesh.microbatches,
            mesh.expert_parallel, mesh.zero > 1 and mesh.data > 1 and mesh.microbatches > 1)


def list_mesh_cases(ranks: int, experts: ExpertOptions | None = None) -> list[Division]:
    """List the cases that need at most `ranks` ranks, serial first.

    With experts there are also meshes that divide them, and a rank alone with two micro-batches,
    since only the tokens of one micro-batch are routed together.
    """
    three = replace(SERIAL, scheme="3d")
    found = [SERIAL]

    def add(start: Division, **changes: Any) -> None:
        found.append(replace(start, **changes))
    for scheme, grid in (("1d", (4,)), ("1d-sp", (4,)), ("2d", (2, 2)), ("2d-pipelined", (2, 2)),
                         ("2.5d", (2, 2, 2)), ("2.5d", (1, 1, 2)), ("faces", (2, 2, 2)),
                         ("faces", (1, 2, 2)), ("3d", (2, 2, 2)), ("3d", (1, 2, 4)),
                         ("3d", (3, 2, 1)), ("3d", (1, 3, 2)), ("3d", (2, 1, 1))):
        add(three, scheme=scheme, grid=grid)
    add(three, grid=(2, 1, 1), recompute="full")
    for zero in range(4):
        add(SERIAL, data=2, zero=zero)
    for zero in range(4):
        add(SERIAL, data=4, shards=2, zero=zero)
    for zero in range(4):
        add(three, data=2, grid=(2, 2, 1), zero=zero)
    add(SERIAL, microbatches=4)
    if experts is None:
        add(SERIAL, microbatches=3)
    for schedule in SCHEDULES:
        add(SERIAL, stages=2, microbatches=4, schedule=schedule)
    add(SERIAL, stages=4, microbatches=4)
    for zero in range(4):
        add(three, data=2, stages=2, grid=(1, 2, 1), microbatches=4, zero=zero)
    add(three, data=2, stages=2, grid=(1, 2, 1), microbatches=4, schedule="zb-h1", zero=2)
    add(three, data=2, stages=2, grid=(1, 2, 1), microbatches=4, recompute="selective", zero=3)
    add(three, data=2, stages=2, scheme="1d", grid=(2,), microbatches=4, zero=1)
    add(three, data=2, scheme="faces", grid=(1, 2, 2), zero=3)
    add(three, stages=2, scheme="2d-pipelined", grid=(2, 2), microbatches=4, schedule="zb-v")
    add(SERIAL, data=3, stages=2, microbatches=2, zero=2)
    if experts is None:
        # Of 24 sequences one replica has 2 in each micro-batch, and the other 1.
        add(SERIAL, data=2, stages=2, microbatches=8, zero=2)
    else:
        add(SERIAL, microbatches=2)
        found += [case for case in _cases_of_experts() if case.expert_parallel <= experts.count]
    return [case for case in found if ranks_of_mesh(case) <= ranks]


def _cases_of_experts() -> list[Division]:
    """List the cases in which replicas divide experts, evenly and unevenly."""
    three, found = replace(SERIAL, scheme="3d"), []

    def add(start: Division, parts: int, **changes: Any) -> None:
        found.append(replace(start, expert_parallel=parts, **changes))
    for zero in range(4):
        add(SERIAL, 2, data=2, zero=zero)
    add(SERIAL, 2, data=2, recompute="full")
    add(SERIAL, 2, data=4, zero=1)
    add(SERIAL, 4, data=4, shards=2, zero=3)
    add(three, 2, data=2, grid=(1, 2, 1))
    add(SERIAL, 2, data=2, stages=2, microbatches=4, zero=2)
    for scheme, grid in (("3d", (2, 2, 1)), ("3d", (1, 2, 2)), ("1d", (4,)), ("1d-sp", (4,)),
                         ("2d", (2, 2)), ("2.5d", (2, 2, 1)), ("faces", (1, 2, 2))):
        add(three, 2, data=2, scheme=scheme, grid=grid)
    add(three, 2, data=2, grid=(2, 2, 1), zero=3)
    add(three, 2, data=2, stages=2, grid=(1, 2, 1), microbatches=4, zero=3)
    add(three, 2, data=2, stages=2, grid=(1, 2, 1), microbatches=4, schedule="zb-h1", zero=3)
    add(SERIAL, 3, data=3, stages=2, microbatches=2, zero=2)
    add(SERIAL, 3, data=6, zero=1)
    return found


def reference_of(cases: list[Division]) -> Callable[[Division], Division]:
    """Return a function from a case to the first case of its family."""
    first = {_family_of(case): case for case in reversed(cases)}
    return lambda case: first[_family_of(case)]


def one_rank_of(cases: list[Division],
                experts: ExpertOptions | None) -> Callable[[Division], Division]:
    """Return a function from a case to the case on one rank that has the same losses.

    With experts it has as many micro-batches as the case, otherwise one.
    """
    serial = {case.microbatches: case for case in cases
              if case.given().keys() <= {"scheme", "microbatches"} and ranks_of_mesh(case) == 1}
    return lambda case: serial[case.microbatches if experts else 1]
