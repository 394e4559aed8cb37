"""The verb that shows a product, or a layer, step by step."""
import json

import pytest

from bench.__main__ import main


def tables(capsys, *words):
    assert main(["cube", "--format", "json", *words]) == 0
    return [part for part in json.loads(capsys.readouterr().out) if "table" in part]


@pytest.mark.parametrize("words, shown", [
    (["--scheme=3d"], 8), (["--scheme=faces"], "0 on 4, 16 on 4 ranks")])
def test_words_of_a_rank_are_told_of_each(capsys, words, shown):
    """And why ranks differ, where they do."""
    assert main(["cube", "--format", "json", *words]) == 0
    steps, *others = json.loads(capsys.readouterr().out)
    assert steps["rows"][0][-2] == shown
    assert [one.get("notes") for one in others[:-1]] == ["Why ranks differ:"] * (shown != 8)


@pytest.mark.parametrize("words", [
    ["--scheme=3d"], ["--scheme=2.5d"], ["--scheme=2d"], ["--scheme=1d", "--form=down"],
    ["--grid=2x1x3", "--form=up", "--backward", "--shape=12,5,7"]])
def test_words_stand_beside_the_closed_form(capsys, words):
    steps, beside = tables(capsys, *words)
    kinds = [row[1] for row in steps["rows"]]
    assert "multiply" in kinds and len(kinds) > 1
    assert [row[1] for row in beside["rows"]] == [row[2] for row in beside["rows"]]
    assert sum(row[-1] for row in steps["rows"]) == sum(row[1] for row in beside["rows"]) > 0


def test_a_layer_is_shown_part_by_part(capsys):
    parts, beside = tables(capsys, "--scheme=1d-sp", "--grid=2", "--form=layer")
    assert [row[:3] for row in parts["rows"][:2]] == [["ln1", "outer", ",x,"],
                                                      ["attention.qkv", "inner", ",,x"]]
    assert {row[0] for row in beside["rows"]} == {"all-gather along x", "reduce-scatter along x"}


@pytest.mark.parametrize("words, said", [
    (["--grid=4x4x4"], "--grid 4x4x4: 64 ranks are too many to be seen: 32 at most would do"),
    (["--form=layer", "--shape=8"], "--shape is that of a product: leave it out"),
    (["--shape=65"], "--shape 65,65,65: sizes to 64 would do"),
    (["--scheme=1d-sp"], "no products of plain matrices: the form up or down"),
    (["--scheme=2d", "--grid=2x1"], "needs a square grid"),
    (["--out=a.jpg"], "a.jpg: a picture's name ends in .png, .svg, .pdf or .gif")])
def test_what_cannot_be_shown_is_refused(capsys, words, said):
    assert main(["cube", *words]) == 2
    assert said in capsys.readouterr().err
