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
