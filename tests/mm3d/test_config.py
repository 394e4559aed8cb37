"""A configuration says what it is, builds the same model as keywords do, and survives a record."""
from dataclasses import replace

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.config import Config, Division, Model
from mm3d.grid.shape import GridShape
from mm3d.model.experts.options import ExpertDesign
from mm3d.tracing import dry_run

MODEL = Model(layers=2, hidden=8, heads=2, batch=4, seq=6, vocab=16, seed=3, dtype="float64",
              dropout=0.1)
DIVISIONS = {1: Division(microbatches=2), 4: Division(data=2, stages=2, zero=1, microbatches=2),
             8: Division(data=2, grid=(2, 2, 1), zero=3, recompute="full")}


@pytest.mark.ranks(1, 4, slow=(8,))
def test_a_config_builds_what_keywords_build(comm):
    how = DIVISIONS[comm.size]
    mesh = mm3d.Mesh(comm, data=how.data, stages=how.stages, grid=how.grid)
    models = [mm3d.GPT(Config(MODEL, how), comm),
              mm3d.GPT(mesh, layers=2, hidden=8, heads=2, vocab=16, batch=4, seq=6, seed=3,
                       dtype="float64", dropout=0.1, microbatches=how.microbatches,
                       zero=how.zero, recompute=how.recompute)]
    tokens = np.arange(24).reshape(4, 6) % 16
    losses = []
    for model in models:
        model.dropout_step = 0
        losses.append(model.step(tokens, tokens))
    assert losses[0] == losses[1] > 0
    first, second = (model.gradients() for model in models)
    assert all(np.array_equal(a, second[name]) for name, a in first.items())
    assert first and models[0].definition == models[1].definition


@pytest.mark.parametrize("where, fields, said", [
    (Config(MODEL), {"layers": 1}, "no layers: GPT"), (Config(MODEL), {}, "comm is needed"),
    (None, {"layers": 1}, "sizes are missing: hidden, heads, batch, seq"),
    (None, {"data": 2}, "data=2 belongs to the mesh"),
    (None, {"hiden": 8}, "hiden=8: there is no such field")])
def test_what_makes_no_gpt_is_named(where, fields, said):
    where = where or mm3d.Mesh(MPI.COMM_SELF, scheme="serial")
    with pytest.raises(TypeError, match=said):
        mm3d.GPT(where, **fields)


def test_a_config_in_another_order_is_refused():
    with pytest.raises(TypeError, match=r"Config\(Division, Model\): a mm3d.Model, then"):
        Config(Division(), MODEL)


def test_a_config_runs_dry():
    config = Config(replace(MODEL, dropout=0.0), Division(data=4, stages=2, grid=(2, 2, 2)))
    found = dry_run.trace(lambda comm, backend: mm3d.GPT(config.on(backend), comm), 64, 63)
    assert found.peak > 0


def test_settings_are_flat_and_without_what_is_none():
    experts = mm3d.Experts(4, top=2, capacity=None)
    found = replace(MODEL, experts=experts).settings()
    assert found == MODEL.settings() | {f"experts_{name}": value for name, value in vars(
        experts).items() if value is not None and name != "design"}
    own = replace(experts, design=ExpertDesign(shared=8))    # of a design what is not by default
    assert replace(MODEL, experts=own).settings() == found | {"experts_shared": 8}
    assert found["experts_top"] == 2 and not {"master", "experts", "experts_capacity"} & {*found}


def test_a_division_is_named_by_what_it_divides():
    assert str(DIVISIONS[4]) == "data 2, ZeRO 1, 2 stages 1f1b, 3d, 2 micro-batches"
    assert str(Division(grid=GridShape("xyz", (2, 3, 1)))) == "3d 2x3x1" == str(
        Division(grid=(2, 3, 1)))
    assert DIVISIONS[8].given() == {"data": 2, "zero": 3, "grid": (2, 2, 1), "recompute": "full"}


@pytest.mark.parametrize("make, said", [
    (lambda scheme, mesh: mm3d.Transformer(scheme, 2, hidden=8), "2 is no Stack: sizes have"),
    (lambda scheme, mesh: mm3d.Transformer(scheme, layers=1), "sizes are missing: hidden, heads"),
    (lambda scheme, mesh: mm3d.Transformer(scheme, hiden=8), "Transformer: hiden=8: there is no"),
    (lambda scheme, mesh: mm3d.Pipeline(mesh, "1f1b", 1, data=2), "data=2 belongs to the mesh"),
    (lambda scheme, mesh: mm3d.Pipeline(mesh, "1f1b", 1, layers=1), "Pipeline: sizes are")])
def test_what_makes_no_stack_of_layers_is_named(make, said):
    scheme = mm3d.scheme("serial", MPI.COMM_SELF)
    with pytest.raises(TypeError, match=said):
        make(scheme, mm3d.Mesh(MPI.COMM_SELF, scheme="serial"))
