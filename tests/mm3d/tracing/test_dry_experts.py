"""A dry run with experts is the real run whose routers choose what it assumes, to the byte."""
import gc

import numpy as np
import pytest

import mm3d
from mm3d.arrays import backend
from mm3d.model.experts.assumed import ChoicePattern
from mm3d.model.experts.layer import ExpertsLayer
from mm3d.tracing import dry_run
from mm3d.tracing.events import Collective, Gemm, PHASES
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import Trace
from mm3d.training.dry_replicas import JoinedAxes, replicas_with_experts

SIZES = dict(layers=2, hidden=12, heads=2, batch=3, seq=5)
EVEN = dict(layers=2, hidden=16, heads=2, batch=4, seq=8)
EXPERTS = [mm3d.Experts(5, top=2, every=1, capacity=None),
           mm3d.Experts(7, top=3, every=2, gate="gshard", capacity=0.6, jitter=0.1),
           mm3d.Experts(6, top=1, every=2, gate="sigmoid-bias", capacity=0.7, z=0)]
MESHES = {    # replicas, scheme, grid, options
    1: [(1, "serial", (1,), {})],
    2: [(2, "serial", (1,), {}), (1, "3d", (1, 2, 1), {})],
    4: [(2, "1d", (2,), {}), (2, "3d", (2, 1, 1), {}), (4, "serial", (1,), {}),
        (1, "2d", (2, 2), {}), (2, "1d-sp", (2,), {})],
    8: [(2, "3d", (2, 2, 1), {"rows": "positions"}), (4, "3d", (1, 1, 2), {}),
        (2, "3d", (1, 2, 2), {"rows": "sequences"}), (1, "3d", (2, 2, 2), {})]}


def choose_in_turn(model, replica: int) -> None:
    """Replace the logits of all routers: token t prefers the experts k t, k t + 1, and so on."""
    batch, seq, _ = model.shape
    for layer in expert_layers(model.layers):
        place = layer.space.layout().slices(model.grid, model.shape)
        sequences, positions = (np.arange(one.start, one.stop) for one in place[:2])
        tokens = ((replica * batch + sequences)[:, None] * seq + positions).reshape(-1, 1)
        E, k = layer.experts.count, layer.experts.top

        def forward(x, own=layer.router.forward, logits=-((np.arange(E) - k * tokens) % E)):
            found, saved = own(x)
            found[...] = logits
            return found, saved
        layer.router.forward = forward


def expert_layers(chain) -> list[ExpertsLayer]:
    """All layers of experts of a model, recomputed ones too."""
    return [found for one in chain.layers for found in (
        [one] if isinstance(one, ExpertsLayer) else
        expert_layers(one) if hasattr(one, "layers") else [])]


def real_step(mesh, sizes, experts, parts, way, recompute):
    """What `trace_step` does, on real arrays: the trace that an observer makes of it."""
    pool, trace = mesh.scheme.grid.backend.pool, Trace()
    gc.collect()
    before = pool.in_use
    pool.reset_peak()
    data = mesh.shape["d"]
    whole = {**sizes, "batch": data * sizes["batch"]}
    pipeline = mm3d.Pipeline(mesh, "gpipe", **whole, microbatches=1, experts=experts,
                             expert_parallel=parts, expert_way=way, recompute=recompute)
    model, = pipeline.chunks
    choose_in_turn(model, mesh.replica)
    model.mask_key.place = 0, 0
    axes = JoinedAxes(pipeline.data_grids[-1]) if data > 1 else model.grid
    x, dy = model.random("input"), model.random("output gradient")
    trace.parameters = sum(p.nbytes for p in model.parameters)
    with observed(axes, trace, model):
        axes.reset_traffic()
        _, saved = model.forward(x)
        trace.saved, trace.traffic["forward"] = model.saved_bytes(saved), axes.traffic()
        axes.reset_traffic()
        model.backward(dy, saved)
        trace.traffic["backward"] = axes.traffic()
    trace.pool_peak = pool.peak - before
    pipeline.free()
    return trace, model


@pytest.mark.ranks(1, 2, 4, 8, first=(4, 8))
@pytest.mark.parametrize("number", range(5))
def test_dry_and_real_runs_are_equal(comm, number):
    if number >= len(MESHES[comm.size]):
        pytest.skip("fewer meshes")
    data, name, grid, options = MESHES[comm.size][number]
    for case, experts in enumerate(EXPERTS):
        sizes = EVEN if case == 2 else SIZES
        way = ("fewest", "exchange", "gather")[(number + case) % 3]
        recompute = "full" if case == 1 else "none"
        mesh = mm3d.Mesh(comm, scheme=name, grid=grid, backend="numpy", data=data, **options)
        parts = data // 2 if data > 2 and case else data
        real, model = real_step(mesh, sizes, experts, parts, way, recompute)
        replica, place = mesh.replica, mesh.place
        mesh.free()
        found = dry_run.trace_step(
            name, comm.size // data, grid, place, backend.Backend.block, options, **sizes,
            experts=experts, recompute=recompute, replicas=replicas_with_experts(
                experts, sizes["batch"], sizes["seq"], data, replica, parts, way=way))
        assert found.traffic == real.traffic, (experts, way)
        for kind in (Gemm, Collective):
            for phase in PHASES:
                assert found.count(kind, phase) == real.count(kind, phase), (experts, way)
        for field in ("parameters", "saved", "pool_peak"):
            assert getattr(found, field) == getattr(real, field), (field, experts, way)


@pytest.mark.parametrize("k, rank, most", [(2, 5, 4), (6, 30, 8)])
def test_words_and_rows_of_64_experts_by_hand(k, rank, most):
    """8 replicas of 2 x 2 x 1 with 8 experts each: T = 128 tokens of 48 features on each rank."""
    experts = mm3d.Experts(64, top=k, every=1, capacity=None)
    sizes = dict(layers=1, hidden=48, heads=2, batch=8, seq=64, experts=experts)
    found = [dry_run.trace_step("3d", 4, (2, 2, 1), rank % 4, **sizes,
                                replicas=replicas_with_experts(experts, 8, 64, 8, rank // 4, 8,
                                                               way="exchange", imbalance=one))
             for one in (1, most)]
    T, h = 128, 48
    even, uneven = (trace.traffic["forward"]["e", "all_to_all"] for trace in found)
    assert even.words == 2 * k * T * h * 7 // 8 and even.messages == 2 * 7
    assert found[0].traffic["backward"]["e", "all_to_all"] == even
    rows = [max(event.m for phase, part, event in trace.events
                if (phase, part) == ("forward", "experts") and isinstance(event, Gemm)
                and event.k == 4 * h // 2) for trace in found]
    assert rows[0] == k * T * 8 // 64    # of one expert from all replicas, and one rank along y
    assert rows[1] == most * rows[0]
    # The busiest rank sends what is left of its tokens' pairs, and returns those of the others.
    assert uneven.words == k * T * h * (8 - most + 7 * most) // 8


@pytest.mark.parametrize("layers, every, recompute", [(9, 2, "none"), (8, 1, "full")])
def test_layers_beyond_three_periods_follow(layers, every, recompute):
    experts = mm3d.Experts(8, top=2, every=every)
    sizes = dict(hidden=16, heads=2, batch=2, seq=8, recompute=recompute)
    replicas = replicas_with_experts(experts, 2, 8, 2, 1, 2)
    whole, extended = (trace("1d", 2, layers=layers, replicas=replicas, experts=experts, **sizes)
                       for trace in (dry_run.trace_step, dry_run.extrapolate_step))
    assert extended.events == whole.events and extended.traffic == whole.traffic
    for field in ("parameters", "divided", "saved", "pool_peak"):
        assert getattr(extended, field) == getattr(whole, field), field


def test_assumed_choices_are_even_and_each_token_s_are_different():
    busy = range(8, 12)
    for E, k, imbalance in ((64, 2, 1), (24, 8, 1), (5, 3, 1), (24, 3, 1.7), (24, 8, 3),
                            (13, 1, 2)):
        experts, tokens = mm3d.Experts(E, top=k), 8 * E * 3
        pattern = ChoicePattern(experts, busy, imbalance)
        chosen = pattern.chosen(0, tokens)
        assert chosen.shape == (tokens, k)
        assert all(len(set(row)) == k for row in chosen.tolist())
        counts = np.stack([np.bincount(column, minlength=E) for column in chosen.T])
        before = pattern.counts_before(np.array([0, 7, tokens]))
        assert not before[0].any() and (before[2] == counts).all()
        assert (before[1] == [np.bincount(column[:7], minlength=E) for column in chosen.T]).all()
        got, share = counts.sum(0), tokens * k / E
        if imbalance == 1:
            assert got.max() - got.min() <= 1
        else:
            others = np.delete(got, busy)
            assert got[busy] == pytest.approx(imbalance * share, rel=0.03)
            assert others.max() - others.min() <= 3


def test_what_cannot_be_assumed_is_refused():
    def replicas(**more):
        return replicas_with_experts(**{"experts": mm3d.Experts(8), "batch": 2, "seq": 8,
                                        "data": 4, "expert_parallel": 4} | more)
    with pytest.raises(ValueError, match="imbalance=2 is that of a rank with a part"):
        replicas(expert_parallel=1, imbalance=2.0)
    with pytest.raises(ValueError, match="expert_parallel=3 does not .* 1, 2, 4 would do"):
        replicas(expert_parallel=3)
    with pytest.raises(ValueError, match="2 of 8 experts, .* can get 1 to 4 times"):
        dry_run.trace_step("serial", 1, replicas=replicas(imbalance=4.5), **SIZES,
                           experts=mm3d.Experts(8))
