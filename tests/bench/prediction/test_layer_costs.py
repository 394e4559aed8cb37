"""Costs of a Transformer layer on every rank: closed forms, what print lacks, and who has most."""
import pytest

from bench.prediction.meshes.layer_costs import MOST_RANKS, list_layer_costs
from bench.reports.formats import render
from bench.reports.plans.layer_costs import layer_costs_parts
from mm3d import ModelSizes
from mm3d.model import cost

SIZES = ModelSizes(layers=1, hidden=64, heads=8, batch=8, seq=8)


@pytest.fixture(scope="module")
def found():
    return {one.scheme: one for one in list_layer_costs(8, SIZES)[0]}


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
