"""The gradients of a whole GPT, beside central differences, PyTorch, and itself, to the bit."""
import itertools
import math
from contextlib import nullcontext

import numpy as np
import pytest

import mm3d
from gpts import SIZES, tokens_and_targets, train
from mm3d.training.schedules import build
from models import different
from pipelines import VEE

KINDS = [dict(tied=True, label_smoothing=0.1, z_loss=0.01), dict(tied=False)]


def random_state(model: mm3d.GPT) -> dict[str, np.ndarray]:
    """Parameters of which each matters: no bias is 0, no norm 1."""
    rng = np.random.default_rng(5)
    return {name: (name.endswith(("ln1.weight", "ln2.weight", "norm.weight"))
                   + 0.3 * rng.standard_normal(a.shape)) for name, a in model.state().items()}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_central_differences(comm, kind):
    """Of the mean over the targets that count, along a random direction of every parameter.

    A gradient that is divided by another number of targets, of a head whose table is tied and not
    added, or of a bias that is not summed over all rows, differs at once.
    """
    mesh = mm3d.Mesh(comm, 1, "serial")
    model, data = mm3d.GPT(mesh, **SIZES, dtype="float64", microbatches=2, **kind), []
    state, data = random_state(model), tokens_and_targets()
    model.load(state)
    model.step(*data)
    rng, h = np.random.default_rng(6), 1e-5
    for p in model.trained:
        way, kept = rng.standard_normal(p.master.shape), np.array(p.master)
        losses = []
        for sign in (1, -1):
            p.master[...] = kept + sign * h * way
            losses.append(model.evaluate(*data))
        p.master[...] = kept
        slope, expected = (losses[0] - losses[1]) / (2 * h), np.vdot(p.grad, way)
        size = np.linalg.norm(p.grad) * np.linalg.norm(way)
        assert abs(slope - expected) <= 1e-7 * size + 1e-10, p.name


LAYERS = SIZES | dict(layers=4)
SOME, REST = ("1f1b", "zb-v"), ("gpipe", "zb-h1", "interleaved:2", "v-half")


@pytest.mark.ranks(2, slow=(1,))
@pytest.mark.parametrize("kind, names", [
    (KINDS[0], SOME), pytest.param(KINDS[0], REST, marks=pytest.mark.slow),
    pytest.param(KINDS[1], SOME + REST, marks=pytest.mark.slow)], ids=str)
def test_schedules_stages_and_recomputation_are_equal_to_the_bit(comm, kind, names):
    """Losses and gradients after a step of SGD: the tied gradients of two stages are summed in
    the order of one, and nothing depends on who has which layer."""
    kind = kind | dict(sizes=LAYERS, microbatches=4)
    if comm.rank == 0:
        alone = mm3d.Mesh(comm.Split(0), 1, "serial")
        expected = train(alone, **kind)
    else:
        comm.Split(1)
        expected = None
    expected = comm.bcast(expected)
    mesh = mm3d.Mesh(comm, comm.size, "serial")
    vee = [VEE[comm.size]] if names != SOME else []
    for number, schedule in enumerate((*names, *vee)):
        if isinstance(schedule, str):
            schedule = build(schedule, comm.size, 4)
        again = ("none", "full", "selective")[number % 3]
        found = train(mesh, **kind, schedule=schedule, recompute=again)
        assert not different(found, expected), number


# By ranks: meshes, and GPTs on them, in which gradients come about in other ways.
NARROW = dict(dtype="float16", master="float32")
WAYS = {1: [({}, dict(tied=True)), ({}, dict(tied=False, microbatches=2, **NARROW)),
            ({}, dict(experts=mm3d.Experts(6, top=1, every=2, capacity=None)))],
        2: [(dict(data=2), dict(zero=zero, microbatches=2)) for zero in range(4)]
        + [(dict(stages=2), dict(schedule="zb-h1", microbatches=2)),
           (dict(scheme="1d", grid=(2,)), {}),
           (dict(data=2), dict(experts=mm3d.Experts(4, top=1, every=2), expert_parallel=2))],
        4: [(dict(data=2, stages=2), dict(zero=1, in_flight=1, microbatches=2)),
            (dict(data=4, shards=2), dict(zero=1)), (dict(data=4, shards=2), dict(zero=2))]}


@pytest.mark.ranks(1, 2, slow=(4,))
def test_nothing_is_left_of_the_gradients_before_a_step(comm):
    """The first term of each is written over them, with the bits of one that is added to zeros.

    Guards against a gradient that keeps its last micro-batch alone, or an earlier step's.
    """
    for where, options in WAYS[comm.size]:
        mesh = mm3d.Mesh(comm, **{"scheme": "serial"} | where)
        model, found = mm3d.GPT(mesh, **SIZES, **{"dtype": "float64"} | options), []
        for left in (math.nan, 0):
            for p in (*model.trained, *model.twins):
                p.grad[...] = p._sum[...] = left
            if not left:
                model.new_gradients = nullcontext
            model.step(*tokens_and_targets())
            found.append(model.gradients())
        assert not different(*found), (where, options)
        assert all(a.any() for name, a in found[0].items() if ".experts." not in name)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("zero, shards", [(0, 2), (1, 2), (2, 2), (3, 2), (1, 1), (2, 1)])
def test_what_is_written_to_gradients_before_a_step_is_counted_once(comm, zero, shards):
    """Also after they were set to zero, and by a step without terms, which leaves them."""
    mesh = mm3d.Mesh(comm, data=2, shards=shards, scheme="serial")
    pipeline = mm3d.Pipeline(mesh, "gpipe", layers=1, hidden=4, heads=1, batch=2, seq=2,
                             microbatches=1, dtype="float64", zero=zero)
    found = []
    for before in (0, 8):
        pipeline.zero_gradients()
        for p in pipeline.trained:
            p.grad[...] = before
        pipeline.rehearse()
        found.append(pipeline.gradients())
    with pipeline.data.summed(1):
        pass
    for name, a in pipeline.gradients().items():
        assert np.allclose(a, found[0][name] + 8, rtol=1e-12, atol=1e-12), name
        assert np.array_equal(a, found[1][name]), name
    with pipeline.new_gradients(), pipeline.data.summed(1):
        lent = [p.empty_gradient(p.grad.shape, p.grad.dtype) is p.grad for p in pipeline.trained]
    assert not any(p.grad.any() for p in pipeline.trained)
    assert all(lent) if zero == 0 else zero == 1 or not any(lent)


@pytest.mark.ranks(slow=(4,))
def test_a_tied_table_on_stages_of_different_grids(comm):
    """Each stage receives from the other the parts of its block."""
    expected = None
    for grids in ([(2, 1, 1), (2, 1, 1)], [(2, 1, 1), (1, 2, 1)], [(1, 1, 2), (1, 2, 1)]):
        mesh = mm3d.Mesh(comm, 2, "3d", grids)
        found = train(mesh, microbatches=2)
        expected = expected or found
        for name, a in expected.items():
            assert np.allclose(found[name], a, rtol=1e-10, atol=1e-13), (grids, name)


def torch_loss(torch, state, tokens, targets, heads, smoothing, z):
    """Loss and gradients of the same model, written with PyTorch's functions."""
    F = torch.nn.functional
    p = {name: torch.tensor(a, requires_grad=True) for name, a in state.items()}
    h = p["norm.weight"].shape[0]
    x = p["embedding.weight"][torch.tensor(tokens)] + p["positions.weight"]
    for n in itertools.count():
        if f"layers.{n}.ln1.weight" not in p:
            break
        q = {name.partition(f"layers.{n}.")[2]: a for name, a in p.items()}
        u = F.layer_norm(x, (h,), q["ln1.weight"], q["ln1.bias"])
        u = u @ q["attention.qkv.weight"] + q["attention.qkv.bias"]
        qkv = u.reshape(*tokens.shape, 3, heads, h // heads).permute(2, 0, 3, 1, 4)
        u = F.scaled_dot_product_attention(*qkv, is_causal=True)
        u = u.transpose(1, 2).reshape(*tokens.shape, h)
        x = x + u @ q["attention.proj.weight"] + q["attention.proj.bias"]
        u = F.layer_norm(x, (h,), q["ln2.weight"], q["ln2.bias"])
        u = F.gelu(u @ q["mlp.up.weight"] + q["mlp.up.bias"], approximate="tanh")
        x = x + u @ q["mlp.down.weight"] + q["mlp.down.bias"]
    x = F.layer_norm(x, (h,), p["norm.weight"], p["norm.bias"])
    logits = x @ p.get("head.weight", p["embedding.weight"].T)
    goal = torch.tensor(targets)
    loss = F.cross_entropy(logits.flatten(0, 1), goal.flatten(), ignore_index=-1,
                           label_smoothing=smoothing)
    loss = loss + z * (torch.logsumexp(logits, -1)[goal >= 0] ** 2).mean()
    loss.backward()
    return loss.item(), {name: a.grad.numpy() for name, a in p.items()}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_pytorch_computes_the_same(comm, kind):
    """Where PyTorch is installed: losses and all gradients in float64."""
    torch = pytest.importorskip("torch")
    mesh = mm3d.Mesh(comm, 1, "serial")
    model, data = mm3d.GPT(mesh, **SIZES, dtype="float64", **kind), tokens_and_targets()
    state = random_state(model)
    model.load(state)
    loss, found = model.step(*data), model.gradients()
    expected, gradients = torch_loss(torch, state, *data, SIZES["heads"],
                                     kind.get("label_smoothing", 0.0), kind.get("z_loss", 0.0))
    assert abs(loss - expected) <= 1e-12
    for name, a in found.items():
        error = np.linalg.norm(a - gradients[name]) / np.linalg.norm(gradients[name])
        assert error <= 1e-11, name
