"""A GPT with experts: the same routing, losses and gradients on every mesh, and exact words."""
import numpy as np
import pytest
from expert_gpts import CASES, SIZES, serial, train
from experts import expert_layers
from gpts import case_of, differences, tokens_and_targets
from models import different
from mpi4py import MPI
from reference import all_refuse

import mm3d
from mm3d.training.mesh import expert_shards

# Meshes by ranks, with options of the model.
MESHES = {
    2: [(dict(data=2, scheme="serial"), dict(expert_parallel=2)),
        (dict(data=2, scheme="serial"), dict(expert_parallel=2)),
        (dict(data=2, scheme="serial"), dict(zero=3))],
    4: [(dict(data=2, scheme="3d", grid=(1, 2, 1)), dict(expert_parallel=2, zero=3)),
        (dict(data=2, stages=2, scheme="serial"),
         dict(expert_parallel=2, recompute="full", zero=2, in_flight=2, schedule="zb-h1")),
        (dict(data=2, scheme="1d-sp"), dict(expert_parallel=2)),
        (dict(data=2, scheme="1d"), dict(expert_parallel=2, recompute="uniform:2+selective")),
        (dict(data=2, scheme="3d", grid=(1, 1, 2)), dict(expert_parallel=2)),
        (dict(stages=2, scheme="3d", grid=[(1, 2, 1), (2, 1, 1)]), dict(zero=0)),
        (dict(data=2, scheme="faces", grid=(1, 2, 1)), dict(expert_parallel=2, zero=2)),
        (dict(scheme="faces", grid=(1, 2, 2)), dict(recompute="full"))],
    6: [(dict(scheme="3d", grid=(3, 2, 1)), {})],
    8: [(dict(data=2, scheme="3d", grid=(2, 2, 1)), dict(expert_parallel=2)),
        (dict(data=2, stages=2, scheme="1d", grid=(2,)),
         dict(expert_parallel=2, zero=1, schedule="zb-h1")),
        (dict(data=2, scheme="2d-pipelined", grid=(2, 2)), dict(expert_parallel=2, zero=2)),
        (dict(scheme="2.5d", grid=(2, 2, 2)), {}),
        (dict(data=2, scheme="faces", grid=(2, 1, 2)), dict(expert_parallel=2, zero=3))]}


@pytest.mark.ranks(4, slow=(2, 6, 8), first=(4,))
@pytest.mark.parametrize("number", range(8))
def test_losses_gradients_and_routings_are_those_of_one_rank(comm, number):
    """Experts' gradients too, which are divided by the tokens of all replicas as any other.

    Guards against a balance loss from the choices of one rank's tokens (pytorch/torchtitan#3000,
    NVIDIA-NeMo/Automodel#1412), and against gradients divided by the number of an expert's copies
    (databricks/megablocks#86, laekov/fastmoe#106, deepspeedai/DeepSpeed#5618).
    """
    options, more = case_of(comm, MESHES, number)
    mesh = mm3d.Mesh(comm, **options)
    for case in range(len(CASES)) if number and comm.size < 8 else (0,):
        assert not differences(train(mesh, case, **more), serial(case))


def words_along_experts(comm, model) -> dict[str, int]:
    """Words along direction e of all ranks, by collective."""
    return {name: comm.allreduce(one.words) for (c, name), one in model.traffic().items()
            if c == "e"}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("top", [1, 4])
def test_what_moves_fewer_words_is_chosen(comm, top):
    """Words are those stated of it; results are those of experts that are not divided."""
    mesh, results, kept = mm3d.Mesh(comm, data=2, scheme="serial"), [], []
    experts = mm3d.Experts(5, top=top, every=2, gate="mixtral", capacity=None)
    for parts in (1, 2):
        model = mm3d.GPT(mesh, **SIZES, experts=experts, dtype="float64", expert_parallel=parts)
        dispatch = model.pipeline.chunks[0].layers.layers[3].layers[1].dispatch
        plan = dispatch.plan
        dispatch.plan = lambda *a: (kept.append(a[2]), plan(*a))[1]
        model.reset_traffic()
        loss = model.step(*tokens_and_targets(SIZES))
        results.append({"losses": np.array([loss])} | model.gradients())
        moved = words_along_experts(comm, model)
    exchanged, gathered = dispatch.exchange_words(kept[-1]), dispatch.gather_words(top)
    assert gathered == 30 * (4 * 12 + 3 * top)
    assert (exchanged < gathered) == (top == 1)
    counts = comm.size * top * 5    # of choices by expert, gathered in both ways
    if top == 1:
        assert moved == {"all_to_all": exchanged, "all_gather": counts}
    else:
        assert "all_to_all" not in moved
        assert moved["all_gather"] + moved["reduce_scatter"] == gathered + counts
    assert not differences(results[1], results[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("top", [1, 3])
def test_a_rank_whose_experts_get_no_token_takes_part(comm, top):
    """Logits that are all equal send every token to the first experts, and none to the others.

    With one choice rows are exchanged, with three tokens are gathered.  Guards against an expert
    without tokens that leaves out a collective, on which the others wait, or keeps an old
    gradient.
    """
    gradients, experts = [], mm3d.Experts(6, top=top, every=2, capacity=None)
    for mesh, more in ((mm3d.Mesh(MPI.COMM_SELF, 1, "serial"), {}),
                       (mm3d.Mesh(comm, data=2, scheme="serial"), {"expert_parallel": 2})):
        model = mm3d.GPT(mesh, **SIZES, experts=experts, dtype="float64", **more)
        state = model.state()
        model.load(state | {name: 0 * a for name, a in state.items() if ".router." in name})
        for p in model.trained:
            p.grad[...] = 7    # what an earlier step has left
        model.reset_traffic()
        model.step(*tokens_and_targets(SIZES))
        gradients.append(model.gradients())
        moved = words_along_experts(comm, model) if more else {}
        assert not more or ("reduce_scatter" in moved) == (top == 3)
        assert model.routings["layers.1.experts"].chosen[0].tolist() == [30, 0, 0, 0, 0, 0]
    assert not gradients[1]["layers.1.experts.up.weight"][3:].any()
    assert not differences(gradients[1], gradients[0])


@pytest.mark.ranks(2)
def test_divided_experts_have_the_bits_of_whole_ones(comm):
    """All rows of an expert meet in the order of the tokens, as in one process.

    Inputs and routers are whole numbers, with which the logits have no rounding.
    """
    sizes = SIZES | {"layers": 1}
    experts = mm3d.Experts(4, every=1, gate="mixtral", capacity=None)
    gradients = []
    for mesh, more in ((mm3d.Mesh(MPI.COMM_SELF, 1, "serial"), {}),
                       (mm3d.Mesh(comm, data=2, scheme="serial"), {"expert_parallel": 2})):
        model = mm3d.GPT(mesh, **sizes, experts=experts, dtype="float64", **more)
        layer = model.pipeline.chunks[0].layers.layers[1].layers[1]
        x = np.random.default_rng(0).integers(-4, 5, (6, 5, 12))[model.pipeline.rows[0]] / 2
        for p in layer.parameters:
            a = np.random.default_rng(len(p.name)).standard_normal(p.shape)
            p.load(np.round(a) if "router" in p.name else a)
        y, saved = layer.forward(x)
        layer.backward(y, saved)
        gradients.append({p.name: p.gather(p.grad) for p in layer.up.parameters
                          + layer.down.parameters})
    for name, a in gradients[0].items():
        assert np.array_equal(a, gradients[1][name]), name


@pytest.mark.ranks(4)
def test_checkpoints_and_clipping_know_experts_on_another_mesh(comm, shared_tmp_path):
    """Of experts divided among all replicas and among some, and as arrays of (experts, in, out).
    """
    experts = mm3d.Experts(5, every=1, capacity=None)
    first = mm3d.Mesh(comm, data=2, scheme="3d", grid=(1, 2, 1))
    second = mm3d.Mesh(comm, data=4, scheme="serial")
    states, norms = [], []
    for mesh, more in ((first, {"expert_parallel": 2, "zero": 2}),
                       (second, {"expert_parallel": 2, "zero": 3})):
        model = mm3d.GPT(mesh, **SIZES, experts=experts, dtype="float64", seed=len(norms), **more)
        optimizer = mm3d.AdamW(model, lr=1e-2, clip=0.1)
        if norms:
            mm3d.restore(shared_tmp_path / "saved", model, optimizer)
            assert all(np.array_equal(a, states[0][n]) for n, a in model.state().items())
        model.step(*tokens_and_targets(SIZES))
        optimizer.step()
        norms.append(optimizer.norm)
        if len(norms) == 1:
            mm3d.save(shared_tmp_path / "saved", model, optimizer, step=1)
            states.append(model.state())
            model.step(*tokens_and_targets(SIZES))
            optimizer.step()
            norms[0] = optimizer.norm
        states.append(model.state())
    assert states[0]["layers.0.experts.up.weight"].shape == (5, 12, 48)
    assert abs(norms[0] - norms[1]) < 1e-12 * norms[0]
    for name, a in states[1].items():
        np.testing.assert_allclose(a, states[2][name], atol=1e-9, err_msg=name)


def one_process_gpt(experts, **options) -> mm3d.GPT:
    """A GPT on this process alone, of two micro-batches."""
    mesh = mm3d.Mesh(MPI.COMM_SELF, 1, "serial", backend="numpy")
    return mm3d.GPT(mesh, **SIZES, experts=experts, microbatches=2, **options)


@pytest.mark.parametrize("dtype, master", [("float64", None), ("float16", "float32")])
def test_biases_change_by_their_rate(dtype, master):
    """By the tokens of all micro-batches, and in steps that 16 bits would round away."""
    rate, expected = 1e-4, np.full(8, 2.0)
    model = one_process_gpt(mm3d.Experts(8, top=1, every=2, gate="sigmoid-bias", capacity=None,
                                         bias_rate=rate), dtype=dtype, master=master)
    model.load(model.state() | {"layers.1.experts.router.bias": expected})
    for _ in range(3):
        model.step(*tokens_and_targets(SIZES))
        model.update_biases()
        got = model.routings["layers.1.experts"].chosen.sum(axis=0)
        assert got.sum() == 30
        expected = expected + rate * np.sign(got.mean() - got)
    assert (abs(expected - 2) > 2 * rate).any()
    bias, = model.pipeline.chunks[0].routings.biases.values()
    np.testing.assert_allclose(bias.master, expected, rtol=0, atol=1e-6)


def test_steps_that_are_skipped_change_no_bias():
    """Neither where loss scaling skips a step, nor where gradients to be clipped are not finite.

    The step after it changes the biases by its own counts alone.
    """
    experts = mm3d.Experts(4, every=2, gate="sigmoid-bias", bias_rate=0.25)
    model = one_process_gpt(experts, dtype="float16", master="float32")
    scaling = mm3d.LossScaling(initial=2.0 ** 40, backoff=2.0 ** -30)
    optimizer, name = mm3d.AdamW(model, lr=1e-3, loss_scaling=scaling), "layers.1.experts"

    def bias():
        return model.state()[f"{name}.router.bias"]
    with np.errstate(over="ignore", invalid="ignore"):
        model.step(*tokens_and_targets(SIZES))
        assert model.routings[name].chosen.sum() == 60
        assert not optimizer.step() and scaling.skipped == 1 and not bias().any()
    model.step(*tokens_and_targets(SIZES))
    assert not bias().any() and optimizer.step()
    got = model.routings[name].chosen.sum(axis=0)
    assert bias().tolist() == (0.25 * np.sign(15 - got)).tolist() and bias().any()
    before, optimizer = model.state(), mm3d.SGD(model, lr=1e-3, clip=1.0)
    model.step(*tokens_and_targets(SIZES))
    model.trained[-1].grad[...] = np.inf
    with pytest.raises(FloatingPointError):
        optimizer.step()
    assert all(np.array_equal(a, before[n]) for n, a in model.state().items())


def test_gradients_of_routers_losses_have_the_scale_of_the_loss():
    model, gradients = one_process_gpt(mm3d.Experts(4, z=0.1, balance=0.1), dtype="float64"), []
    for model.loss_scale in (1.0, 8.0):
        model.step(*tokens_and_targets(SIZES))
        gradients.append(model.gradients())
    for name, a in gradients[0].items():
        assert np.array_equal(8 * a, gradients[1][name]), name


@pytest.mark.ranks(2)
@pytest.mark.parametrize("options, message", [
    (dict(expert_parallel=3), "1, 2 would do"),
    (dict(expert_parallel=2, experts=mm3d.Experts(1, top=1)), "at least 2 experts"),
    (dict(expert_parallel=2, experts=None), "the model has none"),
    (dict(experts=mm3d.Experts(3, top=4)), "top=3 at most"),
    (dict(experts=mm3d.Experts(99, top=1, capacity=0.01, convention="megablocks")), "drops"),
    (dict(experts=8), r"experts=8 should be mm3d.Experts\(...\)"),
    (dict(batch=2 ** 42, seq=2 ** 20), "overflow 64 bits"),
    (dict(microbatches=4), "8 would do")])
def test_what_does_not_fit_is_refused_on_all_ranks(comm, options, message):
    mesh = mm3d.Mesh(comm, data=2, scheme="serial")
    with all_refuse(comm, message):
        mm3d.GPT(mesh, **SIZES | {"experts": mm3d.Experts(4)} | options)


BATCH = 16    # two micro-batches of 8 replicas
# By ranks: replicas, shards and the rest of a mesh; how many of the replicas divide experts.
DIVISIONS = {
    4: [(dict(data=4, scheme="serial"), 2), (dict(data=4, shards=2, scheme="serial"), 2),
        (dict(data=4, shards=2, scheme="serial"), 4), (dict(data=4, shards=1, scheme="serial"), 2),
        (dict(data=4, shards=2, scheme="serial"), 1)],
    6: [(dict(data=6, shards=2, scheme="serial"), 3)],    # no number of whole groups of shards
    8: [(dict(data=4, scheme="3d", grid=(1, 2, 1)), 2),
        (dict(data=8, shards=4, scheme="serial"), 2),
        (dict(data=4, shards=2, scheme="2d", grid=(1, 1), stages=2), 2)]}


@pytest.mark.ranks(4, slow=(6, 8), first=(4,))
@pytest.mark.parametrize("number", range(5))
def test_every_division_trains_what_one_rank_trains(comm, number):
    """Losses, routings and gradients after a step of SGD, in every stage of ZeRO.

    Gradients of experts are summed over their copies and divided by the tokens of all replicas,
    not by the number of copies (databricks/megablocks#86, laekov/fastmoe#106,
    deepspeedai/DeepSpeed#5618).  Stages are equal to the bit as those of other parameters.
    """
    options, parts = case_of(comm, DIVISIONS, number)
    mesh = mm3d.Mesh(comm, **options)
    for case in range(len(CASES)) if (comm.size, number) == (4, 1) else (0,):
        steps = 1 + (number > 0)
        found = [train(mesh, case, steps, BATCH, zero=zero, expert_parallel=parts)
                 for zero in range(4)]
        assert not differences(found[0], serial(case, steps, BATCH))
        assert not differences(found[2], serial(case, steps, BATCH))
        assert not different(found[1], found[0]) and not different(found[3], found[2])
        assert CASES[case][1] > 1 or not different(found[2], found[0])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("zero", [0, 2])
def test_copies_of_an_expert_with_and_without_tokens_are_summed(comm, zero):
    """The first half of the batch goes to the first expert, the other to the last one.

    Each is there twice, and one of its copies gets nothing.  Guards against an expert without
    tokens that leaves out a collective, on which its copy waits, or keeps an old gradient.
    """
    gradients, sizes = [], SIZES | {"batch": BATCH}
    for mesh, more in ((mm3d.Mesh(MPI.COMM_SELF, 1, "serial"), {}),
                       (mm3d.Mesh(comm, data=4, scheme="serial"), {"expert_parallel": 2})):
        model = mm3d.GPT(mesh, **sizes, experts=mm3d.Experts(2, top=1, every=2, capacity=None),
                         dtype="float64", zero=zero, **more)
        layer, = expert_layers(model.pipeline.chunks[0].layers)
        router, rows = layer.router, model.pipeline.rows[0]
        second = np.repeat(np.arange(rows.start, rows.stop) >= BATCH // 2, sizes["seq"])

        def forward(x, own=router.forward, logits=np.stack([~second, second], axis=1)):
            return np.asarray(logits, float), own(x)[1]
        router.forward = forward
        for p in model.trained:
            p.grad[...] = 7    # what an earlier step has left
        model.step(*tokens_and_targets(sizes))
        gradients.append(model.gradients())
        assert model.routings["layers.1.experts"].chosen.tolist() == [[40, 40]]
    assert not differences(gradients[1], gradients[0])


@pytest.mark.parametrize("shards, parts, found", [
    (4, 1, 4), (4, 2, 2), (4, 4, 1), (2, 4, 1), (1, 2, 1), (2, 3, 2), (4, 6, 2)])
def test_zero_divides_what_a_group_has_until_whole_groups_of_shards_are_full(shards, parts, found):
    assert expert_shards(shards, parts) == found
