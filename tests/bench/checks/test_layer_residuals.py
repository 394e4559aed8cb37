"""A step of the measured model is checked where it lies, and a fault of one rank is found."""
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from bench.__main__ import main
from bench.checks import layer_residuals
from bench.checks.tolerances import layer_by_layer
from bench.checks.rounding import rounding_backend
from bench.records import run_file
from bench.records.measurements import Check
from bench.records.notes import split_checks
from bench.validation import rules
from bench.validation.files import check_file
from mm3d.model.attention.layer import Attention
from mm3d.model.layers import Gelu, LayerNorm, Linear
from records import only_record
from support import run_ranks

GRIDS = [(1, "serial", None), (4, "2d", None), (4, "1d", None), (8, "3d", (2, 2, 2)),
         (8, "3d", (1, 4, 2)), (8, "1d-sp", None)]

SIZES = dict(layers=1, hidden=48, heads=4, batch=3, seq=7)


def model_of(comm, scheme, grid, dtype="float32", causal=False, **sizes):
    sizes = SIZES | sizes
    return mm3d.Transformer(mm3d.scheme(scheme, comm, grid), seed=0, dtype=dtype, causal=causal,
                            **sizes)


def small_model(comm, **sizes):
    """One whose sequences divide over the grid, so that the last rank has all of the last one's
    positions."""
    scheme, grid = {1: ("serial", None), 4: ("1d", None), 8: ("3d", (2, 2, 2))}[comm.size]
    return model_of(comm, scheme, grid, batch=4, seq=5, **sizes)


def checked(model):
    return layer_residuals.check_step(model, model.random("input"),
                                      model.random("output gradient"), 3)


@pytest.mark.ranks(1, 4, slow=(8,), first=(4,))
@pytest.mark.parametrize("dtype, causal", [("float32", False), ("float64", True)])
def test_a_right_step_passes_on_every_grid(comm, dtype, causal):
    for ranks, scheme, grid in GRIDS:
        if ranks == comm.size:
            checks = checked(model_of(comm, scheme, grid, dtype, causal, layers=2, heads=8))
            assert all(check.passed for check in checks)
            assert all(c.error >= 0 for c in checks)
            assert {c.quantity for c in checks} == layer_by_layer(dtype, 2).keys()
            assert any(c.error > 0 for c in checks)
            assert comm.allgather(checks) == [checks] * comm.size


def times(factor, place=np.s_[...]):
    """A fault: a part of what a layer gives is multiplied by a factor."""
    def change(result, layer):
        a = result[0] if isinstance(result, tuple) else result
        a[place] *= factor
    return change


def spoil(layer, way, change):
    """Have `change` spoil what the layer gives forward or backward."""
    right = getattr(layer, way)

    def wrong(*arrays):
        result = right(*arrays)
        if way == "backward":
            arrays[2].finish_gradients()    # sums of vectors wait for those of a whole block
        change(result, layer)
        return result
    setattr(layer, way, wrong)


def gradient(name, place=np.s_[...]):
    """A fault in the gradient of one of the layer's parameters."""
    def change(result, layer):
        getattr(layer, name).grad[place] *= 1.01
    change.parameter = name
    return change


ONE = np.s_[:1]    # in a sum with random signs a fault of all numbers can be next to nothing
FAULTS = {
    "db": (Linear, 0, "backward", gradient("bias", ONE), "attention.qkv, dbias"),
    "a block of C": (Linear, 0, "forward", times(1.01), "attention.qkv, C"),
    "a column of C": (Linear, 3, "forward", times(1.1, np.s_[..., :1]), "mlp.down, C"),
    "dA": (Linear, 2, "backward", times(1.01), "mlp.up, dA"),
    "dB": (Linear, 1, "backward", gradient("weight"), "attention.proj, dB"),
    "a row of dB": (Linear, 3, "backward", gradient("weight", np.s_[:1]), "mlp.down, dB"),
    "dgamma": (LayerNorm, 0, "backward", gradient("weight", ONE), "ln1, dweight"),
    "dbeta": (LayerNorm, 1, "backward", gradient("bias", ONE), "ln2, dbias"),
    "a norm": (LayerNorm, 1, "forward", times(1.01), "ln2, y in some rows"),
    "a norm's dx": (LayerNorm, 0, "backward", times(1.01), "ln1, dx in some rows"),
    "GELU": (Gelu, 0, "forward", times(1.001), "mlp.gelu, y in some rows"),
    "GELU's dx": (Gelu, 0, "backward", times(1.001), "mlp.gelu, dx in some rows"),
    "GELU's db": (Gelu, 0, "backward", gradient("bias", ONE), "mlp.gelu, dbias"),
    "a head": (Attention, 0, "forward", times(1.01, np.s_[-1, :, -12:]), "attention.attention, "),
    "dK of a head": (Attention, 0, "backward", times(1.01, np.s_[-1, :, 1, -12:]),
                     "attention.attention, <dK, K>"),
    "dV of a head": (Attention, 0, "backward", times(1.01, np.s_[-1, :, 2, -12:]),
                     "attention.attention, <dV, V>"),
    "not a number": (Linear, 1, "forward", times(np.nan, np.s_[:1]), "attention.proj, C")}


@pytest.mark.ranks(1, 8, slow=(4,), first=(8,))
@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_rank_is_found_and_named(comm, fault):
    kind, number, way, change, named = FAULTS[fault]
    model = small_model(comm)
    layer = one_of(model, kind, number)
    if comm.rank == faulty(model, layer, change):
        spoil(layer, way, change)
    checks = checked(model)
    found = [c.quantity for c in checks if not c.passed]
    assert any(named in quantity for quantity in found), found
    assert comm.allgather(checks) == [checks] * comm.size


def faulty(model, layer, change):
    """The rank that errs: the last one, or the last that holds the parameter."""
    name = getattr(change, "parameter", None)
    size = getattr(layer, name).grad.size if name else 1
    return max(rank for rank, held in enumerate(model.grid.comm.allgather(size)) if held)


def leaves(chain):
    """The layers within `chain` that are no chains themselves, in order."""
    return [leaf for layer in chain.layers for leaf in (
        leaves(layer) if hasattr(layer, "layers") else [layer])]


def one_of(model, kind, number):
    """A layer wherever it lies within what is computed again."""
    return [layer for layer in leaves(model.layers) if type(layer) is kind][number]


def failed(model):
    return [check.quantity for check in checked(model) if not check.passed]


@pytest.mark.ranks(1, 8, first=(8,))
@pytest.mark.parametrize("policy", ["none", "selective", "full"])
@pytest.mark.parametrize("kind, number, named", [
    (Linear, 0, "attention.qkv, C"), (Linear, 2, "mlp.up, C"),
    (Attention, 0, "attention.attention, O"), (LayerNorm, 1, "ln2, y in some rows")])
def test_a_fault_of_the_first_forward_alone_is_found(comm, policy, kind, number, named):
    """What is computed again is right, and does not hide it."""
    model = small_model(comm, recompute=policy)
    layer = one_of(model, kind, number)
    right, calls = layer.forward, []

    def wrong(x, within):
        y, kept = right(x, within)
        calls.append(x)
        if len(calls) == 1:
            y *= 1.5
        return y, kept
    layer.forward = wrong
    found = failed(model)
    assert calls and any(named in quantity for quantity in found), found


@pytest.mark.ranks(1, slow=(8,))
@pytest.mark.parametrize("policy, number, named", [
    ("selective", 0, "attention.qkv, dB"), ("selective", 3, "mlp.down, dB"),
    ("full", 3, "mlp.down, dB"), ("uniform:2", 3, "mlp.down, dB"),
    ("uniform:2+selective", 3, "mlp.down, dB")])
def test_what_a_product_keeps_again_is_that_of_a_real_step(comm, policy, number, named):
    model = small_model(comm, recompute=policy)
    product = one_of(model, Linear, number).product
    right, calls, factor = product.recompute_saved, [], 1.0

    def again(A):
        calls.append(A)
        return right(A * np.float32(factor))
    product.recompute_saved = again
    assert failed(model) == [] and len(calls) == 1
    model.backward(model.random("output gradient"), model.forward(model.random("input"))[1])
    assert len(calls) == 2
    factor = 1.5
    found = failed(model)
    assert any(named in quantity for quantity in found), found


ROUNDED = {
    "nothing": (Linear, 0, "forward", times(1), None),
    "C": (Linear, 0, "forward", times(1.5), "attention.qkv, C"),
    "a norm": (LayerNorm, 1, "forward", times(1.01), "ln2, y in some rows"),
    "a norm's dx": (LayerNorm, 0, "backward", times(1.01), "ln1, dx in some rows"),
    "dgamma": (LayerNorm, 0, "backward", gradient("weight", ONE), "ln1, dweight"),
    "GELU's dx": (Gelu, 0, "backward", times(1.01), "mlp.gelu, dx in some rows"),
    "attention": (Attention, 0, "forward", times(1.02), "attention.attention, O of a sequence"),
    "dQ": (Attention, 0, "backward", times(0.9, np.s_[:, :, 0]), "<dK, K>"),
    "dK": (Attention, 0, "backward", times(0.9, np.s_[:, :, 1]), "<dK, K>"),
    "dV": (Attention, 0, "backward", times(0.9, np.s_[:, :, 2]), "<dV, V>")}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("fault", ROUNDED)
@pytest.mark.parametrize("causal", [False, True])
def test_with_tf32_layers_without_products_are_held_to_float32(fault, causal):
    kind, number, way, change, named = ROUNDED[fault]
    with rounding_backend(True) as library:
        scheme = mm3d.scheme("serial", MPI.COMM_SELF, backend=library)
        model = mm3d.Transformer(scheme, layers=1, hidden=64, heads=4, batch=4, seq=24,
                                 causal=causal)
        layer = one_of(model, kind, number)
        spoil(layer, way, change)
        found = failed(model)
    assert (found == []) if named is None else any(named in quantity for quantity in found), found


def test_the_rules_allow_tf32_its_eps_where_products_are():
    """They go by what the file says was computed, not by the variable."""
    def said(tf32, limits):
        run = SimpleNamespace(
            configuration=dict(SIZES, layers=1, dtype="float32", tf32=tf32,
                               verified_by="residuals", verified_measured_model=0),
            environment=dict(tuning_variables="MM3D_TF32=1"))
        checks = [Check(name, 0.0, limit) for name, limit in limits.items()]
        return [*rules.check_residuals(run, checks)]
    plain, few = (layer_by_layer(rounding, 1) for rounding in ("float32", "tf32"))
    wider = {name for name in plain if few[name] > plain[name]}
    assert len(wider) == 4 * 3 + 6 and all("mlp.up" in n or "attention." in n or "mlp.down" in n
                                           for n in wider)
    assert said(1, few) == said(1, plain) == said(0, plain) == []
    assert len(said(0, few)) == len(wider)
    lax = {name: limit * 8192 for name, limit in plain.items()}    # TF32's eps everywhere
    assert len(said(1, lax)) == len(plain) - 4 * 3
    assert said(0, lax) and len(said(1, lax)) < len(said(0, lax))


RUN = ("run", "--scheme", "1d-sp", "--table", "weak", "--preset", "paper", "--layers", "3",
       "--hidden", "320", "--batch", "4", "--seq", "8", "--repetitions", "2",
       "--max-repetitions", "2", "--traced", "0")


@pytest.mark.slow
def test_the_paper_preset_checks_the_model_that_it_measures(tmp_path, capsys):
    done = run_ranks(2, "-m", "bench", *RUN, "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    run = only_record(tmp_path)
    serial, own = split_checks(run.checks)
    assert len(serial) == 2 + 12 * 2 and len(own) == len(layer_by_layer("float32", 3))
    assert run.configuration["verified_by"] == "residuals"
    assert not run.configuration["verified_measured_model"]
    # A lax or a missing residual is no verification.
    own[0] = Check(own[0].quantity, own[0].error, 1.0)
    run = replace(run, checks=serial + own[:-1])
    said = " ".join(check_file(run_file.write_run(run, tmp_path, "lax"))[0])
    assert "107 residuals, but 3 layers have 108" in said and "is 1; the rules allow" in said


def test_a_step_with_a_wrong_residual_is_not_written(tmp_path, capsys, monkeypatch):
    wrong = Check("residual of layers.0.mlp.up, dB", 1.0, 1e-6)
    monkeypatch.setattr(layer_residuals, "check_step", lambda *arguments: [wrong])
    monkeypatch.setattr("bench.verbs.run.measure_peaks", lambda *_, **__: None)    # for seconds
    words = [word.replace("1d-sp", "serial") for word in RUN]
    assert main([*words, "--out", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "the measured model's own step is wrong: residual of layers.0.mlp.up, dB" in out
    assert list(tmp_path.glob("*.h5")) == []
