"""A rank with other arguments, tokens or rates than the rest is named by all of them."""
import itertools
from collections import Counter

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from gpts import SIZES, tokens_and_targets
from mm3d.grid.agreement import checksum, same_arguments, text_of
from reference import all_refuse

GPT = SIZES | {"layers": 2}
CALLS = {
    "Grid": (mm3d.Grid, dict(x=2, y=1), [("sizes", dict(x=1, y=2)),
                                         ("sizes", dict(y=2, x=1))]),
    "scheme": (lambda comm, name="3d", **options: mm3d.scheme(name, comm, **options).grid,
               dict(grid=(2, 1, 1)),
               [("grid", dict(grid=(1, 2, 1))), ("keep", dict(keep="both")),
                ("name", dict(name="faces"))]),
    "Mesh": (mm3d.Mesh, dict(scheme="serial", data=2), [
        ("data", dict(data=1, stages=2)), ("scheme", dict(scheme="3d", grid=(1, 1, 1)))])}
MODELS = {
    "Transformer": {"seed": 1, "hidden": 24, "heads": 3, "batch": 5, "seq": 4, "layers": 3,
                    "dtype": "float64", "causal": True, "recompute": "full", "dropout": 0.1,
                    "experts": mm3d.Experts(2), "master": "float32"},
    "GPT": {"vocab": 18, "tied": False, "label_smoothing": 0.1, "z_loss": 0.1, "ignored": -2},
    "Pipeline": {"seed": 1, "hidden": 24, "heads": 3, "batch": 5, "seq": 4, "layers": 3, "zero": 1,
                 "dtype": "float64", "recompute": "full", "dropout": 0.1, "in_flight": 1,
                 "experts": mm3d.Experts(2), "schedule": "zb-h1", "microbatches": 2},
    "AdamW": {"lr": 0.2, "betas": (0.9, 0.95), "eps": 1e-6, "weight_decay": 0.1, "clip": 2.0,
              "loss_scaling": mm3d.LossScaling(2.0)},
    "SGD": {"lr": 0.2, "momentum": 0.9}}


def refused(comm, call, said: str) -> None:
    """`call` raises an error that says so, the same on every rank."""
    with all_refuse(comm, said):
        call()


@pytest.fixture
def mesh(comm):
    mesh = mm3d.Mesh(comm, data=2, scheme="serial")
    yield mesh
    mesh.free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_a_rank_with_another_grid_scheme_or_mesh_is_named(comm, name):
    make, own, others = CALLS[name]
    for argument, other in others:
        given = own | other if comm.rank else own
        if "y" in other:
            given = other if comm.rank else own
        refused(comm, lambda: make(comm, **given), rf"{name}: .*\b{argument} \(.*rank 0, .*rank 1")
    make(comm, **own).free()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", MODELS)
def test_a_rank_with_another_argument_of_a_model_or_an_optimizer_is_named(comm, kind, mesh):
    model = mm3d.GPT(mesh, **GPT)
    scheme = mm3d.scheme("1d", comm)

    def make(**change):
        if kind in ("AdamW", "SGD"):
            return getattr(mm3d, kind)(model, **{"lr": 0.1} | change)
        if kind == "Transformer":
            del (sizes := GPT | change)["vocab"]
            return mm3d.Transformer(scheme, **sizes)
        return mm3d.GPT(mesh, **GPT | {"schedule": "1f1b"} | change)
    for name, value in MODELS[kind].items():
        change = {name: value} if comm.rank else {}
        if name in ("schedule", "microbatches"):
            change = change | {"microbatches": 2} if name == "schedule" else change
        call = "GPT" if kind == "Pipeline" else kind
        refused(comm, lambda: make(**change), rf"{call}: .*\b(microbatches|{name}) \(.* on rank 1")


@pytest.mark.ranks(2)
def test_a_rank_that_makes_another_call_or_refuses_is_named(comm, mesh):
    refused(comm, lambda: mm3d.Grid(comm, x=2) if comm.rank else mm3d.Mesh(comm, data=2),
            r"the ranks make different calls \(Mesh on rank 0, Grid on rank 1\)")
    refused(comm, lambda: mm3d.Grid(comm, x=2 + comm.rank),
            "Grid: refused on rank 1: a grid of 3 has 3 ranks, but")
    refused(comm, lambda: mm3d.Grid(comm, x=3), "^a grid of 3 has 3 ranks, but")
    model = mm3d.GPT(mesh, **GPT)
    for kind, wrong in ((mm3d.AdamW, {"lr": -1}), (mm3d.AdamW, {"eps": 0}), (mm3d.SGD, {"lr": -1}),
                        (mm3d.AdamW, {"betas": (1, 1)}), (mm3d.SGD, {"momentum": 2})):
        refused(comm, lambda: kind(model, **{"lr": 0.1} | (wrong if comm.rank else {})),
                f"{kind.__name__}: .*refused on rank 1: {[*wrong][0]}=")


@pytest.mark.ranks(2)
def test_an_optimizer_that_one_rank_holds_longer_is_no_difference(comm, mesh):
    model = mm3d.GPT(mesh, **GPT)
    held = [mm3d.SGD(model, lr=0.1)]
    if comm.rank:
        held.clear()
    assert np.isfinite(model.evaluate(*tokens_and_targets()))


@pytest.mark.ranks(2)
def test_types_that_do_not_matter_are_the_same(comm, mesh):
    sizes = GPT | dict(seed=0, dtype="float32", dropout=0.0, tied=True)
    other = dict(seed=np.int64(0), dtype=np.dtype("float32"), dropout=0, hidden=np.int32(12),
                 tied=1, microbatches=1)
    model = mm3d.GPT(mesh, **(sizes | other if comm.rank else sizes))
    optimizer = mm3d.AdamW(model, lr=np.float64(1) if comm.rank else 1, betas=(0.5, 0.75))
    tokens, targets = tokens_and_targets()
    if comm.rank:
        tokens, targets = np.asfortranarray(tokens.astype(np.uint8)), targets.tolist()
        optimizer.lr = 1.0
    model.step(tokens, targets)
    grid = (1, 1, 1) if comm.rank else None
    mm3d.Mesh(comm, data=2, grid=grid).free()


@pytest.mark.ranks(2, 4, first=(4,))
@pytest.mark.parametrize("options, experts", [
    (dict(scheme="serial", data=2), False), (dict(scheme="serial", stages=2), False),
    (dict(scheme="1d"), True)], ids=str)
def test_other_tokens_targets_and_rates_end_a_step_on_all_ranks(comm, options, experts):
    if comm.size == 4 and not experts:
        options = options | {"scheme": "1d", "grid": (2,)}
    mesh, odd = mm3d.Mesh(comm, **options), comm.rank == comm.size - 1
    model = mm3d.GPT(mesh, **GPT, dropout=0.1,
                     experts=mm3d.Experts(3, every=1) if experts else None)
    optimizer = mm3d.SGD(model, lr=0.1)
    tokens, targets = tokens_and_targets()
    others = [tokens.copy(), targets.copy()]
    others[0][-1, -1] = (tokens[-1, -1] + 1) % 17
    others[1][1, 1] = -1    # ignored: the ranks would divide by other numbers
    before = model.state()

    def name_ranks(name: str) -> str:
        return rf": the ranks differ in {name} \(.* on ranks? 0.* on rank {comm.size - 1}\)"
    for compute in model.step, model.evaluate:
        refused(comm, lambda: compute(others[0] if odd else tokens, targets),
                compute.__name__ + name_ranks("tokens"))
        refused(comm, lambda: compute(tokens, others[1] if odd else targets),
                name_ranks("targets"))
    for owner, name, value in ((optimizer, "lr", 0.2), (model, "loss_scale", 2.0),
                               (model, "dropout_step", 7), (optimizer, "steps", 3),
                               (optimizer, "weight_decay", 0.5), (optimizer, "momentum", 0.5)):
        usual = getattr(owner, name)
        setattr(owner, name, value if odd else usual)
        refused(comm, lambda: model.step(tokens, targets), name_ranks(name))
        setattr(owner, name, usual)
        assert model.dropout_step == 0    # refused before it began
    assert all(np.array_equal(a, before[name]) for name, a in model.state().items())
    assert np.isfinite(model.step(tokens, targets))


MESHES = pytest.mark.parametrize("options", [
    dict(scheme="serial", data=2), dict(scheme="serial", stages=2), dict(scheme="1d")], ids=str)


@pytest.mark.ranks(2)
@MESHES
def test_tokens_that_one_rank_refuses_end_a_step_on_all_ranks_before_it_begins(comm, options):
    mesh = mm3d.Mesh(comm, **options)
    model = mm3d.GPT(mesh, **GPT, dropout=0.1)
    tokens, targets = tokens_and_targets()
    model.step(tokens, targets)
    before = model.gradients()
    wrong = tokens.copy()
    wrong[0, 0] = 17
    for odd, text in ((tokens[:1], r"tokens: \(1, 5\) of"), (tokens * 1.0, "of float64"),
                      (None, r"tokens: \(\)"), (wrong, "17 is out of range"),
                      (wrong.tolist() + [[1]], "tokens")):
        for compute in model.step, model.evaluate:
            refused(comm, lambda: compute(odd if comm.rank else tokens, targets),
                    f"^{compute.__name__}: .*refused on rank 1: .*{text}")
        refused(comm, lambda: model.step(odd, targets), "^tokens|^setting")
    ignored = np.full_like(targets, -1)
    refused(comm, lambda: model.step(tokens, ignored if comm.rank else targets),
            "step: refused on rank 1: all targets are -1")
    assert model.dropout_step == 1
    assert all(np.array_equal(a, before[name]) for name, a in model.gradients().items())


@pytest.mark.ranks(2)
@pytest.mark.slow_but_first
@MESHES
def test_ranks_that_make_different_calls_are_told_which(comm, options, tmp_path):
    """Also where each call alone would communicate in an order of its own."""
    mesh = mm3d.Mesh(comm, **options)
    model = mm3d.GPT(mesh, **GPT)
    optimizer = mm3d.SGD(model, lr=0.1, clip=1.0)
    batch = tokens_and_targets()
    model.step(*batch)
    state, layers = model.state(), model.pipeline.state()
    calls = [("step", lambda: model.step(*batch)), ("evaluate", lambda: model.evaluate(*batch)),
             ("state", model.state), ("gradients", model.gradients),
             ("load", lambda: model.load(state)), ("SGD.step", optimizer.step),
             ("state", model.pipeline.state), ("load", lambda: model.pipeline.load(layers)),
             ("save", lambda: mm3d.save(tmp_path, model, optimizer)),
             ("restore", lambda: mm3d.restore(tmp_path, model, optimizer)),
             ("Mesh", lambda: mm3d.Mesh(comm, **options))]
    for (name, call), (other, another) in itertools.combinations(calls, 2):
        if name != other:
            refused(comm, another if comm.rank else call,
                    rf"different calls \({name} on rank 0, {other} on rank 1\)")
    assert all(np.array_equal(a, state[name]) for name, a in model.state().items())


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options", [dict(clip=1.0), dict(loss_scaling=mm3d.LossScaling())],
                         ids=["clip", "scaling"])
def test_an_optimizer_that_exchanges_anything_compares_its_numbers_with_it(comm, mesh, options):
    model = mm3d.GPT(mesh, **GPT)
    optimizer = mm3d.AdamW(model, lr=0.1, **options)
    model.step(*tokens_and_targets())
    before, scale = model.state(), model.loss_scale
    for name, value in (("lr", 0.2), ("steps", 3), ("weight_decay", 0.5), ("eps", 0.1)):
        usual = getattr(optimizer, name)
        setattr(optimizer, name, value if comm.rank else usual)
        refused(comm, optimizer.step, rf"AdamW.step: the ranks differ in {name} \(")
        setattr(optimizer, name, usual)
    assert all(np.array_equal(a, before[name]) for name, a in model.state().items())
    assert optimizer.steps == 0 and model.loss_scale == scale and optimizer.step()


@pytest.mark.ranks(2)
def test_a_rank_that_alone_changes_the_biases_of_routers_is_named(comm, mesh):
    """They are copies, which nothing would make equal again."""
    model = mm3d.GPT(mesh, **GPT, experts=mm3d.Experts(3, gate="sigmoid-bias"))
    model.step(*tokens_and_targets())
    before = model.state()
    refused(comm, model.update_biases if comm.rank else lambda: model.step(*tokens_and_targets()),
            r"different calls \(step on rank 0, update_biases on rank 1\)")
    for name, a in model.state().items():
        assert np.array_equal(a, before[name]), name


class CountingComm:
    """A communicator that counts the exchanges of all ranks."""

    def __init__(self, comm):
        self.comm, self.size, self.rank, self.counts = comm, comm.size, comm.rank, Counter()

    def __getattr__(self, name):
        self.counts[name] += 1
        return getattr(self.comm, name)


@pytest.mark.ranks(2)
def test_what_a_step_exchanges_over_all_ranks(comm, mesh):
    """One small exchange that compares, and one of losses; one more to clip, one for its norm."""
    model = mm3d.GPT(mesh, **GPT)
    mesh.comm = counted = CountingComm(comm)
    for options, more in ((dict(), 0), (dict(loss_scaling=mm3d.LossScaling()), 1),
                          (dict(clip=1.0), 2)):
        optimizer = mm3d.SGD(model, lr=0.1, **options)
        counted.counts.clear()
        model.step(*tokens_and_targets())
        assert counted.counts == {"Allreduce": 1, "Allgather": 1}
        optimizer.step()
        assert counted.counts == {"Allreduce": 1 + more, "Allgather": 1}


@pytest.mark.ranks(2)
def test_a_mistake_on_one_rank_ends_the_call_on_all(comm):
    with pytest.raises((ValueError, TypeError)) as error:
        with same_arguments(comm, "call"):
            assert comm.rank == 0 or {}["name"]
    assert str(error.value) == "call: refused on rank 1: KeyError: 'name'"


@pytest.mark.ranks(2)
def test_other_arrays_are_not_loaded(comm, mesh):
    model = mm3d.GPT(mesh, **GPT)
    state, layers = model.state(), model.pipeline.state()
    name = "layers.0.mlp.up.bias"
    for load, own in ((model.load, state), (model.pipeline.load, layers)):
        for change in (lambda a: a + 1, lambda a: a * 1j, lambda a: a[:-1]):
            changed = own | ({name: change(own[name])} if comm.rank else {})
            refused(comm, lambda: load(changed), rf"load: the ranks differ in {name} \(")
        refused(comm, lambda: load({one: a + comm.rank for one, a in own.items()}), "and .. more")
        fewer = {one: a for one, a in own.items() if one != name or not comm.rank}
        refused(comm, lambda: load(fewer), rf"{name} \(checksum .* on rank 0, nothing on rank 1")
        load({one: a.tolist() for one, a in own.items()} if comm.rank else own)
    refused(comm, model.state if comm.rank else model.gradients,
            "different calls .gradients on rank 0, state on rank 1")


def test_texts_and_checksums():
    same = [1, 1.0, np.int8(1), np.float32(1), True, np.True_, np.array(1)]
    assert {text_of(one) for one in same} == {"1"}
    assert text_of(np.dtype("float32")) == text_of("float32")
    assert text_of((1, 2.5, None)) == text_of([1, np.float64(2.5), None]) == "(1, 2.5, None)"
    assert text_of(mm3d.Experts(3)) != text_of(mm3d.Experts(3, top=1))
    assert text_of(test_texts_and_checksums) == "test_texts_and_checksums"
    assert text_of(2 ** 70) == str(2 ** 70) and text_of(float("nan")) == "nan"
    a = np.arange(12).reshape(3, 4)
    assert checksum(a.T) == checksum(np.ascontiguousarray(a.T)) != checksum(a)
    assert checksum(a[:0]) == checksum(a[:0, :2])
    with same_arguments(MPI.COMM_SELF, "alone") as given:
        given["anything"] = object()
