"""Envelopes of the judge: their false alarms, what roundings are imitated, and several ranks."""
import shutil
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import planted
from bench.__main__ import parser
from bench.experiments.dump.computation import compute_alone
from bench.experiments.dump.envelopes import (ALARMS, SAMPLES, Distance, exceeded, measure_norm,
                                              measure_reference, sample_error)
from bench.experiments.dump.places import LOSS, TensorId
from bench.experiments.dump.roundings import Program, Rounder, _round_angles, imitate
from bench.experiments.dump.verdicts import judge
from mm3d.model.rotary import frequencies
from support import run_ranks

pytest.importorskip("safetensors", reason="safetensors is not installed")
ALONE = MPI.COMM_SELF


@pytest.mark.parametrize("elements, shared, level", [
    (1, 0.0, 0.02), (30, 0.0, 0.1), (30, 0.95, 0.02), (300, 0.5, 0.1)])
def test_normal_errors_exceed_an_envelope_about_as_often_as_it_says(elements, shared, level):
    """Also where elements share most of their error, or a few have most of it."""
    random, alarms, trials = np.random.default_rng(elements), np.zeros(2), 400
    scale = np.geomspace(1, 1e-2, elements)
    for _ in range(trials):
        own = random.normal(size=(SAMPLES + 1, elements))
        errors = scale * ((1 - shared) ** 0.5 * own
                          + shared ** 0.5 * random.normal(size=(SAMPLES + 1, 1)))
        bound = exceeded([sample_error(one, np.zeros(elements)) for one in errors[1:]], level)
        new = Distance.between(errors[0], 0.0)
        alarms += [new.whole > bound.whole, new.largest > bound.largest]
    spread = 4 * (level * (1 - level) / trials) ** 0.5
    assert (alarms / trials <= level + spread).all(), alarms
    assert ALARMS <= 1e-3


def test_an_error_of_zero_everywhere_has_an_envelope_of_zero():
    nothing = sample_error(np.zeros(3), np.zeros(3))
    assert exceeded([nothing] * SAMPLES, 1e-3) == Distance()


@pytest.mark.parametrize("dtype, unit", [
    ("float32", 2.0 ** -24), ("bfloat16", 2.0 ** -8), ("float16", 2.0 ** -11)])
def test_a_rounding_is_half_a_unit_at_most_and_zeros_stay(dtype, unit):
    a = np.ones((100, 64))
    a[:, 0] = 0
    error = Rounder(dtype, 1)(a.copy(), 1) - a
    assert not error[:, 0].any() and 0.9 * unit < np.abs(error).max() <= 1.01 * unit
    assert np.std(error) < np.std(Rounder(dtype, 1)(a.copy(), 4) - a) < 2.1 * np.std(error)


@pytest.mark.parametrize("kind", ["plain", "llama", "mixtral"])
def test_with_the_least_roundings_an_imitated_step_is_the_exact_one(kind):
    """Its attention is written again, beside the library's."""
    start = planted.make_shop(kind, "float32", ALONE).start
    exact = compute_alone(start)
    found = compute_alone(start, lambda gpt: imitate(gpt, Program(*3 * ["longdouble"]), 0))
    for place, a in found.items():
        assert np.abs(a - exact[place]).max() <= 1e-13 * np.abs(exact[place]).max(), place


def test_envelopes_are_as_wide_as_the_type_and_grow_with_ranks():
    start = planted.make_shop("plain", "float32", ALONE).start
    place, loss = TensorId("activation", "transformer.h.1"), TensorId(LOSS)
    wide, narrow, many = (measure_reference(start, ALONE, Program(*how)).spread for how in (
        ("float32", "float32"), ("bfloat16", "float32"),
        ("bfloat16", "float32", "float32", {"tensor": 64})))
    assert 2 ** 12 < narrow[place].whole / wide[place].whole < 2 ** 17
    assert 1.5 < many[place].whole / narrow[place].whole < 6
    assert narrow[loss].whole > 100 * wide[loss].whole


def test_the_gradient_of_one_chosen_expert_s_gate_is_zero_but_for_rounding():
    start = planted.make_shop("mixtral", "float32", ALONE).start
    start = replace(start, model=replace(start.model, experts=replace(
        start.model.experts, top=1)))
    found = measure_reference(start, ALONE)
    place = TensorId("gradient", "model.layers.1.block_sparse_moe.gate.weight")
    size = found.exact[TensorId("gradient", "model.layers.1.input_layernorm.weight")]
    assert not found.exact[place].any() and 0 < found.spread[place].whole < 1e-5 * abs(size).max()


def single(angles_of_one_step, positions):
    """Angles as a program computes them in float32 throughout."""
    return np.outer(np.float32(np.arange(positions)), angles_of_one_step)


def test_angles_are_off_as_those_of_float32_and_more_at_later_positions():
    half, positions = np.arange(0, 64, 2, dtype="float32") / 64, np.arange(2000)
    exact = np.outer(positions, frequencies(planted.LLAMA, 64))
    turns = SimpleNamespace(head=64, cos=np.cos(exact), sin=np.sin(exact))
    _round_angles(turns, planted.LLAMA, Rounder("float32", 1))
    off = np.hypot(turns.cos - np.cos(exact), turns.sin - np.sin(exact))
    real = np.float64(single(1 / np.float32(1e4) ** half, len(positions))) - exact
    assert not off[0].any() and not off[:, 0].any()
    for late in (slice(50, 100), slice(1000, 2000)):
        size = np.sqrt(np.square(off[late]).mean())
        assert size / 3 < np.sqrt(np.square(real[late]).mean()) < size


@pytest.mark.parametrize("part", ["angles", pytest.param("norms", marks=pytest.mark.slow)])
def test_a_step_in_float64_may_have_parts_in_float32(part, tmp_path):
    """As transformers has them."""
    shop = planted.make_shop("llama", "float64", ALONE)

    def look(gpt):
        layers = [one for block in gpt.chunks[0].layers.layers for one in block.layers]
        for one in layers:
            if part == "norms" and type(one).__name__ == "RMSNorm":
                one.forward = lambda x, *more, once=one.forward: once(
                    np.float64(np.float32(x)), *more)
        turns = next(one.turns for one in layers if hasattr(one, "turns"))
        if part == "angles":
            angles = single(np.float32(frequencies(planted.LLAMA, turns.head)), len(turns.cos))
            turns.cos[...], turns.sin[...] = np.cos(angles), np.sin(angles)
    tensors = shop.finish(shop.step(look=look))
    verdict = judge(planted.dump_of(shop, tensors, tmp_path / "right"), ALONE)
    assert verdict.first is None and verdict.program.inside == "float32", verdict.first


def test_a_norm_in_16_bits_may_be_off_by_four_roundings():
    pytest.importorskip("ml_dtypes")
    from bench.experiments.dump.tensor_files import number_type
    exact, error = measure_norm({"a": np.full(100, 3, number_type("bfloat16"))})
    assert exact == 30 and 4 * 2 ** -8 < error.whole / 30 < 4.1 * 2 ** -8


@pytest.fixture(scope="module")
def dumps(tmp_path_factory):
    """A right step and a wrong one."""
    folder = tmp_path_factory.mktemp("dumps")
    shop = planted.make_shop("llama", "float32", ALONE)
    step = shop.step()
    planted.dump_of(shop, shop.finish(step), folder / "right")
    planted.dump_of(shop, shop.half("model.layers.1.input_layernorm.weight", 1), folder / "wrong")
    return folder


# The status of a command, and then the one of what is refused.
BOTH = """
import sys
from bench.__main__ import main
bad, *words = sys.argv[1:]
assert main(words) == 1
sys.exit(main([*words[:-1], bad]))
"""


@pytest.mark.limit(300)
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_ranks_say_once_what_one_says(ranks, dumps, capfd):
    """The same words, with the cause; and bad input is refused once."""
    (bad := dumps / f"bad{ranks}").mkdir()
    for name in ("config.json", "weights.safetensors"):
        shutil.copy(dumps / "right" / name, bad)
    command = ["judge", str(dumps / "wrong")]
    arguments = parser(command[:1]).parse_args(command)
    status = arguments.verb_file.run(arguments, ALONE)
    found = run_ranks(ranks, "-c", BOTH, str(bad), *command)
    assert (found.stdout, found.stderr.partition("error: ")[0]) == capfd.readouterr()
    assert status and "FIRST OUTSIDE" in found.stdout
    assert found.returncode and found.stderr.count("batch.safetensors is missing") == 1
