"""A judge of steps that any program dumped: right ones pass, and planted faults are named."""
import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import planted
from bench.__main__ import main
from bench.errors import UsageError
from bench.experiments.dump import names
from bench.experiments.dump.causes import explain
from bench.experiments.dump.computation import Way, compute_alone, compute_step
from bench.experiments.dump.dumps import check_same_start, read_dump
from bench.experiments.dump.envelopes import Distance, measure_reference
from bench.experiments.dump.patterns import packed_documents
from bench.experiments.dump.places import LOSS, TensorId, in_order
from bench.experiments.dump.tensor_files import read_tensors
from bench.experiments.dump.verdicts import judge, program_of
from bench.verbs import judge as judge_verb
from planted import write_tensors
from planted_faults import FAULTS as SIMPLE
from reported_faults import REPORTED
from support import ROOT

pytest.importorskip("safetensors", reason="safetensors is not installed")
ALONE = MPI.COMM_SELF
FAULTS = SIMPLE + REPORTED
KINDS = [one.place.kind for one in FAULTS]
FEW = [one for number, one in enumerate(FAULTS) if one.place.kind not in KINDS[:number]]


@pytest.fixture(scope="module")
def shop():
    return planted.make_shop("plain", "float32", ALONE)


@pytest.fixture(scope="module")
def right(shop, tmp_path_factory):
    """A right step in float32, as a dump."""
    return planted.dump_of(shop, shop.finish(shop.step()), tmp_path_factory.mktemp("d") / "right")


@pytest.fixture(scope="module")
def reference(right):
    return measure_reference(right, ALONE, program_of(right))


@pytest.fixture
def copy(right, tmp_path):
    """A copy of its folder, to be spoilt."""
    return Path(shutil.copytree(right.folder, tmp_path / "copy"))


def spoil(folder: Path, file: str, change) -> None:
    path = folder / f"{file}.safetensors"
    tensors = {name: np.array(a) for name, a in read_tensors(path).items()}
    write_tensors(path, change(tensors) or tensors)


@pytest.mark.parametrize("fault", [
    one if one in FEW else pytest.param(one, marks=pytest.mark.slow) for one in FAULTS],
    ids=lambda one: one.what)
def test_a_planted_fault_is_found_at_its_tensor_with_its_cause(fault):
    (found,) = planted.judge_faults([fault], "float32", ALONE)
    first = found.verdict.first
    assert first and first.place == fault.place and fault.cause in found.cause, (first, found)


@pytest.mark.parametrize("what", ["norm's gradient of one shard of the sequence", pytest.param(
    "row-parallel bias added on both ranks", marks=pytest.mark.slow)])
def test_near_the_envelope_no_fit_is_taken_for_the_cause(what):
    """In bfloat16 a factor of 0.8 is nearly as near as what is true."""
    pytest.importorskip("ml_dtypes")
    (fault,) = (one for one in FAULTS if one.what == what)
    (found,) = planted.judge_faults([fault], "bfloat16", ALONE)
    assert found.right_in == "tensor, cause" and found.verdict.first.ratio < 10, found.cause


def test_faults_of_every_kind_of_tensor_are_planted():
    assert {*KINDS} == {"mask", "activation", "loss", "activation gradient", "gradient", "norm",
                        "weight after"} and len(FAULTS) > 45


# Of each type of numbers and each kind of step one; the others are slow.
RIGHT = {("plain", dtype) for dtype in ("float64", "float32", "bfloat16", "float16")} | {
    ("sgd", "bfloat16"), ("llama", "float32")}


@pytest.mark.parametrize("kind, dtype", [
    one if one in RIGHT else pytest.param(*one, marks=pytest.mark.slow)
    for one in product(("plain", "sgd", "dropout", "llama", "mixtral"),
                       ("float64", "float32", "bfloat16", "float16"))])
def test_nothing_of_a_right_step_is_outside(kind, dtype, tmp_path):
    if dtype == "bfloat16":
        pytest.importorskip("ml_dtypes")
    shop = planted.make_shop("plain" if kind == "sgd" else kind, dtype, ALONE)
    if kind == "sgd":    # in 16 bits without masters, which AdamW would need
        model = replace(shop.start.model, master=None)
        shop = replace(shop, optimizer=planted.OPTIMIZERS["sgd"],
                       start=replace(shop.start, model=model))
    dump = planted.dump_of(shop, shop.finish(shop.step()), tmp_path / "dump")
    assert dump.model.dtype == dtype
    verdict = judge(dump, ALONE)
    assert verdict.first is None and not verdict.program.inside, verdict.first
    names_of = {place for place in in_order(dump.family, dump.model)
                if place.kind != "mask" or dump.model.dropout}
    assert {one.place for one in verdict.judged} == names_of and not verdict.left


def test_gelu_by_the_error_function_and_no_biases_are_nanogpts(shop, tmp_path, capsys):
    weights = {name: a * (not name.endswith("bias")) for name, a in shop.start.weights.items()}
    start = replace(shop.start, erf=True, weights=weights)
    name, random = "transformer.h.0.mlp.c_fc.weight", np.random.default_rng(0)
    step, losses = 1e-5 * random.normal(size=weights[name].shape), []
    for sign in (1, -1):
        moved = replace(start, weights={**weights, name: weights[name] + sign * step})
        losses.append(compute_alone(moved)[TensorId(LOSS)])
    exact = compute_alone(start)[TensorId("gradient", name)]
    assert np.isclose(losses[0] - losses[1], 2 * (step * exact).sum(), rtol=1e-6)
    shop = replace(shop, start=start)
    tensors = {place: a * (place.kind != "gradient" or not place.name.endswith("bias"))
               for place, a in shop.step().items()}
    dump = planted.dump_of(shop, shop.finish(tensors), tmp_path / "dump")
    for file in ("weights", "gradients", "weights_after"):
        spoil(dump.folder, file, lambda some: {name: a for name, a in some.items()
                                               if not name.endswith("bias")})
    assert main(["judge", str(dump.folder)]) == 0
    text = capsys.readouterr().out
    assert "15 of 15 gradients" in text and "not judged" not in text, text


def test_a_loss_may_be_scaled_on_its_way_back_if_the_gradients_are_right(right, reference):
    tensors = {place: a * np.float32(1024) if place.kind == "activation gradient" else a
               for place, a in right.tensors.items()}
    verdict = judge(replace(right, tensors=tensors), ALONE, reference)
    assert verdict.first is None and verdict.scale == pytest.approx(1024, 1e-6), verdict.first
    place = TensorId("gradient", "transformer.ln_f.bias")
    verdict = judge(replace(right, tensors=tensors | {place: 1.1 * right.tensors[place]}), ALONE,
                    reference)
    assert verdict.scale == 1 and verdict.first.place.kind == "activation gradient"
    lost = {place: 0 * a if place.kind == "activation gradient" else a
            for place, a in right.tensors.items()}
    first = judge(replace(right, tensors=lost), ALONE, reference).first
    assert first.place == TensorId("activation gradient", "lm_head")


@pytest.mark.parametrize("loss, cause", [
    (lambda own, counts, logits: (own[:3].sum() / counts[:3].sum()
                                  + own[3:].sum() / counts[3:].sum()) / 2,
     "the means of 2 micro-batches or ranks, of the sequences before 3 and the rest"),
    (lambda own, counts, logits: (0.9 * own.sum() - 0.1 * (logits * counts[..., None]).mean(
        -1).sum()) / counts.sum(), "targets that are smoothed by 0.1")])
def test_other_means_of_losses_are_named(right, reference, loss, cause):
    logits = reference.exact[TensorId("activation", "lm_head")]
    logits = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    counts = right.targets != right.model.ignored
    own = -np.take_along_axis(logits, (right.targets * counts)[..., None], -1)[..., 0] * counts
    dump = replace(right, tensors={TensorId(LOSS): np.float32(loss(own, counts, logits))})
    assert cause in explain(dump, judge(dump, ALONE, reference))


def test_activations_of_padding_are_not_judged(right, reference):
    """After the last target that counts programs mask in several ways."""
    place, targets = TensorId("activation", "transformer.h.0"), right.targets.copy()
    targets[2, 11:] = right.model.ignored
    for at, outside in ((11, False), (10, True)):
        a = np.array(right.tensors[place])
        a[2, at] += 1
        padded = replace(right, targets=targets, tensors={place: a})
        verdict = judge(padded, ALONE, reference)
        assert (verdict.first is not None) == outside
        assert verdict.left["padding"] == "activations at 5 positions after the last target"


@pytest.fixture(scope="module")
def packed():
    """Documents packed into sequences, three of them in the first: 7 is the last token of each."""
    shop = planted.make_shop("llama", "float32", ALONE)
    tokens = np.where(shop.start.tokens == 7, 8, shop.start.tokens)
    tokens[0, 4] = tokens[0, 10] = tokens[5, 8] = tokens[6, -1] = 7
    documents = np.cumsum(np.roll(tokens == 7, 1, 1), 1)
    documents[6] = 0    # whose only document ends at the end
    return replace(shop, start=replace(shop.start, tokens=tokens, documents=documents))


def test_packed_documents_are_told_by_their_activations(packed, tmp_path):
    """And what else is wrong is found, where attention inside of each is right."""
    place = TensorId("gradient", "model.layers.1.input_layernorm.weight")
    for factor, first in ((1.0, None), (2.0, place)):
        tensors = packed.change_gradients(place.name, lambda a: factor * a)
        dump = planted.dump_of(packed, tensors, tmp_path / str(factor))
        verdict = judge(dump, ALONE)
        assert (verdict.first and verdict.first.place) == first, verdict.first
        assert "token 7 is between" in verdict.left["attention between documents"]
    assert explain(dump, verdict).startswith("2 times the right one")


def test_shards_that_see_themselves_alone_are_no_documents(packed, tmp_path):
    documents = np.repeat([[0, 1]], 8, 1).repeat(8, 0)
    shop = replace(packed, start=replace(packed.start, documents=documents))
    verdict = judge(planted.dump_of(shop, shop.finish(shop.step()), tmp_path / "dump"), ALONE)
    assert verdict.first.place == TensorId("activation", "model.layers.0") and not verdict.left
    for count, first in (    # any token is before some shard,
            (1, 8), (8, 8),    # the same one where sequences are,
            (8, 1)):    # and one for padding, which a mask hides from others, may begin them all
        tokens = np.arange(16)[None].repeat(count, 0)
        assert packed_documents(tokens, tokens >= first, tokens >= 0) is None


def test_documents_may_begin_with_their_token():
    _, numbers = packed_documents(np.array([[7, 5, 7, 2, 7, 3]]), np.arange(6)[None] > 1,
                                  np.ones((1, 6), bool))
    assert numbers.tolist() == [[0, 0, 1, 1, 2, 2]]


def test_a_packed_document_is_computed_as_if_it_were_alone(packed):
    """Where it begins does not matter to rotary angles."""
    start = replace(packed.start, documents=np.repeat([[0, 1]], [5, 11], 1).repeat(8, 0))
    alone = replace(start, tokens=start.tokens[:, 5:], targets=start.targets[:, 5:],
                    model=replace(start.model, seq=11), documents=None)
    whole, part = (compute_alone(one) for one in (start, alone))
    for name in ("model.layers.1", "lm_head"):
        place = TensorId("activation", name)
        assert np.abs(whole[place][:, 5:] - part[place]).max() <= 1e-13 * abs(part[place]).max()


def test_a_loss_with_the_bits_of_16_was_computed_in_them(right):
    for loss, dtype, found in ((3.015625, "bfloat16", "bfloat16"), (3.0157, "bfloat16", "float32"),
                               (3.015625, "float32", "float32"), (3.0157, "float64", "float64")):
        dump = replace(right, model=replace(right.model, dtype=dtype),
                       tensors={TensorId(LOSS): np.float64(loss)})
        assert program_of(dump).loss == found


def test_orders_of_summation_change_rounding_alone(right):
    exact = compute_alone(right)
    for way in (Way("float64", seed=7), Way("float64", None, 4, 8)):
        for place, a in compute_step(right, way, ALONE).items():
            gap = Distance.between(a, exact[place]).whole
            assert gap <= 1e-13 * np.sqrt((exact[place] ** 2).sum()), place


def test_a_part_of_a_dump_is_judged_and_the_rest_is_not(copy, capsys):
    for file in ("activations", "weights_after", "activation_gradients"):
        (copy / f"{file}.safetensors").unlink()
    spoil(copy, "gradients", lambda some: some.pop("transformer.ln_f.bias") is None)
    assert main(["judge", str(copy)]) == 0
    text = capsys.readouterr().out
    for line in ("not judged: activations: not dumped",
                 "not judged: gradients: 1 of 28 not dumped",
                 "inside: loss inside, 27 of 27 gradients, norm inside"):
        assert line in text, text
    for file in ("gradients", "scalars"):
        (copy / f"{file}.safetensors").unlink()
    assert main(["judge", str(copy)]) == 1 and "nothing was judged" in capsys.readouterr().out


def test_two_dumps_of_a_step_differ_by_rounding_or_not(right, copy, capsys):
    assert main(["judge", str(right.folder), "--against", str(copy)]) == 0
    assert "their difference is rounding" in capsys.readouterr().out
    spoil(copy, "gradients", lambda some: some["transformer.h.0.ln_1.bias"].fill(0))
    assert main(["judge", str(right.folder), "--against", str(copy)]) == 1
    text = capsys.readouterr().out
    assert "FIRST OUTSIDE: gradient transformer.h.0.ln_1.bias" in text
    assert text.endswith("outside the envelope is copy\n")


def test_copies_of_other_ranks_that_differ_are_judged(copy, capsys):
    name = "transformer.h.1.ln_1.bias"
    spoil(copy, "gradients", lambda some: some.update({f"{name}@3": 2 * some[name]}))
    assert main(["judge", str(copy)]) == 1
    text = capsys.readouterr().out
    assert f"FIRST OUTSIDE: gradient {name} of rank 3" in text and "2 times the right" in text
    spoil(copy, "weights_after", lambda some: some.update({f"{name}@two": some[name]}))
    with pytest.raises(UsageError, match="NAME@RANK would do"):
        read_dump(copy)
    spoil(copy, "weights", lambda some: some.update({f"{name}@3": 2 * some[name]}))
    for file in ("weights", "model"):
        (copy / "weights.safetensors").rename(copy / f"{file}.safetensors")
        with pytest.raises(UsageError, match="weights of rank 3 before the step are not those of"):
            read_dump(copy)


def update(folder: Path, file: str = "dump", **about) -> None:
    path = folder / f"{file}.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | about))


@pytest.mark.parametrize("settings", [
    {"decayed": ["transformer.wpe.weight", "transformer.h.0.mlp.c_fc.weight"]}, {"clip": None},
    {"weight_decay": None}])
def test_settings_of_optimizers_are_those_that_programs_have(settings, tmp_path):
    """Weights that decay by name; clip / norm without 1e-6; PyTorch's decay if none is said."""
    shop = planted.make_shop("sgd", "float64", ALONE)
    if "clip" not in settings:
        shop = replace(shop, optimizer=planted.OPTIMIZER)
    step = shop.step()
    norm = np.sqrt(sum((a ** 2).sum() for a in shop.gradients(step).values()))
    used = {"clip": {"clip": 0.1 * (1 + 1e-6 / norm)},
            "weight_decay": {"weight_decay": 0.01}}.get(*settings, {})
    tensors = shop.finish(step, **used)
    tensors |= {place: a for place, a in shop.finish(step, weight_decay=0.0).items()
                if place.kind == "weight after" and place.name not in settings.get(
                    "decayed", [place.name])}
    dump = planted.dump_of(shop, tensors, tmp_path / "dump")
    if "clip" not in settings:
        optimizer = {**shop.optimizer, **settings}
        update(dump.folder, optimizer=optimizer)
    tensors = {place: a for place, a in read_dump(dump.folder).tensors.items()
               if place.kind in ("gradient", "weight after")}
    verdict = judge(replace(read_dump(dump.folder), tensors=tensors), ALONE)
    assert verdict.first is None, verdict.first
    assert "weights after" not in verdict.left


def test_frozen_weights_are_not_in_the_norm_and_stay(copy, shop, right, reference):
    name = "transformer.h.0.mlp.c_fc.weight"
    spoil(copy, "gradients", lambda some: some.pop(name) is None)
    own = read_tensors(copy / "gradients.safetensors")
    norm = np.sqrt(sum((np.float64(a) ** 2).sum() for a in own.values()))
    spoil(copy, "scalars", lambda some: some.update(norm=np.float32(norm)))
    lost = {TensorId("gradient", one): np.float64(a) for one, a in own.items()}
    lost[TensorId("gradient", name)] = np.zeros_like(right.weights[name])
    after = {place.name: np.float32(a) for place, a in shop.finish(lost).items()
             if place.kind == "weight after"}
    spoil(copy, "weights_after", lambda some: {**after, name: right.weights[name]})
    update(copy, skipped=[name])
    verdict = judge(read_dump(copy), ALONE, reference)
    assert verdict.first is None and not verdict.left, (verdict.first, verdict.left)
    spoil(copy, "weights_after", lambda some: after)
    assert judge(read_dump(copy), ALONE, reference).first.place == TensorId("weight after", name)


@pytest.mark.parametrize("about, message", [
    ({"n_layer": 10 ** 12}, "layers=1000000000000, but only 28 tensors are there"),
    ({"n_head": 5}, "hidden=24 cannot be divided among heads=5"),
    ({"layer_norm_epsilon": "x"}, "epsilon='x' should be a number above 0"),
    ({"optimizer": {"rate": 1}}, "rate is unknown: dropout, dtype, "),
    ({"optimizer": {"name": "adam", "lr": 1}}, "name = 'adam': adamw or sgd would do"),
    ({"optimizer": {"name": "sgd"}}, "the optimizer has no lr: a number of at least 0"),
    ({"optimizer": {"name": "sgd", "lr": "1"}}, "lr = '1': a number of at least 0 would do"),
    ({"optimizer": {"name": "adamw", "lr": 1, "betas": [0.9, 1]}}, "two numbers of at least 0"),
    ({"optimizer": {"name": "adamw", "lr": 1, "decayed": ["no.weight"]}}, "'no.weight', which is"),
    ({"optimizer": "adamw"}, "optimizer = 'adamw': an object with name and lr would do"),
    ({"ranks": {"data": 0}}, "ranks = {'data': 0}: an object such as {\"data\": 2}, of"),
    ({"ranks": {"dp": 2}}, "ranks = {'dp': 2}: an object such as {\"data\": 2}, of data, tensor"),
    ({"dropout": 1.0}, "dropout = 1.0: a number of at least 0 and below 1 would do"),
    ({"dtype": "int8"}, "dtype = 'int8': float64, float32, float16, bfloat16 would do"),
    ({"unseen": "text"}, "unseen = 'text': a list of texts would do")])
def test_what_a_dump_says_of_model_and_step_is_checked(copy, about, message):
    config = json.loads((copy / "config.json").read_text())
    update(copy, "config" if about.keys() <= config.keys() else "dump", **about)
    with pytest.raises(UsageError, match=re.escape(message)):
        read_dump(copy)


@pytest.mark.parametrize("file, change, message", [
    ("weights", lambda some: some.pop("transformer.ln_f.bias") is None,
     "weight 'transformer.ln_f.bias' is missing"),
    ("weights", lambda some: some.update({"wte.weight": some["transformer.wte.weight"]}),
     "'transformer.wte.weight' and 'wte.weight' are the same tensor"),
    ("weights", lambda some: {name: a.astype("int32") for name, a in some.items()},
     "one type of float64, float32, float16, bfloat16 would do"),
    ("gradients", lambda some: some.update({"transformer.ln_f.bias": np.zeros(3, "f4")}),
     "'transformer.ln_f.bias' has the shape \\(3,\\), not \\(24,\\)"),
    ("gradients", lambda some: some.update({"other.bias": np.zeros(3, "f4")}),
     "'gradient transformer.other.bias' is not in this model: --names would do"),
    ("weights", lambda some: some["transformer.wte.weight"].fill(np.nan),
     "'transformer.wte.weight' has elements that are infinite or not a number"),
    ("batch", lambda some: some["tokens"].fill(50), "tokens\\[0, 0\\] = 50 is out of range"),
    ("batch", lambda some: some.pop("targets") is None, "batch.safetensors has no targets")])
def test_bad_dumps_are_refused_in_a_line(copy, file, change, message):
    spoil(copy, file, change)
    with pytest.raises(UsageError, match=message) as caught:
        read_dump(copy)
    assert str(copy) in str(caught.value) and "\n" not in str(caught.value)


def test_files_that_are_no_dump_are_refused(copy, tmp_path):
    path = copy / "gradients.safetensors"
    data = path.read_bytes()
    for bad, message in (
            (data[:-5], "not fully covered; a whole file"), (b"text", "cannot be read: "),
            (data.replace(b'"F32"', b'"F31"'), "unknown variant `F31`"),
            (data.replace(b"h.0.ln_1.bias", b"h.1.ln_1.bias"),
             "invalid offset for tensor .* with each name once, would do")):
        path.write_bytes(bad)
        with pytest.raises(UsageError, match=message):
            read_dump(copy)
    path.unlink()
    path.mkdir()
    with pytest.raises(UsageError, match="gradients.safetensors is no file"):
        read_dump(copy)
    (copy / "batch.safetensors").unlink()
    with pytest.raises(UsageError, match="batch.safetensors is missing"):
        read_dump(copy)
    (copy / "config.json").write_text('{"a":' * 100_000)
    with pytest.raises(UsageError, match="recursion"):
        read_dump(copy)
    with pytest.raises(UsageError, match="none is not there: give .* says what a dump has"):
        read_dump(tmp_path / "none")


def test_dumps_of_other_weights_or_tokens_are_not_compared(right, copy):
    spoil(copy, "weights", lambda some: some["transformer.wpe.weight"].fill(0))
    with pytest.raises(UsageError, match="different weights .* 'transformer.wpe.weight'"):
        check_same_start(right, read_dump(copy))
    spoil(copy, "batch", lambda some: some["tokens"].fill(0))
    with pytest.raises(UsageError, match="different tokens"):
        check_same_start(right, read_dump(copy))
    with pytest.raises(UsageError, match="different models: GELU by the error function, and by"):
        check_same_start(right, replace(right, erf=True))


def test_dumps_with_other_masks_tell_nothing_of_each_other(right):
    place, nothing = TensorId("mask", "transformer.drop"), SimpleNamespace(first=None, judged=[])
    one, other = ((replace(right, tensors={place: mask}), nothing)
                  for mask in np.eye(2, dtype=bool))
    assert judge_verb.tell_both(one, other)[0].startswith("dropout took other elements in either")
    assert judge_verb.tell_both(one, one) == ["the two dumps have no tensor in common"]


# --- Names ------------------------------------------------------------------------------------

def inverse(a, how, heads, head):
    """Arrange a tensor of Hugging Face's as another program does."""
    for one in reversed(how):
        if one == "transposed":
            a = np.swapaxes(a, 0, 1)
        elif one == "heads":
            a = np.swapaxes(a.reshape(3, heads, head, *a.shape[1:]), 0, 1).reshape(a.shape)
        else:
            a = np.swapaxes(a.reshape(-1, 2, head // 2, *a.shape[1:]), 1, 2).reshape(a.shape)
    return a


@pytest.mark.parametrize("table, kind", [("nanogpt", "plain"), ("megatron-core", "plain"),
                                         ("torchtitan", "llama"), ("own.toml", "plain")])
def test_other_programs_have_other_names_and_arrangements(table, kind, tmp_path):
    shop = planted.make_shop(kind, "float32", ALONE)
    dump = planted.dump_of(shop, shop.finish(shop.step()), tmp_path / "dump")
    if table == "own.toml":
        table = str(tmp_path / table)
        Path(table).write_text('"blocks.{}.norm.bias" = "transformer.h.{}.ln_1.bias"\n'
                               '"fc" = ["transformer.h.1.mlp.c_fc.weight", "transposed"]\n')
    rules, heads = names.find_rules(table, dump.family), dump.model.heads
    for path in dump.folder.glob("*.safetensors"):
        found = {}
        for name, a in read_tensors(path).items():
            for rule in rules:
                pattern = rule.name.replace("{}", "#")
                number = next((str(n) for n in range(2) if pattern.replace("#", str(n)) == name),
                              None)
                if number is not None:
                    parts = rule.pattern.pattern.replace(r"(\d+)", number).replace("\\", "")
                    name, a = f"module.{parts}", inverse(a, rule.arranged, heads,
                                                         dump.model.hidden // heads)
                    break
            found[name] = np.array(a, order="C")    # which leaves a scalar one
        write_tensors(path, found)
    again = read_dump(dump.folder, table)
    if table != "nanogpt":
        with pytest.raises(UsageError):
            read_dump(dump.folder)
    assert again.tensors.keys() == dump.tensors.keys()
    for place, a in dump.tensors.items():
        assert np.array_equal(again.tensors[place], a), place
    assert all(np.array_equal(again.weights[name], a) for name, a in dump.weights.items())


def test_one_tensor_may_be_several_of_hugging_face():
    """Groups of queries with their key and value, two products up, and all experts."""
    random = np.random.default_rng(0)
    q, k, v = (random.random((heads, 3, 5)) for heads in (4, 2, 2))
    layer, sizes = "model.layers.7", (2, 3)
    fused = np.concatenate([q[:2], k[:1], v[:1], q[2:], k[1:], v[1:]]).reshape(-1, 5)
    rules = names.find_rules("megatron-core", "llama")
    found = [*names.translate("module.decoder.layers.7.self_attention.linear_qkv.weight", fused,
                              rules, sizes)]
    assert [name for name, _, _ in found] == [
        f"{layer}.self_attn.{one}_proj.weight" for one in "qkv"]
    assert all(np.array_equal(part, a.reshape(-1, 5)) for (_, _, part), a in zip(
        found, (q, k, v), strict=True))
    rows, one = {"q": (4,), "k": (2,), "v": (2,)}, names.NameRule(re.compile("qkv"), "q k v", ())
    found = [*names.translate("qkv", np.arange(8), [one], sizes, rows)]
    assert [part.tolist() for _, _, part in found] == [[0, 1, 2, 3], [4, 5], [6, 7]]
    rules = names.find_rules("transformers", "mixtral")
    up = random.random((3, 4, 5))
    found = [*names.translate("model.layers.7.mlp.experts.gate_up_proj", up, rules, sizes)]
    assert [name for name, _, _ in found] == [
        f"{layer}.block_sparse_moe.experts.{expert}.{one}.weight" for expert in range(3)
        for one in ("w1", "w3")]
    assert np.array_equal(np.concatenate([part for _, _, part in found]), up.reshape(-1, 5))


@pytest.mark.ranks(2)
def test_a_rank_that_sees_no_dump_lets_no_other_wait(comm, right):
    folder = "none" if comm.rank else str(right.folder)
    with pytest.raises(UsageError, match=r"^none is not there.*\(1 of 2 ranks\)$"):
        judge_verb.run(SimpleNamespace(dumps=[folder], against=None, names="huggingface"), comm)


def test_names_that_make_no_sense_are_refused(tmp_path):
    for text, message in (('\ufeff"a.{}" = "b"', "as many {} on both"), ("=", "TOML"),
                          ('a = ["b", "upside-down"]', "heads, pairs, experts"),
                          ("a = 1", "no object of names")):
        (tmp_path / "own.toml").write_text(text)
        with pytest.raises(UsageError, match=message):
            names.find_rules(str(tmp_path / "own.toml"))
    with pytest.raises(UsageError, match="no such file; a table, huggingface, transformers,"):
        names.find_rules("nemo")


TORCH = '''
import sys
sys.path.insert(0, {tools!r})
import torch
from torch_steps import Dump, Model, configuration, sizes
words = "l2 h8 n2 v11 t5 b4 erf".split()
size = sizes(words)
model, text = Model(words, size), torch.randint(0, 11, (4, 6))
config = configuration(words, size) | dict(activation_function="gelu")
tokens, targets = text[:, :-1].contiguous(), text[:, 1:].contiguous()
dump = Dump({out!r}, model, config, tokens, targets)
loss = torch.nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten())
loss.backward()
{fault}
dump.after_backward(loss)
norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1).step()
dump.after_step(dict(name="adamw", lr=1e-3, weight_decay=0.1, clip=0.5), norm)
'''


@pytest.mark.parametrize("fault, first", [("", None), (
    "model.transformer.h['0'].mlp.c_fc.bias.grad *= 2", "transformer.h.0.mlp.c_fc.bias"), (
    "model.transformer.h['0'].mlp.c_fc.bias.grad = None", "transformer.h.0.mlp.c_fc.bias")])
def test_a_step_of_pytorch_is_dumped_and_judged(fault, first, tmp_path):
    """By the interpreter that MM3D_TORCH names, if this one has no PyTorch."""
    python = os.environ.get("MM3D_TORCH", sys.executable)
    if subprocess.run([python, "-c", "import torch, safetensors"], capture_output=True).returncode:
        pytest.skip("no PyTorch with safetensors: name an interpreter in MM3D_TORCH")
    text = TORCH.format(tools=str(ROOT / "tests" / "tools"), out=str(tmp_path / "dump"),
                        fault=fault)
    done = subprocess.run([python, "-c", text], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    dump = read_dump(tmp_path / "dump", "nanogpt")
    verdict = judge(dump, ALONE)
    assert not json.loads((tmp_path / "dump" / "dump.json").read_text())["unseen"]
    assert not verdict.left and (verdict.first and verdict.first.place.name) == first
