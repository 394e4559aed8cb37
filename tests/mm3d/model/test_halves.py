"""Backward in two halves, input and weights: the same bits as the whole, in any order."""
from collections import Counter
from functools import partial
from itertools import cycle

import numpy as np
import pytest

import mm3d
from mirror import mirrored
from mm3d.arrays import backend
from mm3d.model import cost
from mm3d.tracing import dry_run
from mm3d.tracing.events import Boundary
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import Trace
from models import PARALLELISMS, SIZES, SOME, Parallelism, different, passes, policies


def is_weight(p) -> bool:
    return p.name.endswith("weight") and len(p.shape) > 1


@pytest.mark.ranks(1, slow=(8,))
def test_halves_give_the_same_bits(comm, transport):
    """Of every scheme, each in one of the types in turn; with weights' halves right after the
    input's, and long after."""
    for parallelism, (sizes, options) in zip(PARALLELISMS[comm.size], cycle([
            ("uneven", {}), ("even", dict(dtype="float16", master="float32")),
            ("uneven", dict(dtype="float64", causal=True))])):
        sizes = {**SIZES[sizes], "layers": 2}
        with parallelism.on(comm, "numpy") as scheme:
            model = mm3d.Transformer(scheme, **sizes, **options)
            expected = passes(model, "Fa Fb Da Db")
            for order in ("Fa Ba Wa Fb Bb Wb", "Fa Fb Ba Bb Wa Wb"):
                assert different(passes(model, order), expected) == [], (str(parallelism), order)


def of_three(model, order: str) -> dict[str, np.ndarray]:
    """Results of three micro-batches whose weights' halves come last, in this order."""
    return passes(model, "Fa Fb Fc Ba Bb Bc " + " ".join(f"W{name}" for name in order))


@pytest.mark.ranks(1, slow=(4, 8))
def test_gradients_add_up_in_the_order_of_the_weights_halves(comm):
    """And those of vectors in that of the input's halves; each rank adds up its own."""
    for parallelism in SOME[comm.size]:
        with parallelism.on(comm, "numpy") as scheme:
            model = mm3d.Transformer(scheme, **SIZES["uneven"])
            unsplit = {order: passes(model, "Fa Fb Fc " + " ".join(f"D{name}" for name in order))
                       for order in ("abc", "cab")}
            seen = any("weight" in name for name in different(unsplit["abc"], unsplit["cab"]))
            assert comm.allreduce(seen)    # ranks on no face have no weights
            found = of_three(model, "cab")
            late = {p.name for p in model.parameters if is_weight(p)}
            for name, a in found.items():
                expected = unsplit["cab" if name in late else "abc"][name]
                assert np.array_equal(a, expected), (str(parallelism), name)
            mixed = passes(model, "Fa Fb Ba Fc Bb Wa Bc Wb Wc")
            assert different(mixed, unsplit["abc"]) == [], str(parallelism)


def every_dry_rank(parallelism, sizes, **rest) -> list[Trace]:
    """Dry runs of all ranks of a parallelism, backward in halves."""
    ranks = int(np.prod(parallelism.grid))
    return [dry_run.trace(
        lambda comm, library: mm3d.Transformer(mm3d.scheme(
            parallelism.name, comm, parallelism.grid, library, **parallelism.options),
            **sizes, **rest),
        ranks, rank, backend.Backend.block, partial(dry_run.step_of_chunks, halves=True))
        for rank in range(ranks)]


CLOSED = [Parallelism("3d", (2, 1, 3)), Parallelism("1d-sp", (4,)), Parallelism("2d", (2, 2)),
          Parallelism("1d", (4,)), Parallelism("serial", (2,)), Parallelism("3d", (2, 2, 2)),
          Parallelism("3d", (3, 2, 1), {"keep": "weight", "vectors": "copied"}),
          Parallelism("3d", (2, 2, 2), {"rows": "positions", "keep": "both"}),
          Parallelism("2.5d", (2, 2, 2)), Parallelism("2.5d", (1, 1, 3)),
          Parallelism("faces", (2, 1, 3)), Parallelism("2d-pipelined", (2, 2))]


@pytest.mark.parametrize("parallelism, recompute", [
    pytest.param(one, name, id=f"{one} {name}",
                 marks=[pytest.mark.slow] * (number > 4 or place != number))
    for number, one in enumerate(CLOSED)
    for place, name in enumerate(policies(one, "uniform:2+selective", "none", "selective",
                                          "full", "uniform:2"))])
def test_words_and_operations_of_both_halves_are_the_closed_forms(parallelism, recompute):
    """Of all ranks together, on grids that nothing fits evenly: together those of backward in one
    piece."""
    sizes = {**SIZES["uneven"], "layers": 3 if "uniform" in recompute else 1}
    name, options = parallelism.name, parallelism.options
    grid = dict(zip(mm3d.SCHEMES[name].directions, parallelism.grid))
    whole = cost.moves(name, grid, mm3d.ModelSizes(**sizes), recompute, **options)["backward"]
    traces, words = every_dry_rank(parallelism, sizes, recompute=recompute), Counter()
    for trace in traces:
        calls = Counter()
        for phase in ("backward_input", "backward_weights"):
            words.update({key: t.words for key, t in trace.traffic[phase].items()})
            calls.update({key: t.calls for key, t in trace.traffic[phase].items()})
        assert calls == {key: move.calls for key, move in whole.items()}
    assert words == {key: move.words for key, move in whole.items()}
    ranks = len(traces) if name == "serial" else 1
    flops = cost.flops_of_halves(mm3d.ModelSizes(**sizes))["backward_weights"]
    assert sum(trace.flops("backward_weights") for trace in traces) == ranks * flops


@pytest.mark.parametrize("x, y, z", [(2, 2, 2), (1, 4, 2), (8, 1, 1)])
def test_words_and_operands_of_the_halves_in_3d_by_hand(x, y, z):
    """Of products M x N by N x K up, of Y and Z exchanged down: dY is kept gathered."""
    sizes = SIZES["even"]
    M, h = sizes["batch"] * sizes["seq"], sizes["hidden"]
    traces = every_dry_rank(Parallelism("3d", (x, y, z)), sizes)
    moved, kept = Counter(), 0
    for N, K, a, c in ((h, 3 * h, y, z), (h, h, z, y), (h, 4 * h, y, z), (4 * h, h, z, y)):
        moved["all_gather"] += (a - 1) * M * N
        moved["reduce_scatter"] += (x - 1) * N * K
        kept += M * N + c * M * K
    found = Counter()
    for trace in traces:
        for (_, kind), one in trace.traffic["backward_weights"].items():
            found[kind] += one.words
    assert found["all_gather"] == moved["all_gather"]
    assert found["reduce_scatter"] == moved["reduce_scatter"]
    assert sum(trace.operands for trace in traces) == 4 * kept


@pytest.mark.slow_but_first
@pytest.mark.parametrize("keep, recompute", [
    ("none", "uniform:2+selective"), ("none", "none"), ("weight", "full"), ("both", "none")])
@pytest.mark.parametrize("grid", [(2, 2, 2), (4, 1, 1)])
def test_halves_with_overlap_are_in_flight_in_any_order(grid, keep, recompute):
    """Nothing is used before it is there or left behind, and the words are the same."""
    sizes = dict(layers=3, hidden=16, heads=4, batch=8, seq=4)
    found, moved = [], []
    for overlap in (False, True):
        with mirrored("3d", grid, keep=keep, overlap=overlap) as (scheme, _):
            model = mm3d.Transformer(scheme, **sizes, recompute=recompute)
            found.append(of_three(model, "cab"))
            moved.append(scheme.grid.traffic())
    assert different(*found) == [] and not any(np.isnan(a).any() for a in found[1].values())
    assert moved[0] == moved[1]


def test_observers_see_the_halves():
    """Under the names of the layers, each product of weights in the second half."""
    with Parallelism("serial").on(mm3d.grid.grid.MPI.COMM_SELF, "numpy") as scheme:
        model, trace = mm3d.Transformer(scheme, **SIZES["even"]), Trace()
        expected = passes(model, "Fa Da")
        with observed(scheme.grid, trace, model):
            assert different(passes(model, "Fa Ba Wa"), expected) == []
    flops = trace.flops("forward"), trace.flops("backward_input"), trace.flops("backward_weights")
    weights = 24 * SIZES["even"]["batch"] * SIZES["even"]["seq"] * SIZES["even"]["hidden"] ** 2
    assert flops[2] == weights < flops[0] < flops[1] and trace.flops("backward") == 0
    assert {part for phase, part, event in trace.events
            if phase == "backward_weights" and not isinstance(event, Boundary)} == {
                "attention.qkv", "attention.proj", "mlp.up", "mlp.down"}
