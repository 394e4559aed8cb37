"""Costs of layers beside those in print, rules of thumb beside the planner, and a map."""
from dataclasses import replace

import pytest
from msgspec import structs

from bench.__main__ import main
from bench.errors import UsageError
from bench.prediction.machine_model import load_machine
from bench.prediction.meshes.kind_map import BOX, LINE, map_kinds
from bench.prediction.meshes.layer_costs import (MOST_RANKS, count_pair, list_costs,
                                                 list_layer_costs)
from bench.prediction.meshes.rules_of_thumb import SIMPLE, check_rules, fitting_tensor, load_rules
from bench.prediction.model_file import ModelFile, load_model
from bench.prediction.training_plans import search
from bench.prediction.training_plans.choices import Training
from bench.prediction.training_plans.search import Search
from bench.reports.formats import render
from bench.reports.plans.layer_costs import layer_costs_parts
from mm3d import Architecture, Experts, ModelSizes
from mm3d.model import cost
from mm3d.schemes import find_scheme
from mm3d.schemes.closed_form import ProductShape
from support import status_of

SIZES = ModelSizes(layers=1, hidden=64, heads=8, batch=8, seq=8)
PAIR = ModelSizes(layers=1, hidden=64, heads=4, batch=16, seq=16)    # of linear layers, 64 ranks


@pytest.fixture(scope="module")
def found():
    return {one.scheme: one for one in list_layer_costs(8, SIZES)[0]}


@pytest.fixture(scope="module")
def pair():
    return {one.scheme: one for one in list_costs(64, PAIR)[0]}


def test_words_of_all_ranks_are_those_of_the_closed_form(found):
    assert found.keys() >= {"1d", "1d-sp", "2.5d", "3d", "faces", "3d keep=both"}
    for text, one in found.items():
        name, *options = text.split()
        form = cost.words(name, one.grid, SIZES, **dict(option.split("=") for option in options))
        assert one.counted["words"].sum() == sum(
            sum(words.values()) for words in form.values()), text


def test_faces_have_as_many_times_the_mean_as_the_grid_is_wide(found):
    """Of what is stored and done element by element; balanced blocks are equal but for vectors."""
    for count in ("parameters", "activations", "elementwise"):
        faces, cube = (found[name].counted[count] for name in ("faces", "3d"))
        assert faces.argmax() == 0 and 1.9 < faces.max() / faces.mean() < 2.1, count
        assert cube.max() < 1.05 * cube.mean(), count
    assert found["faces"].counted["parameters"].sum() == cost.parameters(SIZES)
    assert (found["faces"].counted["parameters"] == 0).sum() == 4    # of the other layer of x


def test_what_print_says_of_a_layer_and_what_it_lacks(found):
    assert found["1d"].counted["words"].mean() == found["1d"].printed["words"]
    weights = 12 * SIZES.hidden ** 2
    assert found["2.5d"].printed["parameters"] == weights / 4
    # Both layers sum weights' gradients, and those of vectors in each row of ranks.
    assert 8 * found["2.5d"].lacking == 2 * (weights + 2 * 13 * SIZES.hidden)
    text = " ".join(render(layer_costs_parts(list(found.values()), ["2d: no square"], 8,
                                             SIZES)).split())
    assert "are the sums of gradients over depth, which print lacks" in text
    assert "faces: unequal, the largest over the mean is" in text
    assert "4 of 8 ranks have no parameters" in text and "Left out: 2d: no square." in text
    assert "3d: unequal" not in text


def test_too_many_ranks_are_left_out():
    found, missing = list_layer_costs(MOST_RANKS + 1, SIZES)
    assert not found and str(MOST_RANKS) in missing[0]
    assert "Left out: a Transformer layer" in render(layer_costs_parts(
        found, missing, MOST_RANKS + 1, SIZES))


def ratios(one):
    return {cost: one.counted[cost] / one.printed[cost] for cost in one.counted}


def test_counted_words_are_the_closed_forms(pair):
    M, h = PAIR.tokens, PAIR.hidden
    for text, one in pair.items():
        name, *options = text.split()
        options = dict(option.split("=") for option in options)
        moves = [move for shape in (("up", M, h, 4 * h), ("down", M, 4 * h, h)) for half in
                 find_scheme(name).product_moves(one.grid, ProductShape(*shape), **options)
                 for move in half]
        assert 64 * one.counted["words"] == sum(move.words for move in moves), text


def test_where_print_is_right(pair):
    for one in pair.values():
        assert ratios(one)["flops"] == ratios(one)["parameters"] == 1
    assert ratios(pair["1d"])["words"] == ratios(pair["1d"])["messages"] == 1
    for name in ("2d", "2.5d", "3d"):
        assert ratios(pair[name])["activations"] == 1
    assert ratios(pair["2d"])["messages"] == 1
    both = ratios(pair["3d keep=both"])
    assert both["words"] == both["messages"] == 1


def test_where_print_is_wrong(pair):
    """2-D by q; 2.5-D by q but for the sum over depth; 3-D unless gathered operands are kept."""
    q = d = 4
    M, h, P = PAIR.tokens, PAIR.hidden, 64
    A, B = 5 * M * h, 2 * 4 * h * h    # both layers' inputs, and both weights
    assert ratios(pair["2d"])["words"] == 1 / 8
    assert pair["2.5d"].counted["words"] * q == pytest.approx(
        pair["2.5d"].printed["words"] + q * 2 * (d - 1) * B / P)
    assert pair["2.5d"].counted["messages"] == 2 * (6 * (q - 1) + 2 * (d - 1))
    assert pair["3d"].counted["words"] == (q - 1) * (3 * A + 3 * B + 2 * A) / P
    assert ratios(pair["3d"])["messages"] == 8 / 6
    assert pair["3d keep=both"].counted["activations"] == (A * q + B * q) / P
    assert pair["1d"].counted["activations"] == M * h + 4 * M * h / P


def test_depth_one_leaves_nothing_out():
    grid = find_scheme("2.5d").grid_shape((2, 2, 1))
    counted = count_pair("2.5d", grid, PAIR, {})
    assert counted == count_pair("2d", find_scheme("2d").grid_shape((2, 2)), PAIR, {})


H100 = load_machine("dgx-h100")
TINY = '''name = "tiny"
layers = 2
hidden = 64
heads = 4
vocab = 100
seq = 16
'''
RULE = '''title = "Rules"
source = "made up"
batches = "made up"
[[rules]]
size = "tiny"
model = "{model}"
tensor = {tensor}
stages = 2
data = 2
gpus = 8
batch = {batch}
'''


LLAMA = """[architecture]
norm = "rms"
kv_heads = 4
perceptron = "swiglu"
inner = 96
biases = "none"
"""


@pytest.fixture
def rules(tmp_path):
    def write(tensor="[2]", batch=8, layers="", model="") -> str:
        (tmp_path / "tiny.toml").write_text(TINY + layers)
        path = tmp_path / "rules.toml"
        path.write_text(RULE.format(model=model or tmp_path / "tiny.toml", tensor=tensor,
                                    batch=batch))
        return str(path)
    return write


def test_a_model_that_is_unknown_is_named_before_the_first_search(rules, capsys):
    path = rules(model="llama-2-71b")
    assert status_of(main, ["plan", "--rules", path, "--machine", "dgx-h100"]) == 2
    said = capsys.readouterr()
    assert "'llama-2-71b' is unknown" in said.err and "did you mean llama-2-7" in said.err
    assert not said.out


def test_what_the_supplied_rules_contradict():
    lines = [line for rule in load_rules("overview").rules for line in rule.contradictions]
    assert [line.partition(" GPUs")[0] for line in lines] == [
        "7B: TP 2 x PP 1 x DP 8 is 16", "70B: TP 8 x PP 4 x DP 8 is 256"]


def test_the_tree_takes_as_many_ranks_as_the_state_needs(rules, tmp_path):
    rules()
    found = {name: fitting_tensor(load_model(name), "float16", H100) for name in (
        str(tmp_path / "tiny.toml"), "llama-2-7b", "llama-2-13b", "llama-2-70b", "gpt-3-175b")}
    assert [*found.values()] == [1, 2, 4, 8, 8]


def test_rules_have_their_mesh_and_layers_and_the_planner_is_the_fastest(rules, monkeypatch):
    """Their searches predict no plan twice, and find what each finds alone."""
    predicted, predict = [], search.predict_step

    def counting(model, machine, **how):
        predicted.append((model, how["inside"]))
        return predict(model, machine, **how)
    monkeypatch.setattr(search, "predict_step", counting)
    (found,) = check_rules(load_rules(rules("[2, 4]", layers=LLAMA)), H100, "float16")
    assert len(predicted) == len({*predicted}) > 20
    alone = Search(found[3].training).run(compares=False).best
    assert (alone.choice, alone.seconds) == (found[3].plan.choice, found[3].plan.seconds)
    for one in found:
        architecture = one.plan.model.stack.architecture
        assert architecture.kv_heads == 4 and architecture.perceptron == "swiglu"
    assert [one.by for one in found] == ["TP 2, plain", "TP 2", "TP 4, plain", "TP 4",
                                         "tree, TP 1", "planner"]
    for one, (tensor, data) in zip(found, ((2, 2), (2, 2), (4, 1), (4, 1))):
        choice = one.plan.choice
        assert (choice.places, choice.stages, choice.data) == (tensor, 2, data)
        assert choice.scheme in ("1d", "1d-sp") and one.lacks == 0
    plain = found[0].plan.choice
    assert {name: getattr(plain, name) for name in SIMPLE} == SIMPLE
    tree = found[4].plan.choice
    assert (tree.places, tree.stages, tree.data) == (1, 1, 8)
    assert found[1].plan.seconds < found[0].plan.seconds
    assert found[5].plan.seconds <= min(one.plan.seconds for one in found)


def test_searches_share_the_layers_of_one_model_alone():
    asked = Training(load_model("llama-2-7b"), 8, 16, 4096, "float16", H100)
    slow = structs.replace(H100.network, bytes_per_second=1e9)
    shared = Search(replace(asked, gpus=4, batch=8, machine=structs.replace(
        H100, network=slow))).layers
    assert Search(asked, layers=shared).layers is shared
    for other in (dict(gpt=load_model("llama-2-13b")), dict(seq=2048), dict(dtype="bfloat16"),
                  dict(machine=structs.replace(H100, kernels="own"))):
        with pytest.raises(ValueError, match="layers of another model, seq, dtype or machine"):
            Search(replace(asked, **other), layers=shared)


def test_the_verb_says_why_a_rule_has_no_plan(rules, capsys):
    assert main(["plan", "--rules", rules(batch=9), "--machine", "dgx-h100"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "no plan, see below" in said and "tiny, TP 2: --gpus 8 --batch 9 --model tiny" in said
    assert "tiny, TP 2, plain: tiny on 8 GPUs: no such mesh divides the batch of 9" in said


def test_a_rule_of_no_stage_is_refused(rules, tmp_path):
    path = rules()
    text = (tmp_path / "rules.toml").read_text().replace("stages = 2", "stages = 0")
    (tmp_path / "rules.toml").write_text(text)
    with pytest.raises(UsageError, match="tiny: stages = 0: a whole number of at least 1"):
        load_rules(path)


TINY_GPT = ModelFile("tiny", 4, 64, 4, 100, 16, tied=False)
ASKED = Training(TINY_GPT, 1, 2, 16, "float16", H100)
RATES = [1e9, H100.network.bytes_per_second, 1e13]


@pytest.fixture(scope="module")
def places():
    return [*map_kinds(ASKED, [8, 16], RATES)]


def test_a_map_has_the_fastest_plan_of_each_kind(places):
    assert [(one.gpus, one.rate) for one in places] == [
        (gpus, rate) for gpus in (8, 16) for rate in RATES]
    for one in places:
        line, box = one.best[LINE], one.best[BOX]
        assert line.choice.scheme in ("1d", "1d-sp")
        assert box.choice.scheme == "3d" and sum(n > 1 for n in box.choice.grid.sizes) > 1
        assert one.gain == line.seconds / box.seconds - 1
    for kind in (LINE, BOX):    # faster links cost nothing, and change nothing within a node
        on_8, on_16 = ([one.best[kind].seconds for one in places if one.gpus == gpus]
                       for gpus in (8, 16))
        assert on_8[0] == on_8[1] == on_8[2] and on_16[0] >= on_16[1] >= on_16[2]


@pytest.mark.parametrize("more", [
    {"architecture": Architecture(kv_heads=2, perceptron="swiglu", inner=96)},
    {"experts": Experts(4, top=2, every=1, capacity=None)}])
def test_a_map_prices_the_layers_of_the_model(more, places):
    (other,) = map_kinds(replace(ASKED, gpt=structs.replace(TINY_GPT, **more)), [8], RATES[:1])
    assert len(other.best) == 2
    assert all(other.best[kind].seconds != one.seconds for kind, one in places[0].best.items())


def test_a_map_at_the_rate_of_the_machine_is_its_search(places):
    families = Search(replace(ASKED, gpus=16)).screen()
    lines = [plan for family, plans in families.items() for plan in plans
             if plan[1].scheme in ("1d", "1d-sp")]
    assert places[4].rate == RATES[1] and places[4].gpus == 16
    assert places[4].best[LINE].seconds == min(lines, key=lambda one: one[0])[0]


def test_a_map_is_printed_and_drawn(tmp_path, capsys):
    (tmp_path / "tiny.toml").write_text(TINY)
    assert main(["plan", "--map", "2,16", "--model", str(tmp_path / "tiny.toml"), "--batch", "2",
                 "--machine", "dgx-h100", "--pictures", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "none fits" in said and said.count("GB/s: X x Y x Z on") == 7
    assert (tmp_path / "kind-map-tiny-dgx-h100.png").stat().st_size > 10000
