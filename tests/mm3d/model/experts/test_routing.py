"""Routing of tokens to experts: choices, gates, capacities, losses, on one rank."""
import itertools

import numpy as np
import pytest

from mm3d.arrays import backend
from mm3d.model.experts.gates import (ChosenExperts, balance_loss, choose, gates_backward, shares,
                                      z_loss)
from mm3d.model.experts.token_order import capacity_of, counts, kept, positions
from mm3d.model.experts.options import GATES
from mm3d.model.experts.layer import Experts
from mm3d.model.experts.totals import updated_bias, utilisation_entropy

TOKENS, COUNT = 11, 5


@pytest.fixture(autouse=True)
def numpy_backend():
    backend.get("numpy")


def logits(tokens=TOKENS, count=COUNT, seed=0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 2, (tokens, count))


def derivative(value, z: np.ndarray, step=1e-6) -> np.ndarray:
    """Central differences of a number by each element of z."""
    out = np.empty_like(z)
    for place in itertools.product(*map(range, z.shape)):
        ends = []
        for sign in (1, -1):
            moved = z.copy()
            moved[place] += sign * step
            ends.append(value(moved))
        out[place] = (ends[0] - ends[1]) / (2 * step)
    return out


# Choices and gates.

@pytest.mark.parametrize("gate", GATES)
def test_of_equal_logits_the_lowest_expert_comes_first(gate):
    z = np.array([[1, 3, 3, 3, 0], [2, 2, 2, 2, 2], [0, 1, 5, 1, 1], [-1, -1, -1, -9, 0.0]])
    choice = choose(z, Experts(COUNT, top=3, gate=gate))
    assert choice.chosen.tolist() == [[1, 2, 3], [0, 1, 2], [2, 1, 3], [4, 0, 1]]
    assert choice.chosen.dtype == np.int64


def test_broken_logits_still_choose_different_experts():
    z = np.array([[np.nan] * 5, [-np.inf] * 5, [0, np.nan, np.inf, 1, -np.inf]])
    with np.errstate(invalid="ignore"):
        chosen = choose(z, Experts(COUNT, top=3)).chosen
    assert chosen.tolist() == [[0, 1, 2], [0, 1, 2], [2, 3, 0]]


@pytest.mark.parametrize("gate", GATES)
def test_a_single_expert_gets_all_tokens_with_gate_one(gate):
    z = logits(count=1)
    choice = choose(z, Experts(1, top=1, gate=gate))
    assert not choice.chosen.any() and (choice.gates == 1).all()
    assert not gates_backward(choice, np.ones((TOKENS, 1))).any()


@pytest.mark.parametrize("gate", GATES)
def test_all_experts_with_equal_logits_are_averaged(gate):
    choice = choose(np.full((3, 4), 0.5), Experts(4, top=4, gate=gate))
    assert (choice.gates == 0.25).all() and (choice.probabilities == 0.25).all()


def test_gates_are_those_of_the_papers():
    z = logits()
    softmax = np.exp(z) / np.exp(z).sum(1, keepdims=True)
    sigmoid = 1 / (1 + np.exp(-z))
    for gate, score in ("switch", softmax), ("mixtral", softmax), ("sigmoid-bias", sigmoid):
        choice = choose(z, Experts(COUNT, top=3, gate=gate))
        assert (choice.chosen == np.argsort(-z, kind="stable")[:, :3]).all()
        expected = np.take_along_axis(score, choice.chosen, 1)
        if gate != "switch":
            expected /= expected.sum(1, keepdims=True)
        assert np.allclose(choice.gates, expected, rtol=1e-14, atol=0)
        assert np.allclose(choice.probabilities, score / score.sum(1, keepdims=True), rtol=1e-13)


def test_a_bias_changes_the_choice_but_no_gate():
    z, bias = logits(), np.array([0, 0, 9.0, 0, 0])
    experts = Experts(COUNT, top=2, gate="sigmoid-bias")
    plain, moved = choose(z, experts), choose(z, experts, bias)
    assert (moved.chosen[:, 0] == 2).all()
    assert (moved.probabilities == plain.probabilities).all()
    s = 1 / (1 + np.exp(-np.take_along_axis(z, moved.chosen, 1)))
    assert np.allclose(moved.gates, s / s.sum(1, keepdims=True), rtol=1e-13)
    # Added to the sigmoids, 0.9 and 0.5, it exceeds them; added to their logarithms it would not.
    z, bias = np.array([[np.log(9), 0, -9]]), np.array([0, 0.5, 0])
    assert choose(z, Experts(3, top=2, gate="sigmoid-bias"), bias).chosen.tolist() == [[1, 0]]


def test_sigmoid_gates_stay_finite_where_sigmoids_are_zero():
    choice = choose(np.array([[-900.0, -901, -950]]), Experts(3, gate="sigmoid-bias"))
    assert np.allclose(choice.gates, [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]])
    dz = gates_backward(choice, np.array([[1.0, 0]]))
    assert np.isfinite(dz).all() and dz[0, 0] > 0


@pytest.mark.parametrize("gate", GATES)
def test_gates_against_central_differences(gate):
    """The chosen experts stay, since no two logits are close."""
    z, experts = logits(), Experts(COUNT, top=3, gate=gate)
    dgates = np.random.default_rng(1).normal(size=(TOKENS, 3))
    expected = derivative(lambda moved: (choose(moved, experts).gates * dgates).sum(), z)
    assert np.allclose(gates_backward(choose(z, experts), dgates), expected, atol=1e-9)


def test_numbers_of_16_bits_are_routed_in_float32():
    z = logits().astype(np.float16)
    choice, same = (choose(a, Experts(COUNT)) for a in (z, z.astype(np.float32)))
    assert choice.gates.dtype == np.float32 and (choice.gates == same.gates).all()
    assert z_loss(z, 1.0, TOKENS)[1].dtype == np.float32
    assert choose(logits(), Experts(COUNT)).gates.dtype == np.float64


# Capacity.

def test_capacities_by_hand():
    # 350 tokens, k = 2, 14 experts: 50 an expert, times 1.1 is 55, or in float64 a bit more.
    expected = {"mm3d": 55, "megatron": 56, "deepspeed": 55, "megablocks": 55}
    for convention, taken in expected.items():
        assert capacity_of(Experts(14, capacity=1.1, convention=convention), 350) == taken
    # 100 tokens, k = 1, 4 experts: 25 an expert, times 1.2 is 30, or in float32 a bit more.
    expected = {"mm3d": 30, "megatron": 30, "deepspeed": 31, "megablocks": 30}
    for convention, taken in expected.items():
        assert capacity_of(Experts(4, top=1, capacity=1.2, convention=convention), 100) == taken
    # 9 tokens, k = 2, 4 experts: 4.5 an expert, times 1.25 is 5.625.
    expected = {"mm3d": 6, "megatron": 6, "deepspeed": 6, "megablocks": 5}
    for convention, taken in expected.items():
        assert capacity_of(Experts(4, convention=convention), 9) == taken
    # 6 tokens, k = 1, 4 experts: 1.5 an expert; DeepSpeed's layer takes at least 4.
    expected = {"mm3d": 2, "megatron": 2, "deepspeed": 4, "megablocks": 1}
    for convention, taken in expected.items():
        assert capacity_of(Experts(4, top=1, capacity=1, convention=convention), 6) == taken
    assert capacity_of(Experts(4, top=1, capacity=1, min_capacity=3), 6) == 3
    assert capacity_of(Experts(4, capacity=99), 6) == 6    # no expert is sent a token twice
    assert capacity_of(Experts(4, capacity=None, convention="huggingface"), 6) is None


def test_exactly_one_token_is_dropped():
    """Four experts, eight tokens, capacity 2: the third token of expert 1 is one too many."""
    chosen = np.array([[0], [1], [1], [2], [1], [3], [0], [2]])
    total = counts(chosen, 4)
    places = positions(chosen, 0 * total, total, "position")
    taken = capacity_of(Experts(4, top=1, capacity=1.0), 8)
    assert taken == 2 and np.flatnonzero(~kept(places, taken)).tolist() == [4]
    assert kept(places, 3).all() and kept(places, None).all()


def test_both_orders_of_dropping():
    """Three tokens that want the experts 0 and 1: who comes third?"""
    chosen = np.array([[0, 1], [1, 0], [0, 1]])
    total = counts(chosen, 2)
    assert total.tolist() == [[2, 1], [1, 2]]
    for order, places in (("position", [[0, 0], [1, 1], [2, 2]]),
                          ("choice", [[0, 1], [0, 2], [1, 2]])):
        assert positions(chosen, 0 * total, total, order).tolist() == places
    assert Experts(8).dropping_order == "position"
    assert Experts(8, gate="gshard").dropping_order == "choice"
    assert Experts(8, convention="deepspeed").dropping_order == "choice"
    assert Experts(8, gate="gshard", order="position").dropping_order == "position"


@pytest.mark.parametrize("order", ["position", "choice"])
def test_places_do_not_depend_on_how_tokens_are_divided(order):
    """And are the numbers 0 to n - 1 in each expert, which one of them gets no token."""
    chosen = choose(np.where(np.arange(6) == 4, -99, logits(37, 6)), Experts(6, top=3)).chosen
    total = counts(chosen, 6)
    whole = positions(chosen, 0 * total, total, order)
    for expert in range(6):
        assert sorted(whole[chosen == expert]) == list(range(total.sum(0)[expert]))
    assert not total[:, 4].any()
    for cuts in (0, 1, 5, 37), (0, 20, 20, 37):
        before = 0 * total
        for start, stop in zip(cuts, cuts[1:]):
            part = chosen[start:stop]
            assert (positions(part, before, total, order) == whole[start:stop]).all()
            before = before + counts(part, 6)
        assert (before == total).all()


# Losses.

def routed(experts: Experts, collapsed: bool) -> ChosenExperts:
    """Eight tokens for each expert; or all tokens for the first experts, with certainty."""
    z = np.tile(np.eye(experts.count), (8, 1)) * 1e-9
    if collapsed:
        z = np.zeros_like(z) + np.where(np.arange(experts.count) < experts.top, 900.0, 0)
    return choose(z, experts)


@pytest.mark.parametrize("convention, top, uniform, collapsed", [
    ("mm3d", 1, 1, 5), ("mm3d", 2, 1, 2.5), ("megatron", 2, 1, 2.5),
    ("megablocks", 2, 0.25, 0.625), ("huggingface", 2, 2, 5), ("deepspeed", 1, 1, 5),
    ("deepspeed", 2, 1, 2.5), ("deepspeed", 3, 1, 5 / 3)])
def test_closed_values_of_the_balance_loss(convention, top, uniform, collapsed):
    """In units of the coefficient, with 4 layers; 1 and E for one choice.

    Guards against a constant loss (huggingface/transformers#28093 and #28255), and against a
    factor k where a convention has none (huggingface/transformers#43775).
    """
    experts = Experts(5, top=top, balance=0.01, convention=convention)
    for expected, alike in (uniform, False), (collapsed, True):
        choice = routed(experts, alike)
        value, _ = balance_loss(choice, counts(choice.chosen, 5), 40, layers=4)
        assert value.shape == (1,) and value.dtype == np.float64
        assert np.isclose(value[0], 0.01 * expected, rtol=1e-7)


def test_deepspeed_counts_first_choices_and_the_others_all():
    total = np.array([[3, 1], [1, 3]])
    assert shares(Experts(2, convention="deepspeed"), total, 4).tolist() == [0.75, 0.25]
    assert shares(Experts(2), total, 4).tolist() == [0.5, 0.5]


@pytest.mark.parametrize("gate", GATES)
def test_losses_against_central_differences(gate):
    """The shares are those of other tokens too, and stay."""
    z, experts = logits(), Experts(COUNT, top=2, gate=gate, balance=0.3)
    total = np.array([[7, 3, 1, 9, 2], [1, 1, 8, 2, 10]])
    value, dz = balance_loss(choose(z, experts), total, 22)
    expected = derivative(
        lambda moved: balance_loss(choose(moved, experts), total, 22)[0][0], z)
    assert np.allclose(dz, expected, atol=1e-9) and np.abs(dz).max() > 1e-3
    p = choose(z, experts).probabilities
    assert np.isclose(value[0], 0.3 * 5 * (total.sum(0) / 44 * p.sum(0) / 22).sum())
    value, dz = z_loss(z, 0.7, 22)
    expected = derivative(lambda moved: z_loss(moved, 0.7, 22)[0][0], z)
    assert np.allclose(dz, expected, atol=1e-8)
    assert np.isclose(value[0], 0.7 / 22 * (np.log(np.exp(z).sum(1)) ** 2).sum())


def test_the_bias_moves_towards_balance():
    bias = updated_bias(np.array([1.0, 1, 1]), np.array([[5, 2, 1], [1, 2, 1]]), 0.125)
    assert bias.tolist() == [0.875, 1, 1.125]    # 6, 4 and 2 tokens; the mean is 4


def test_entropy_of_utilisation():
    assert utilisation_entropy(np.array([[3, 0], [0, 3]])) == 1
    assert utilisation_entropy(np.array([6, 0, 0])) == 0
    assert np.isclose(utilisation_entropy(np.array([2, 2, 0, 0])), 0.5)
    assert utilisation_entropy(np.array([7])) == 1


# Bad options.

@pytest.mark.parametrize("options, message", [
    (dict(count=0), "count=0 should be a whole number of at least 1"),
    (dict(count=2, top=3), "top=3 experts cannot be chosen among count=2: top=2 at most"),
    (dict(count=4, top=1.5), "top=1.5 should be a whole number"),
    (dict(count=4, every=0), "every=0 should"),
    (dict(count=4, gate="top"), "gate='top' is unknown: choose one of switch, mixtral"),
    (dict(count=4, convention="megatorn"), "huggingface; did you mean megatron?"),
    (dict(count=4, order="x"), "order='x' is unknown"),
    (dict(count=4, balance=-1), "balance=-1 should be a number of at least 0"),
    (dict(count=4, z=float("nan")), "z=nan should"),
    (dict(count=4, min_capacity=-1), "min_capacity=-1 should"),
    (dict(count=4, capacity=0), "capacity=0 drops every token: a factor above 0"),
    (dict(count=4, capacity=float("inf")), "capacity=inf"),
    (dict(count=4, convention="huggingface"), "Hugging Face's Mixtral drops no token"),
    (dict(count=4, design={"shared": 8}), "design={'shared': 8} should be mm3d.ExpertDesign(...)"),
])
def test_bad_options_are_refused_in_one_line(options, message):
    with pytest.raises(ValueError) as refused:
        Experts(**options).check()
    assert message in str(refused.value) and "\n" not in str(refused.value)


def test_a_capacity_of_nothing_and_counts_that_overflow_are_refused():
    with pytest.raises(ValueError, match="capacity=0.5 drops every one of 3 tokens .* at least "
                                         "capacity=1.33333"):
        capacity_of(Experts(8, capacity=0.5, convention="megablocks"), 3)
    assert capacity_of(Experts(8, capacity=4 / 3 + 1e-9, convention="megablocks"), 3) == 1
    with pytest.raises(ValueError, match="which overflow 64 bits: at most 4611686018427387903"):
        capacity_of(Experts(8), 2 ** 62)
