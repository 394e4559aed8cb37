"""Experts as in Qwen's and DeepSeek's models: by formulas, by differences, and what is refused."""
import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from experts import SIZES, activations, expert_layers, state_of
from mm3d.arrays import backend
from mm3d.model.experts.options import ExpertDesign
from mm3d.model.experts.gates import choose, gates_backward
from mm3d.model.experts.layer import Experts
from mm3d.model.draws import gpt2_values, varied_values
from mm3d.tracing import dry_run
from models import Parallelism

TOKENS = 13
# Four groups of three, one of which has the two best experts of none of the tokens.
DEEPSEEK = Experts(12, top=4, every=1, capacity=None, gate="sigmoid-bias", balance=0.0, z=0.0,
                   design=ExpertDesign(width=5, shared=7, groups=4, top_groups=2, factor=2.5))
QWEN = Experts(5, top=3, every=1, capacity=None, gate="switch", balance=0.0, z=0.0,
               design=ExpertDesign(width=5, shared=7, shared_gate=True))
LLAMA = dict(norm="rms", positions="rotary", perceptron="swiglu", biases="none", inner=11)


@pytest.fixture(autouse=True)
def numpy_backend():
    backend.get("numpy")


def routed(z, bias, experts) -> list[dict[int, float]]:
    """The gate of each chosen expert of each token, in words of DeepSeek-V3's report."""
    found, design = [], experts.design
    for logits in z:
        scores = [1 / (1 + np.exp(-one)) for one in logits]
        sought = [s + b for s, b in zip(scores, bias)]
        size = experts.count // design.groups
        groups = [range(start, start + size) for start in range(0, experts.count, size)]
        groups.sort(key=lambda own: -sum(sorted(sought[e] for e in own)[-2:]))
        allowed = [e for own in groups[:design.top_groups] for e in own]
        chosen = sorted(allowed, key=lambda e: -sought[e])[:experts.top]
        whole = sum(scores[e] for e in chosen)
        found.append({e: design.factor * scores[e] / whole for e in chosen})
    return found


def silu(x):
    return x / (1 + np.exp(-x))


def test_groups_and_factor_of_deepseek_by_its_formulas():
    rng = np.random.default_rng(0)
    z, bias = rng.normal(0, 2, (TOKENS, 12)), rng.normal(0, 0.3, 12)
    choice, expected = choose(z, DEEPSEEK, bias), routed(z, bias, DEEPSEEK)
    for chosen, gates, own in zip(choice.chosen, choice.gates, expected):
        assert [*own] == chosen.tolist()
        assert np.allclose(gates, [*own.values()], rtol=1e-14, atol=0)
    free = choose(z, Experts(12, top=4, gate="sigmoid-bias"), bias)
    assert (free.chosen != choice.chosen).any()    # the limit of groups matters
    assert all(len({*(row // 3)}) <= 2 for row in choice.chosen)
    assert all(choose(z, DEEPSEEK, -10 * np.ones(12)).chosen[n].tolist() == choose(
        z, DEEPSEEK).chosen[n].tolist() for n in range(TOKENS))    # negative scores, too


@pytest.mark.parametrize("gate", ["switch", "mixtral", "sigmoid-bias"])
def test_gradients_of_gates_times_a_factor(gate):
    rng = np.random.default_rng(1)
    z, dgates = rng.normal(0, 2, (TOKENS, 6)), rng.normal(0, 1, (TOKENS, 3))
    experts = Experts(6, top=3, gate=gate, design=ExpertDesign(factor=2.5))
    plain = choose(z, Experts(6, top=3, gate=gate))
    choice, way = choose(z, experts), rng.normal(0, 1, z.shape)
    assert np.allclose(choice.gates, 2.5 * plain.gates, rtol=1e-14)
    ends = [(choose(z + sign * 1e-6 * way, experts).gates * dgates).sum() for sign in (1, -1)]
    slope = (ends[0] - ends[1]) / 2e-6
    assert (gates_backward(choice, dgates) * way).sum() == pytest.approx(slope, rel=1e-7)


@pytest.mark.parametrize("experts", [DEEPSEEK, QWEN], ids=["deepseek", "qwen"])
def test_the_layer_is_the_sum_of_its_experts_and_the_shared_one(experts):
    """Token by token: widths of their own, the gate of the shared expert, no biases."""
    with Parallelism("serial").on(MPI.COMM_SELF, "numpy") as scheme:
        model = mm3d.Transformer(scheme, **SIZES, experts=experts, **LLAMA)
        state = state_of(model)
        model.load(state)
        layer, (x, _) = expert_layers(model.layers)[-1], activations(model)
        y = layer.forward(x)[0]
    p = {name.removeprefix("layers.1.experts."): a for name, a in state.items()
         if name.startswith("layers.1.experts.")}
    assert p["up.weight"].shape == (experts.count, 12, 2, 5)
    assert p["shared.up.weight"].shape == (12, 2, 7)
    tokens = x.reshape(-1, 12)
    z = tokens @ p["router.weight"].T
    gates = routed(z, p.get("router.bias", 0 * z[0]), experts)
    if experts is QWEN:    # the softmax over all, not divided by the sum of the chosen
        share = np.exp(z) / np.exp(z).sum(1, keepdims=True)
        gates = [{e: row[e] for e in np.argsort(-row)[:3]} for row in share]
    for one, own, found in zip(tokens, gates, y.reshape(-1, 12)):
        g, u = np.tensordot(one, p["shared.up.weight"], 1)
        expected = silu(g) * u @ p["shared.down.weight"]
        if experts is QWEN:
            expected = expected / (1 + np.exp(-p["shared.gate.weight"] @ one))
        for e, gate in own.items():
            g, u = np.tensordot(one, p["up.weight"][e], 1)
            expected = expected + gate * (silu(g) * u @ p["down.weight"][e])
        assert np.allclose(found, expected, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("design, more, said", [
    (dict(width=0), {}, "width=0 should be a whole number of at least 1"),
    (dict(shared=1.5), {}, "shared=1.5 should be a whole number of at least 1"),
    (dict(shared=4, shared_gate="no"), {}, "shared_gate='no': True or False would do"),
    (dict(shared_gate=True), {}, "shared_gate=True without a shared expert: shared=1024 would"),
    (dict(factor=0), {}, "factor=0 should be a number above 0"),
    (dict(top_groups=2), {}, "top_groups=2 of groups=1 cannot be chosen: top_groups=1 at most"),
    (dict(groups=2), dict(gate="mixtral"), "groups=2 with gate='mixtral': gate='sigmoid-bias'"),
    (dict(groups=3), {}, "groups=3 do not divide count=8 experts: 1, 2, 4, 8 would do"),
    (dict(groups=4), dict(top=3), "top=3 experts cannot be chosen in top_groups=1 groups of 2: "
                                  "top=2 at most would do")], ids=str)
def test_what_cannot_be_is_refused(design, more, said):
    experts = Experts(8, **{"gate": "sigmoid-bias", "design": ExpertDesign(**design)} | more)
    with pytest.raises(ValueError) as refused:
        experts.check()
    assert str(refused.value).startswith(said)


def test_initial_values_of_a_shared_expert_are_those_of_linear_layers():
    """By the features that go in; GPT-2's are smaller for the product into the residual stream."""
    for part, inputs, shape in ("up", 12, (12, 2, 7)), ("down", 7, (7, 12)), ("gate", 12, (1, 12)):
        name = f"layers.1.experts.shared.{part}.weight"
        assert varied_values(name, shape) == (0, inputs ** 0.5)
        assert gpt2_values(8)(name, shape) == (0, 200 if part == "down" else 50)


@pytest.mark.parametrize("experts", [DEEPSEEK, QWEN], ids=["deepseek", "qwen"])
def test_they_run_dry(experts):
    """The shared expert's products, of all tokens, are among those counted."""
    trace = dry_run.trace_step("3d", 4, (2, 2, 1), experts=experts, **SIZES)
    plain = dry_run.trace_step("3d", 4, (2, 2, 1), experts=Experts(
        experts.count, experts.top, 1, None, experts.gate, design=ExpertDesign(5)), **SIZES)
    assert trace.flops("forward") > plain.flops("forward")
