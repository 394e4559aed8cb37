"""Recomputation: the same bits from less memory, at the price that the closed forms state."""
from itertools import cycle

import numpy as np
import pytest

import mm3d
from bench.instruments.spans import Recorder
from mm3d import ModelSizes
from mm3d.arrays import backend
from mm3d.model import cost
from mm3d.model.recomputation import POLICIES, parse_policy
from mm3d.tracing import dry_run
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import Trace
from models import MODELS, SOME, Parallelism, different, passes, policies
from reference import total

SOME_AGAIN = ("selective", "uniform:2", "full+selective")
EXAMPLES = {1: SOME[1],
            4: [*SOME[4], Parallelism("3d", (1, 2, 2), {"keep": "both"}),
                Parallelism("3d", (2, 2, 1), {"rows": "positions"})],
            8: [*SOME[8], Parallelism("3d", (2, 2, 2), {"keep": "weight"})]}


@pytest.mark.ranks(1, 4, slow=(8,), first=(4,))
def test_the_same_bits_as_without(comm, transport):
    """Of outputs and all gradients, of every scheme, each in one of the types in turn, with two
    micro-batches in flight; on several ranks each with one of the policies in turn."""
    for parallelism, (sizes, options) in zip(EXAMPLES[comm.size], cycle([
            ("uneven", dict(dtype="float32")), ("uneven", dict(dtype="float64", causal=True)),
            ("even", dict(dtype="float16", master="float32"))])):
        with parallelism.on(comm, "numpy") as scheme:
            def found(name):
                model = mm3d.Transformer(scheme, **MODELS[sizes], **options, recompute=name)
                return passes(model, "Fa Fb Da Db")
            expected, names = found("none"), policies(parallelism, *SOME_AGAIN)
            turn = EXAMPLES[comm.size].index(parallelism) % len(names)
            for name in names if comm.size == 1 else names[turn:turn + 1]:
                assert not different(found(name), expected), (str(parallelism), name)


@pytest.mark.ranks(1, slow=(8,))
def test_words_operations_and_what_is_kept_are_the_closed_forms(comm):
    """Summed over the ranks, by direction and kind of collective, forward and backward."""
    size = MODELS["uneven"]
    for parallelism in EXAMPLES[comm.size]:
        for name in policies(parallelism, *SOME_AGAIN):
            with parallelism.on(comm, "numpy") as scheme:
                model, trace = mm3d.Transformer(scheme, **size, recompute=name), Trace()
                shape, grid = tuple(scheme.grid.shape.values()), scheme.grid
                with observed(grid, trace, model):
                    counted = {}
                    grid.reset_traffic()
                    _, saved = model.forward(model.random("x"))
                    kept, counted["forward"] = model.saved_bytes(saved), grid.traffic()
                    grid.reset_traffic()
                    model.backward(model.random("dy"), saved)
                    counted["backward"] = grid.traffic()
                named = dict(scheme.grid.shape)
            case = (str(parallelism), name)
            moves = cost.moves(parallelism.name, named, ModelSizes(**size), name,
                               **parallelism.options)
            for phase, traffic in counted.items():
                words = total(comm, {key: t.words for key, t in traffic.items()})
                assert words == {key: m.words for key, m in moves[phase].items()}, case
                calls = {key: t.calls for key, t in traffic.items()}
                assert calls == {key: m.calls for key, m in moves[phase].items()}, case
            ranks = comm.size if parallelism.name == "serial" else 1
            again = cost.flops_again(ModelSizes(**size), name)
            assert comm.allreduce(trace.flops_again()) == again * ranks, case
            dried = dry_run.trace_step(parallelism.name, comm.size, shape, comm.rank,
                                       backend.Backend.block,
                                       parallelism.options, **size, recompute=name)
            assert dried.flops_again() == trace.flops_again(), case
            assert dried.flops() == trace.flops(), case
            assert dried.traffic == counted and dried.saved == kept, case


def test_each_policy_takes_less_memory_than_the_one_before():
    """Of a model of many layers, in which activations count: kept words, and the peak."""
    sizes = dict(layers=24, hidden=1024, heads=16, batch=16, seq=512)
    names = ("none", "selective", "full", "full+selective")
    traces = [dry_run.extrapolate_step("3d", 8, **sizes, recompute=name) for name in names]
    for found in ([one.saved for one in traces], [one.peak for one in traces]):
        assert found == sorted(found, reverse=True)


def test_what_is_kept_is_what_the_policies_say():
    """Words a token, of a model on one rank; the layer's input is the caller's own."""
    M, h = 3 * 7, 20
    sizes = dict(layers=4, hidden=h, heads=5, batch=3, seq=7)
    scheme = mm3d.scheme("serial", mm3d.grid.grid.MPI.COMM_SELF)
    for name, words in (("selective", 4 * 9), ("full", 4), ("uniform:2", 2), ("uniform:3", 2),
                        ("uniform:9", 1), ("full+selective", 4)):
        model = mm3d.Transformer(scheme, **sizes, recompute=name)
        x = model.random("x")
        _, saved = model.forward(x)
        assert model.saved_bytes(saved) == 4 * words * M * h, name
        if name == "full":
            assert saved[0] is x


@pytest.mark.parametrize("name", ["", "all", "uniform", "uniform:0", "uniform:-1", "uniform:x",
                                  "uniform:²", "2", "full+", "full+full", "none+selective",
                                  "selective+selective", None, 2])
def test_unknown_policies_are_refused(name):
    with pytest.raises(ValueError, match="recompute=.*none, selective, full, or uniform:n"):
        parse_policy(name)
    with pytest.raises(ValueError, match="recompute="):
        mm3d.Transformer(mm3d.scheme("serial", mm3d.grid.grid.MPI.COMM_SELF), layers=1, hidden=4,
                         heads=1, batch=1, seq=1, recompute=name)


def test_what_the_scheme_keeps_and_the_policy_drops_is_refused():
    scheme = mm3d.scheme("3d", mm3d.grid.grid.MPI.COMM_SELF, keep="weight")
    for name in ("selective", "full+selective"):
        with pytest.raises(ValueError, match="keep='weight'.*leave one of them out"):
            mm3d.Transformer(scheme, layers=1, hidden=4, heads=1, batch=1, seq=1, recompute=name)


def test_every_policy_that_is_tried_is_known_and_repeats_itself():
    assert POLICIES[0] == "none" and len(set(map(parse_policy, POLICIES))) == len(POLICIES)
    assert parse_policy("uniform:3").groups(7) == [3, 3, 1]
    assert parse_policy("selective").groups(7) == []
    assert {p.name for found in EXAMPLES.values() for p in found} == set(mm3d.SCHEMES)


class Clock:
    """Counts its calls."""

    def __init__(self):
        self.ticks = 0

    def __call__(self):
        self.ticks += 1
        return float(self.ticks)


@pytest.mark.ranks(1, slow=(8,))
def test_tracing_tells_what_is_computed_again(comm):
    """Under names of its own, forward's operands among it, and leaves nothing behind."""
    parallelism = Parallelism("3d")
    for name in ("selective", "full"):
        with parallelism.on(comm, "numpy") as scheme:
            model = mm3d.Transformer(scheme, **MODELS["even"], recompute=name)
            before, recorder = model.layers.layers, Recorder(scheme.grid.backend, Clock())
            expected = passes(model, "Fa Da")
            with observed(scheme.grid, recorder, model):
                _, saved = model.forward(model.random("a"))
                recorder.spans.clear()
                dx = model.backward(model.random("da"), saved)
            assert np.array_equal(dx, expected["dxa"]) and model.layers.layers is before
        spans = [(s.kind, s.name) for s in recorder.spans]
        again = [n for n, (kind, _) in enumerate(spans) if kind == "again"]
        first = [name for kind, name in spans[:again[0]]]
        if name == "full":
            assert spans[again[0]] == ("again", "layers.1 again") and len(again) == 2
            assert [n for k, n in spans[:again[0]] if k == "layer"][-2:] == [
                "layers.1.mlp.down", "layers.1.mlp"]
            assert comm.size == 1 or "reduce-scatter C along z" in first
        else:
            assert [spans[n][1] for n in again] == [
                f"layers.{n}.{part} again" for n in (1, 0)
                for part in ("mlp", "mlp", "attention", "attention")]
        assert not any(name.startswith("reduce-scatter d") for name in first)
