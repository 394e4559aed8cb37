"""Costs of two linear layers as counted, beside those in print."""
import pytest

from bench.__main__ import main
from bench.prediction.meshes.layer_costs import count_pair, list_costs
from mm3d import ModelSizes
from mm3d.schemes import find_scheme
from mm3d.schemes.closed_form import ProductShape

SIZES = ModelSizes(layers=1, hidden=64, heads=4, batch=16, seq=16)


@pytest.fixture(scope="module")
def found():
    return {one.scheme: one for one in list_costs(64, SIZES)[0]}


def ratios(one):
    return {cost: one.counted[cost] / one.printed[cost] for cost in one.counted}


def test_counted_words_are_the_closed_forms(found):
    M, h = SIZES.tokens, SIZES.hidden
    for text, one in found.items():
        name, *options = text.split()
        options = dict(option.split("=") for option in options)
        moves = [move for shape in (("up", M, h, 4 * h), ("down", M, 4 * h, h)) for half in
                 find_scheme(name).product_moves(one.grid, ProductShape(*shape), **options)
                 for move in half]
        assert 64 * one.counted["words"] == sum(move.words for move in moves), text


def test_where_print_is_right(found):
    for one in found.values():
        assert ratios(one)["flops"] == ratios(one)["parameters"] == 1
    assert ratios(found["1d"])["words"] == ratios(found["1d"])["messages"] == 1
    for name in ("2d", "2.5d", "3d"):
        assert ratios(found[name])["activations"] == 1
    assert ratios(found["2d"])["messages"] == 1
    both = ratios(found["3d keep=both"])
    assert both["words"] == both["messages"] == 1


def test_where_print_is_wrong(found):
    """2-D by q; 2.5-D by q but for the sum over depth; 3-D unless gathered operands are kept."""
    q = d = 4
    M, h, P = SIZES.tokens, SIZES.hidden, 64
    A, B = 5 * M * h, 2 * 4 * h * h    # both layers' inputs, and both weights
    assert ratios(found["2d"])["words"] == 1 / 8
    assert found["2.5d"].counted["words"] * q == pytest.approx(
        found["2.5d"].printed["words"] + q * 2 * (d - 1) * B / P)
    assert found["2.5d"].counted["messages"] == 2 * (6 * (q - 1) + 2 * (d - 1))
    assert found["3d"].counted["words"] == (q - 1) * (3 * A + 3 * B + 2 * A) / P
    assert ratios(found["3d"])["messages"] == 8 / 6
    assert found["3d keep=both"].counted["activations"] == (A * q + B * q) / P
    assert found["1d"].counted["activations"] == M * h + 4 * M * h / P


def test_the_table(capsys):
    assert main(["plan", "--ranks", "4", "--hidden", "64", "--heads", "4", "--layers", "1",
                 "--batch", "4", "--seq", "8", "--top", "1", "--costs"]) == 0
    out = capsys.readouterr().out
    assert "counted and printed costs" in out and "0.5000" in out and "Left out: 3d: " in out
    assert "One Transformer layer" in out and "counted on every rank" in out


def test_depth_one_leaves_nothing_out():
    grid = find_scheme("2.5d").grid_shape((2, 2, 1))
    counted = count_pair("2.5d", grid, SIZES, {})
    assert counted == count_pair("2d", find_scheme("2d").grid_shape((2, 2)), SIZES, {})
