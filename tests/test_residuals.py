"""A step of the measured model is checked where it lies, and a fault of one rank is found."""
import numpy as np
import pytest

import mm3d
from bench import residuals
from bench.__main__ import main
from bench.validate import check
from mm3d import store
from mm3d.layers import Attention, Gelu, LayerNorm, Linear
from mm3d.store import Check
from support import run_ranks

GRIDS = [(1, "serial", None), (4, "2d", None), (4, "1d", None), (8, "3d", (2, 2, 2)),
         (8, "3d", (1, 4, 2)), (8, "1d-sp", None)]


def model_of(comm, scheme, grid, dtype="float32", causal=False, **sizes):
    sizes = dict(layers=1, hidden=48, heads=4, batch=3, seq=7) | sizes
    return mm3d.Transformer(mm3d.scheme(scheme, comm, grid), seed=0, dtype=dtype, causal=causal,
                            **sizes)


def looked_at(model):
    return residuals.step(model, model.random("input"), model.random("output gradient"), 3)


@pytest.mark.ranks(1, 4, 8)
@pytest.mark.parametrize("dtype, causal", [("float32", False), ("float64", True)])
def test_a_right_step_passes_on_every_grid(comm, dtype, causal):
    for ranks, scheme, grid in GRIDS:
        if ranks == comm.size:
            checks = looked_at(model_of(comm, scheme, grid, dtype, causal, layers=2, heads=8))
            assert residuals.failure(checks) is None
            assert [c.quantity for c in checks] != [] and all(c.error >= 0 for c in checks)
            assert {c.quantity for c in checks} == residuals.quantities(2).keys()
            assert any(c.error > 0 for c in checks)
            assert comm.allgather(checks) == [checks] * comm.size


def times(factor, place=np.s_[...]):
    """A fault: a part of what a layer gives is multiplied by a factor."""
    def change(result, layer):
        a = result[0] if isinstance(result, tuple) else result
        a[place] *= factor
    return change


def gradient(name, place=np.s_[...]):
    """A fault in the gradient of one of the layer's parameters."""
    def change(result, layer):
        getattr(layer, name).grad[place] *= 1.01
    change.parameter = name
    return change


FIRST = np.s_[-1:, :, :1]    # a feature of a sequence
FAULTS = {
    "a block of C": (Linear, 0, "forward", times(1.01), "attention.qkv, C"),
    "a column of C": (Linear, 3, "forward", times(1.1, np.s_[..., :1]), "mlp.down, C"),
    "dA": (Linear, 2, "backward", times(1.01), "mlp.up, dA"),
    "dB": (Linear, 1, "backward", gradient("weight"), "attention.proj, dB"),
    "a row of dB": (Linear, 3, "backward", gradient("weight", np.s_[:1]), "mlp.down, dB"),
    "db": (Linear, 0, "backward", gradient("bias"), "attention.qkv, dbias"),
    "dgamma": (LayerNorm, 0, "backward", gradient("weight"), "ln1, dweight"),
    "dbeta": (LayerNorm, 1, "backward", gradient("bias"), "ln2, dbias"),
    "a norm": (LayerNorm, 1, "forward", times(1.01), "ln2, y in some rows"),
    "a norm's dx": (LayerNorm, 0, "backward", times(1.01), "ln1, dx in some rows"),
    "GELU": (Gelu, 0, "forward", times(1.001), "mlp.gelu, y in some rows"),
    "GELU's dx": (Gelu, 0, "backward", times(1.001), "mlp.gelu, dx in some rows"),
    "GELU's db": (Gelu, 0, "backward", gradient("bias"), "mlp.gelu, dbias"),
    "a head": (Attention, 0, "forward", times(1.01, np.s_[-1, :, -12:]), "attention.attention, "),
    "dK of a head": (Attention, 0, "backward", times(1.01, np.s_[-1, :, 1, -12:]),
                     "attention.attention, <dK, K>"),
    "dV of a head": (Attention, 0, "backward", times(1.01, np.s_[-1, :, 2, -12:]),
                     "attention.attention, <dV, V>"),
    "not a number": (Linear, 1, "forward", times(np.nan, np.s_[:1]), "attention.proj, C")}


@pytest.mark.ranks(1, 4, 8)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_is_found_and_named(comm, fault):
    kind, number, way, change, named = FAULTS[fault]
    scheme, grid = {1: ("serial", None), 4: ("1d", None), 8: ("3d", (2, 2, 2))}[comm.size]
    # Sequences divide over the grid, so that the last rank has all of the last one's positions.
    model = model_of(comm, scheme, grid, batch=4, seq=5)
    layer = [one for block in model.layers.layers for one in block.layers
             if type(one) is kind][number]
    if comm.rank == faulty(model, layer, change):
        right = getattr(layer, way)

        def wrong(*arrays):
            result = right(*arrays)
            change(result, layer)
            return result
        setattr(layer, way, wrong)
    checks = looked_at(model)
    failed = [c.quantity for c in checks if not c.passed]
    assert any(named in quantity for quantity in failed), failed
    assert comm.allgather(checks) == [checks] * comm.size
    assert "no times were written" in residuals.failure(checks)


def faulty(model, layer, change):
    """The rank that errs: the last one, or the last that holds the parameter."""
    name = getattr(change, "parameter", None)
    size = getattr(layer, name).grad.size if name else 1
    return max(rank for rank, held in enumerate(model.grid.comm.allgather(size)) if held)


RUN = ("run", "--scheme", "1d-sp", "--table", "weak", "--preset", "paper", "--layers", "3",
       "--hidden", "320", "--batch", "4", "--seq", "8", "--repetitions", "2",
       "--max-repetitions", "2", "--traced", "0")


def test_the_paper_preset_checks_the_model_that_it_measures(tmp_path, capsys):
    done = run_ranks(2, "-m", "bench", *RUN, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    path, = tmp_path.glob("*.h5")
    run = store.read(path)
    serial, own = residuals.apart(run.checks)
    assert len(serial) == 2 + 12 * 2 and len(own) == len(residuals.quantities(3))
    assert run.configuration["verified_by"] == "residuals"
    assert not run.configuration["verified_measured_model"]
    assert check(path)[0] == []
    # A lax or a missing residual is no verification.
    own[0] = Check(own[0].quantity, own[0].error, 1.0)
    run.checks = serial + own[:-1]
    said = " ".join(check(store.write(run, tmp_path, "lax"))[0])
    assert "107 residuals, but 3 layers have 108" in said and "is 1; the rules allow" in said


def test_a_step_with_a_wrong_residual_is_not_written(tmp_path, capsys, monkeypatch):
    wrong = Check("residual of layers.0.mlp.up, dB", 1.0, 1e-6)
    monkeypatch.setattr(residuals, "step", lambda *arguments: [wrong])
    words = [word.replace("1d-sp", "serial") for word in RUN]
    assert main([*words, "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "the measured model's own step is wrong: residual of layers.0.mlp.up, dB" in out
    assert list(tmp_path.glob("*.h5")) == []
