"""A dry run with experts assumes their choice, and counts what follows from it exactly."""
import numpy as np
import pytest

import mm3d
from mm3d.model.experts.token_order import ChoicePattern
from mm3d.tracing import dry_run
from mm3d.tracing.events import Gemm


def traced(rank, ranks, data, grid, scheme="3d", layers=1, **options):
    """One micro-batch on a rank of replicas that divide the experts."""
    def build(comm, backend):
        mesh = mm3d.Mesh(comm, scheme=scheme, grid=grid, data=data, backend=backend)
        return mm3d.Pipeline(mesh, "gpipe", 1, layers=layers, **options)
    return dry_run.trace(build, ranks, rank, step=dry_run.step_of_chunks)


@pytest.mark.parametrize("k, rank", [(2, 5), (6, 30)])
def test_words_and_rows_of_64_experts_by_hand(k, rank):
    """8 replicas of 2 x 2 x 1 with 8 experts each: T = 128 tokens of 48 features on each rank."""
    trace = traced(rank, 32, 8, (2, 2, 1), hidden=48, heads=2, batch=64, seq=64,
                   experts=mm3d.Experts(64, top=k, every=1, capacity=None), expert_parallel=8)
    T, h = 128, 48
    moved = trace.traffic["forward"]["e", "all_to_all"]
    assert moved.words == 2 * k * T * h * 7 // 8 and moved.messages == 2 * 7
    assert trace.traffic["backward"]["e", "all_to_all"] == moved
    rows = max(event.m for phase, part, event in trace.events
               if (phase, part) == ("forward", "experts") and isinstance(event, Gemm)
               and event.k == 4 * h // 2)
    assert rows == k * T * 8 // 64    # of one expert from all replicas, and one rank along y


@pytest.mark.parametrize("layers, every, recompute", [(9, 2, "none"), (8, 1, "full")])
def test_layers_beyond_three_periods_follow(layers, every, recompute):
    experts = mm3d.Experts(8, top=2, every=every)

    def of(count):
        return traced(2, 4, 2, (2,), "1d", count, hidden=16, heads=2, batch=4, seq=8,
                      recompute=recompute, experts=experts, expert_parallel=2)
    whole = of(layers)
    extended = dry_run.extrapolate(of, layers, dry_run.period_of(recompute, experts))
    assert extended.events == whole.events and extended.traffic == whole.traffic
    for field in ("parameters", "divided", "saved", "pool_peak"):
        assert getattr(extended, field) == getattr(whole, field), field


def test_assumed_choices_are_even_and_each_token_s_are_different():
    for E, k in ((64, 2), (24, 8), (5, 3), (13, 1)):
        tokens, pattern = 8 * E * 3, ChoicePattern(mm3d.Experts(E, top=k))
        chosen = pattern.chosen(0, tokens)
        assert chosen.shape == (tokens, k)
        assert all(len(set(row)) == k for row in chosen.tolist())
        counts = np.stack([np.bincount(column, minlength=E) for column in chosen.T])
        before = pattern.counts_before(np.array([0, 7, tokens]))
        assert not before[0].any() and (before[2] == counts).all()
        assert (before[1] == [np.bincount(column[:7], minlength=E) for column in chosen.T]).all()
        got = counts.sum(0)
        assert got.max() - got.min() <= 1
