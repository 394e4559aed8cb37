"""Work of ranks that share cores."""
from collections import Counter

import msgspec
import pytest

from bench.prediction import machine_model
from bench.prediction.planner import rank_plans
from bench.prediction.shared_cores import trace_on_cores
from bench.prediction.work import SIZE_NAMES, Work, predict_seconds
from mm3d.grid.shape import GridShape
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run
from mm3d.tracing.events import Collective

SIZES = {"layers": 1, "hidden": 32, "heads": 8, "batch": 24, "seq": 8}    # evenly divided


def on_cores(scheme, sizes, cores):
    """The trace of ranks on these cores, and those of all ranks, each traced once at most."""
    grid, traced = GridShape(find_scheme(scheme).directions, sizes), []

    def trace_rank(rank):
        traced.append(rank)
        return dry_run.trace_step(scheme, grid.ranks, grid, rank, **SIZES)
    found = trace_on_cores(trace_rank, scheme, grid, cores)
    assert len(set(traced)) == len(traced)
    return found, [dry_run.trace_step(scheme, grid.ranks, grid, rank, **SIZES)
                   for rank in range(grid.ranks)]


def split(events):
    """Collectives, and all other events."""
    apart = Counter(), Counter()
    for key, times in events.items():
        apart[not isinstance(key[-1], Collective)][key] = times
    return apart


@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 2), (3, 1, 2), (1, 8, 1)])
def test_work_is_the_mean_of_all_ranks(sizes):
    """On one core: exactly, for every operation; collectives are those of rank 0."""
    found, every = on_cores("faces", sizes, 1)
    collectives, work = split(found.events)
    assert collectives == split(every[0].events)[0]
    total = sum((split(one.events)[1] for one in every), Counter())
    assert work.keys() == total.keys()
    for key, times in total.items():
        assert work[key] == pytest.approx(times / len(every), rel=1e-12)
    assert found.peak == every[0].peak


def test_a_rank_has_at_most_a_core_of_its_own():
    """Of 8 ranks on 4 cores one computes outer activations, in half of the time of all at once."""
    found, every = on_cores("faces", (1, 8, 1), 4)
    work, first, other = (split(one.events)[1] for one in (found, every[0], every[1]))
    alone = {key for key in first if not any(key in one.events for one in every[1:])}
    assert alone and all(work[key] == first[key] / 2 for key in alone)
    assert all(work[key] >= other[key] * 7 / 8 for key in other)
    assert found.flops() == every[0].flops()


@pytest.mark.parametrize("scheme, sizes, cores", [
    ("3d", (2, 2, 2), 2), ("2d", (2, 2), 1), ("faces", (2, 2, 2), 0)])
def test_rank_0_stands_for_all(scheme, sizes, cores):
    found, every = on_cores(scheme, sizes, cores)
    assert found.events == every[0].events


def test_predictions_and_plans_know_shared_cores():
    """Of faces, where ranks idle; a plan has the seconds of the prediction."""
    alone = msgspec.structs.replace(machine_model.load_machine("cpu"), ranks_per_node=8)
    shared = msgspec.structs.replace(alone, cores=2)
    took = {}
    for machine in (alone, shared):
        for plan in (plan for scheme in ("3d", "faces")
                     for plan in rank_plans(8, machine, Stack(**SIZES), scheme=scheme)):
            work = Work("layer", plan.scheme, plan.grid,
                        tuple(SIZES[n] for n in SIZE_NAMES["layer"]))
            assert plan.seconds == sum(predict_seconds(machine, work, "float32").values())
            took[machine.cores, plan.scheme, plan.grid.compact] = plan.seconds
    assert took[2, "3d", "2x2x2"] == took[0, "3d", "2x2x2"]
    assert took[2, "faces", "2x2x2"] < took[0, "faces", "2x2x2"]
    # Which cores other numbers of ranks share was not measured.
    others = [[plan.seconds for plan in rank_plans(4, machine, Stack(**SIZES), scheme="faces")]
              for machine in (alone, shared)]
    assert others[0] == others[1]
    assert shared.cores_shared_by(8) == 2 and shared.cores_shared_by(4) == 0
