"""``bench dry`` and ``bench predict`` with experts: words and seconds by hand, what is said."""
import csv
import io
import math

import pytest

from bench.__main__ import main
from bench.prediction.expert_overhead import dense_seconds, predict_overhead
from bench.prediction.machine_model import load_machine
from bench.prediction.seconds import collective_terms
from mm3d import Experts, ModelSizes
from mm3d.tracing.events import Collective

DGX = load_machine("dgx-h100")
SIZES = ModelSizes(1, 256, 2, 2, 64)
DRY = ("dry", "--scheme", "1d", "--ranks", "2", "--hidden", "64", "--heads", "2", "--layers", "5",
       "--batch", "4", "--seq", "16", "--data", "4", "--experts", "8", "--expert-parallel", "4")


@pytest.mark.parametrize("ranks, stride, level, seconds", [
    (8, 1, "node", 7 / 8 / 450e9),                 # NVLink alone
    (8, 8, "network", 8 * 7 / 8 / 400e9),          # eight lines share the links of each node
    (64, 1, "network", 8 * 56 / 64 / 400e9),       # 56 of 64 blocks leave the node of 8 ranks
    (16, 4, "network", 8 * 14 / 16 / 400e9)])      # two ranks of a line in each node
def test_an_all_to_all_by_hand(ranks, stride, level, seconds):
    """Of 1 GB that each rank sends, its own block included."""
    found = collective_terms(DGX, Collective("all_to_all", "d", ranks, stride, 10 ** 9))
    assert found[level] == pytest.approx(1e9 * seconds)
    assert {*found} == {level, "latency"}


@pytest.mark.parametrize("E, k, ranks", [(64, 2, 8), (64, 1, 64), (16, 3, 16)])
def test_the_overhead_of_a_layer_by_hand(E, k, ranks):
    found = predict_overhead(DGX, Experts(E, k, 1, None, "mixtral"), ranks, SIZES, "float16")
    assert found.words == found.by_hand == 4 * k * 128 * 256 * (ranks - 1) // ranks
    assert found.bytes == 2 * found.words
    assert math.isnan(found.inside) == (ranks > 8)
    # Half of each rank's bytes cross once a pass; the rest is latency and the gather of counts.
    crossing = 8 * found.bytes * ((ranks - 8) / (ranks - 1) if ranks > 8 else 1) / (
        400e9 * DGX.achieved.network)
    assert crossing < found.between < crossing + 1e-3
    assert 0 < found.products < found.layer
    assert found.layer > dense_seconds(DGX, SIZES, "float16")


def test_predict_prints_one_line_for_each_number(capsys):
    assert main(["predict", "--experts", "8,16", "--top", "1,12", "--expert-parallel", "4,16",
                 "--hidden", "128", "--batch", "1", "--seq", "32", "--machine", "dgx-h100",
                 "--format", "csv"]) == 0
    out = capsys.readouterr().out
    rows = [row for row in csv.reader(io.StringIO(out)) if row[1:4] and row[1].isdigit()]
    assert [row[1:4] for row in rows] == [["8", "1", "4"], ["16", "1", "4"], ["16", "1", "16"],
                                          ["16", "12", "4"], ["16", "12", "16"]]
    assert all(float(row[4]) == float(row[5]) for row in rows)


def test_dry_counts_and_says_what_is_assumed(capsys):
    assert main([*DRY, "--machine", "cpu", "--rank", "5", "--memory", "1 GB"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "4 replicas of grid 2, rank 5 of 8" in out and "which fits" in out
    assert "of 256 tokens that are routed together, each to 2 of 8 experts, every expert gets 64" \
        in out
    assert "takes 80 pairs" in out and "an all-to-all of rows" in out
    # 1-d: 64 tokens of 64 features on both ranks, 2 layers with experts, 2 all-to-alls each.
    assert f"forward e all_to_all 4 2 4 12 {2 * 2 * 2 * 64 * 64 * 3 // 4:,}" in out
    assert main([*DRY, "--imbalance", "2", "--capacity", "none", "--expert-way", "gather"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "the busiest, get 2 times their equal share of 64" in out
    assert "Nothing is dropped" in out and "all tokens come to all replicas" in out


def test_divided_experts_are_not_divided_again_by_zero(capsys):
    values = {}
    for more in ((), ("--expert-parallel", "2"), ("--expert-parallel", "1")):
        assert main([*DRY, *more, "--format", "csv"]) == 0
        lines = capsys.readouterr().out.splitlines()
        values[more] = [int(line.partition(name)[2].split(",")[1]) for name in (
            "0: replicas", "3: and parameters") for line in lines if name in line]
    divided, halved, whole = values.values()
    experts = 2 * 8 * (2 * 64 * 256) // 2 * 4    # bytes of weights in two layers, on each of 2
    for found, share in ((divided, 3 / 4), (halved, 1 / 2)):
        assert found[0] == pytest.approx(whole[0] - experts * share, rel=0.02)
        assert found[1] == pytest.approx(whole[1], rel=0.02)


@pytest.mark.parametrize("more, said", [
    (["--imbalance", "5"], "2 of 8 experts, of which a token chooses 2, can get 1 to 4 times"),
    (["--stages", "2"], "--stages 2 --data 4: stages with experts are predicted in one replica"),
    (["--stages", "2", "--data", "1"], "--stages 2 --expert-parallel 4: stages"),
    (["--stages", "2", "--data", "1", "--expert-parallel", "1", "--layers", "6"],
     "begins with layer 3 of a model with experts in one of 2 layers"),
    (["--rank", "8"], "--rank 8: 0 to 7 would do"),
    (["--expert-parallel", "3"], "--expert-parallel 3 does not divide")])
def test_what_dry_cannot_count_is_refused(capsys, more, said):
    assert main([*DRY, *more]) != 0
    assert said in " ".join(capsys.readouterr().err.split())


def test_options_without_experts_are_refused(capsys):
    for command, said in ((["predict", "--top", "2"], "--top 2: they are of --experts: give it"),
                          (["predict", "--experts", "8", "--table", "weak"], "--table weak: they"),
                          (["predict", "--experts", "1"], "no more experts can be chosen"),
                          (["dry", "--ranks", "1", "--hidden", "64", "--imbalance", "2"],
                           "--imbalance 2 would do nothing here")):
        assert main(command) != 0
        assert said in capsys.readouterr().err
