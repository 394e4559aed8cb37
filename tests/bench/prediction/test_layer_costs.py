"""Costs of a Transformer layer on every rank, and of two linear layers, beside those in print."""
import pytest

from bench.__main__ import main
from bench.prediction.meshes.layer_costs import (MOST_RANKS, count_pair, list_costs,
                                                 list_layer_costs)
from bench.reports.formats import render
from bench.reports.plans.layer_costs import layer_costs_parts
from mm3d import ModelSizes
from mm3d.model import cost
from mm3d.schemes import find_scheme
from mm3d.schemes.closed_form import ProductShape

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


def test_the_table(capsys):
    assert main(["plan", "--ranks", "4", "--hidden", "64", "--heads", "4", "--layers", "1",
                 "--batch", "4", "--seq", "8", "--top", "1", "--costs"]) == 0
    out = capsys.readouterr().out
    assert "counted and printed costs" in out and "0.5000" in out and "Left out: 3d: " in out
    assert "One Transformer layer" in out and "counted on every rank" in out


def test_depth_one_leaves_nothing_out():
    grid = find_scheme("2.5d").grid_shape((2, 2, 1))
    counted = count_pair("2.5d", grid, PAIR, {})
    assert counted == count_pair("2d", find_scheme("2d").grid_shape((2, 2)), PAIR, {})
