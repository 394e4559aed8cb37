"""A layer of experts on one rank: its output and gradients, and the cases that are dense."""
import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from bench.experiments.experts.plain import PlainExperts
from experts import SIZES, activations, expert_layers, state_of, step
from mm3d.arrays.grouped_products import (cut_segments, grouped_matmul, grouped_matmul_nt,
                                          grouped_matmul_tn, segments_of)

ALL = mm3d.Experts(4, every=1, gate="mixtral", capacity=None)


def model(experts=None, **sizes) -> mm3d.Transformer:
    scheme = mm3d.scheme("serial", MPI.COMM_SELF, backend="numpy")
    return mm3d.Transformer(scheme, **(SIZES | sizes), experts=experts)


def as_dense(state: dict[str, np.ndarray], like: mm3d.Transformer) -> dict[str, np.ndarray]:
    """The state of a model in which every expert is the perceptron of a dense one."""
    found = {}
    for p in like.parameters:
        if ".router." in p.name:
            found[p.name] = np.random.default_rng(0).standard_normal(p.shape)
        else:
            dense = state[p.name.replace("experts", "mlp")]
            found[p.name] = np.broadcast_to(dense, p.public_shape)
    return found


# The same as something else.

def test_a_single_expert_is_the_dense_layer_to_the_bit():
    dense, one = model(), model(mm3d.Experts(1, top=1, every=1, z=0.0))
    state = state_of(dense)
    expected, found = step(dense, state), step(one, as_dense(state, one))
    for name, a in found.items():
        if ".router." in name:
            assert not a.any()
        elif name not in ("chosen", "dropped"):
            b = expected[name.replace("experts", "mlp")]
            assert np.array_equal(np.reshape(a, b.shape), b), name


# What is computed.

@pytest.mark.parametrize("experts", [
    ALL, mm3d.Experts(5, every=1, capacity=0.6), mm3d.Experts(3, top=1, every=1, capacity=0.7),
    mm3d.Experts(5, every=1, capacity=0.6, gate="gshard"),
    mm3d.Experts(20, top=3, every=1, gate="mixtral", capacity=None)])
@pytest.mark.parametrize("fields", [{}, dict(perceptron="swiglu", biases="none", inner=7),
                                    dict(perceptron="swiglu"), dict(biases="qkv")], ids=str)
def test_the_output_is_that_of_a_loop_over_tokens(experts, fields):
    many = model(experts, **fields)
    state = state_of(many)
    many.load(state)
    layer, x = expert_layers(many.layers)[-1], activations(many)[0]
    y, _ = layer.forward(x)
    own = {name.removeprefix("layers.1.experts."): a for name, a in state.items()
           if name.startswith("layers.1.experts.")}
    plain = PlainExperts(experts, own, x.reshape(-1, 12))
    np.testing.assert_allclose(y.reshape(-1, 12), plain.output(), atol=1e-12)
    assert many.routings.totals[-1].dropped.sum() == (~plain.kept).sum()


# Gradients.

@pytest.mark.parametrize("experts, fields", [
    (mm3d.Experts(4, every=1, balance=0.3, z=0.2, capacity=0.7), dict(perceptron="swiglu")),
    (mm3d.Experts(4, every=1, balance=0.3, z=0.2, capacity=None), {}),
    (mm3d.Experts(4, top=3, every=1, gate="gshard", balance=0.2, z=0.1, capacity=0.8), {}),
    (mm3d.Experts(4, every=2, gate="sigmoid-bias", balance=0.2, z=0.1, convention="huggingface",
                  capacity=None), dict(biases="none")),
    (mm3d.Experts(12, top=4, every=1, gate="sigmoid-bias", capacity=None, design=mm3d.ExpertDesign(
        5, 7, groups=4, top_groups=2, factor=2.5)), dict(perceptron="swiglu", biases="none")),
    (mm3d.Experts(5, every=1, capacity=None, design=mm3d.ExpertDesign(5, 7, True)), {})])
def test_gradients_are_central_differences(experts, fields):
    """Of every parameter and the input, along a random direction; no choice changes so near."""
    many = model(experts, **fields)
    state, (x, dy) = state_of(many), activations(many)

    def loss(state, x) -> tuple[float, list]:
        many.load(state)
        many.routings.totals.clear()
        y, _ = many.forward(many.shard(x))
        totals = many.routings.totals
        return (float((y * dy).sum()) + sum(one.balance + one.z for one in totals),
                [one.chosen.tolist() for one in totals])
    found, rng, size = step(many, state), np.random.default_rng(9), 1e-6
    for name in [*state, "dx"]:
        if name.endswith("router.bias"):
            assert not found[name].any()
            continue
        direction = rng.standard_normal(found[name].shape)
        ends = [loss(state, x + sign * size * direction) if name == "dx" else
                loss(state | {name: state[name] + sign * size * direction}, x)
                for sign in (1, -1)]
        assert ends[0][1] == ends[1][1]
        slope = (ends[0][0] - ends[1][0]) / (2 * size)
        assert abs((found[name] * direction).sum() - slope) < 2e-7 * max(1, abs(slope)), name


@pytest.mark.parametrize("policy", ["selective", "full", "uniform:2", "uniform:2+selective"])
def test_recomputation_changes_no_bit(policy):
    """Although the router would now choose otherwise.

    Guards against a routing that is computed again (NVIDIA-NeMo/Automodel#3156).
    """
    experts = mm3d.Experts(4, every=2, capacity=0.8, gate="sigmoid-bias")
    expected = step(model(experts, layers=4))
    again = model(experts, layers=4, recompute=policy)
    again.load(state_of(again))
    x, dy = activations(again)
    y, saved = again.forward(again.shard(x))
    with pytest.raises(ZeroDivisionError), again.routings.replaying(["a routing of before"]):
        1 / 0
    assert again.routings.next_replayed() is None    # what is left belongs to no other pass
    for bias in again.routings.biases.values():    # as if a step had changed them
        bias.load(np.array([9.0, 0, 0, -9]))
    dx = again.backward(again.shard(dy), saved)
    assert np.array_equal(y, expected["y"]) and np.array_equal(dx, expected["dx"])
    for name, gradient in again.gradients().items():
        assert np.array_equal(gradient, expected[name]), name
    assert len(again.routings.totals) == 2    # of the forward alone


@pytest.mark.parametrize("dtype, bound", [("float32", 2e-5), ("float16", 3e-2)])
def test_narrow_types_route_in_float32(dtype, bound):
    options = {"master": "float32"} if dtype == "float16" else {}
    many = model(ALL, dtype=dtype, **options)
    state = {name: a.astype(dtype).astype(float) for name, a in state_of(many).items()}
    expected, found = step(model(ALL), state), step(many, state)
    router = expert_layers(many.layers)[-1].router
    assert router.forward(np.ones((2, 12), dtype))[0].dtype == np.float32
    for name in ("y", "dx", "layers.1.experts.up.weight", "layers.1.experts.down.bias",
                 "layers.1.experts.router.weight"):
        error = np.linalg.norm(found[name] - expected[name]) / np.linalg.norm(expected[name])
        assert error < bound, (name, error)


# Grouped products.

def test_groups_are_multiplied_apart():
    rng = np.random.default_rng(0)
    segments = segments_of([0, 3, 1, 0], [4, 2, 0, 3])
    a, b = rng.standard_normal((9, 5)), rng.standard_normal((4, 5, 6))
    groups = np.array([0] * 4 + [3] * 2 + [0] * 3)
    found = grouped_matmul(a, b, segments)
    np.testing.assert_allclose(found, np.einsum("rn,rnk->rk", a, b[groups]))
    np.testing.assert_allclose(grouped_matmul_nt(found, b, segments),
                               np.einsum("rk,rnk->rn", found, b[groups]))
    sums = grouped_matmul_tn(a, found, segments, 4)
    for group in range(4):
        rows = groups == group
        np.testing.assert_allclose(sums[group], a[rows].T @ found[rows], atol=1e-12)
    assert not sums[1:3].any()
    assert [(one.group, one.start, one.stop) for one in cut_segments(segments, 3, 7)] == [
        (0, 0, 1), (3, 1, 3), (0, 3, 4)]


# Bad input.

@pytest.mark.parametrize("experts, message", [
    (8, "experts=8 should be mm3d.Experts"), (mm3d.Experts(2, top=3), "top=2 at most would do"),
    (mm3d.Experts(4, every=3), "in none of layers=2: every=1 would do"),
    (mm3d.Experts(100, top=1, every=1, capacity=0.01, convention="megablocks"), "drops every")])
def test_what_cannot_be_is_refused(experts, message):
    with pytest.raises(ValueError, match=message):
        model(experts)
