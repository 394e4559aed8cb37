"""Steps of training: their prediction, and files of steps that others measured."""

import re
from dataclasses import replace

import msgspec
import pytest

from bench.__main__ import main
from bench.errors import UsageError
from bench.prediction import machine_model
from bench.prediction.machine_model import Achieved
from bench.prediction.pipelines.pipeline_model import PipelineModel
from bench.prediction.pipelines.pipeline_seconds import fullest_stage
from bench.prediction.published.published_steps import (COLUMNS, choices, fit_to_steps,
                                                        predict_rows, read_steps)
from bench.prediction.pipelines.training_step import (SHARES, flops_of_step, memory_by_kind,
                                                      parameters_of_ranks, predict_step)
from bench.reports.measured_tables import step_parts
from mm3d.grid.shape import GridShape
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run
from mm3d.training.optimizers import AdamW
from mm3d.training.schedules import build
from support import ROOT

A100 = machine_model.load_machine("dgx-a100")
HEAD = ",".join(["Parameters (billion)", *COLUMNS.values()])
GOOD = ["1,8,16,2,256,4,4,64,2,4,1,5", "1,8,16,2,256,4,4,64,1,4,2,6",
        "1,8,16,1,256,4,4,64,1,8,1,4", "1,8,16,2,256,4,4,64,4,2,1,7",
        "1,8,16,1,256,4,4,64,2,2,2,6", "1,8,16,4,512,8,4,128,8,1,1,9"]


def written(tmp_path, *lines, head=HEAD) -> str:
    file = tmp_path / "steps.csv"
    file.write_text("\ufeff" + "\n".join([head, *lines]) + "\n", encoding="utf-8")
    return str(file)


def gpt(stages=2, microbatches=4, ranks=1, **more) -> PipelineModel:
    stack = Stack(layers=4, hidden=64, heads=4, batch=8, seq=16, dtype="float16", causal=True)
    grid = find_scheme("1d").grid_shape((ranks,))
    return PipelineModel(build("1f1b", stages, microbatches), "1d", (grid,) * stages, stack,
                         vocab=more.pop("vocab", 100), named="1f1b", **more)


@pytest.mark.parametrize("tied", [True, False])
def test_parameters_of_stages_are_those_of_a_dry_run(tied):
    for stages in (1, 2):
        model = gpt(stages, tied=tied)
        held = [model.trace(4 // stages, stage=stage, extrapolates=False).parameters / 4
                for stage in range(stages)]    # values and gradients of 2 bytes each
        assert [*map(sum, parameters_of_ranks(model))] == held


def test_shares_of_a_step_are_its_seconds():
    """A forward counted twice would hide the bubble, and make the shares more than the step."""
    model = gpt(data=4)
    found, apart, alone = (predict_step(one, A100) for one in (model, replace(
        model, schedule=build("zb-h1", 2, 4), named="zb-h1"), gpt(1)))
    assert [*found.shares] == [*SHARES] and min(found.shares.values()) >= 0
    for one in (found, apart):
        assert sum(one.shares.values()) == pytest.approx(one.seconds)
    assert apart.shares["products"] == pytest.approx(found.shares["products"])
    assert found.shares["replicas"] > 0 and found.shares["bubble"] > 0
    assert alone.shares["hops"] == 0 and alone.shares["bubble"] == pytest.approx(0, abs=1e-9)


def test_a_repeated_forward_costs_a_forward():
    once, again = (predict_step(gpt(1), A100, repeats=repeats) for repeats in (False, True))
    forward = float(once.pipeline.timeline.times.forward[0])
    assert again.seconds - once.seconds == pytest.approx(4 * forward)


def test_the_ends_of_a_gpt_take_time_in_their_stages():
    with_ends, without = (predict_step(gpt(3, vocab=vocab, tied=False), A100).pipeline.timeline
                          .times for vocab in (50000, 0))
    assert with_ends.forward[1] == without.forward[1]
    assert with_ends.forward[0] > without.forward[0]
    assert with_ends.backward[2] > without.backward[2]


def test_the_optimizer_moves_its_state_once_and_zero_divides_it():
    whole, divided = (predict_step(gpt(1, data=4, zero=zero), A100).shares["optimizer"]
                      for zero in (0, 1))
    assert whole == pytest.approx(sum(*parameters_of_ranks(gpt(1))) * (2 * 2 + 6 * 4 + 2)
                                  / (A100.memory_bandwidth * A100.achieved.memory))
    assert divided == pytest.approx(whole / 4)


def test_gradients_that_are_first_written_are_whole_up_to_zero_1():
    """As many seconds of adding are left out as without ZeRO; from ZeRO 2 on those of shards."""
    own = msgspec.structs.replace(A100, kernels="own")
    model = gpt(1, data=4)
    model = replace(model, stack=replace(model.stack, dtype="float32"))
    steps = [predict_step(replace(model, zero=zero), own) for zero in range(4)]
    whole = sum(*parameters_of_ranks(model)) * 3 * 4 / (
        A100.memory_bandwidth * A100.achieved.memory)
    assert [float(one.pipeline.timeline.makespan + max(one.pipeline.sums)) - one.seconds
            + one.shares["optimizer"] for one in steps] == pytest.approx(
                [whole, whole, whole / 4, whole / 4])
    assert sum(steps[1].shares.values()) == pytest.approx(steps[1].seconds)
    assert min(steps[1].shares.values()) >= 0


def test_memory_by_kind_is_the_peak_of_the_dry_run():
    def by_kind(model):
        return memory_by_kind(model, *fullest_stage(model, optimizer=True))
    found = by_kind(gpt(2, 4))
    assert found["all"] == sum(value for name, value in found.items() if name != "all")
    count, _ = parameters_of_ranks(gpt(2, 4))[fullest_stage(gpt(2, 4), optimizer=True)[0]]
    assert [found[name] / count for name in ("values", "gradients", "masters", "moments")] == [
        2, 4, 4, 8]
    many = by_kind(replace(gpt(2, 16), stack=replace(gpt().stack, batch=32)))
    assert many["all"] == found["all"]    # more micro-batches need no more


def test_memory_by_kind_where_the_peak_moves_with_the_layers():
    """With few it lies where no activations are: the largest table is summed."""
    model = PipelineModel(build("1f1b", 1, 1), "1d", (GridShape("x", (1,)),), Stack(
        12, 768, 12, 1, 1024, dtype="float16", causal=True), vocab=50257, data=8, zero=1,
        named="1f1b")
    found = memory_by_kind(model, *fullest_stage(model, optimizer=True))
    assert found["all"] == sum(value for name, value in found.items() if name != "all")
    assert found["all"] == dry_run.trace(
        lambda *where: model.build(model.schedule, 12, *where, "float32"), 8, events=False,
        step=lambda one, trace: (change := AdamW(one, 1e-3).step, one.rehearse(), change())).peak


def test_operations_are_those_of_narayanan():
    """F = 72 B s l h^2 (1 + s / 6h + V / 12 l h), their equation 3 without recomputation."""
    found = flops_of_step(gpt(data=2))
    B, s, h, layers, V = 16, 16, 64, 4, 100
    assert found["model"] == found["hardware"] == pytest.approx(
        72 * B * s * layers * h ** 2 * (1 + s / (6 * h) + V / (12 * h * layers)))


def test_rows_are_read_and_the_rest_named(tmp_path):
    path = written(tmp_path, GOOD[0], "1,9,16,2,256,4,4,64,2,4,1,5", "1,8,16,3,256,4,4,64,2,4,1,5",
                   "1,8,16,2,256,5,4,64,2,4,1,5", "1,8,16,2,256,4,4,64,2,4,1,", "", "1,8",
                   "1,8,16.5,2,256,4,4,64,2,4,1,5", GOOD[1], GOOD[1] + ",5", GOOD[0] + ", ")
    rows, problems = read_steps(path)
    assert [(row.line, row.gpus, row.seconds) for row in rows] == [(2, 8, .005), (10, 8, .006),
                                                                   (12, 8, .005)]
    assert [line.partition(":")[0] for line in problems] == [
        f"line {number}" for number in (3, 4, 5, 6, 8, 9, 11)]
    assert "13 cells for 12 columns" in problems[6]
    assert "is 8, not 9 GPUs" in problems[0] and "do not divide" in problems[1]
    assert "heads" in problems[2] and "'16.5'" in problems[5]
    assert problems[3] == "line 6: no iteration time (ms)"
    assert problems[4].startswith("line 8: no global batch, micro batch, hidden size, ")


@pytest.mark.parametrize("place, text, would", [
    (1, "1048577", "a whole number from 1 to 1048576"), (6, "1e300", "a whole number from 1"),
    (6, "nan", "a whole number from 1"), (11, "inf", "a number above 0"),
    (11, "-5", "a number above 0")])
def test_a_number_that_no_step_has_leaves_out_its_row(place, text, would, tmp_path):
    cells = GOOD[0].split(",")
    rows, (problem,) = read_steps(written(
        tmp_path, GOOD[1], ",".join([*cells[:place], text, *cells[place + 1:]])))
    assert len(rows) == 1 and problem.startswith("line 3: ")
    assert f" is {text!r}: {would}" in problem


def test_lines_of_any_system_are_read(tmp_path):
    path = tmp_path / "old.csv"
    path.write_bytes("\r".join([HEAD, *GOOD]).encode())
    assert read_steps(str(path)) == read_steps(written(tmp_path, *GOOD))
    wrapped = ",".join(f'"{name}"' for name in HEAD.replace(" ", "\n").split(","))
    assert read_steps(written(tmp_path, *GOOD, head=wrapped)) == read_steps(str(path))
    with pytest.raises(UsageError, match="no such file"):
        read_steps(str(tmp_path / "none.csv"))


@pytest.mark.parametrize("head, line, said", [
    (HEAD, "1" * 200_000, "steps.csv: no CSV: field larger"),
    ("gpus,ms", GOOD[0], "its first line names no column '# GPUs', 'global"),
    (HEAD.replace("micro batch", "mini batch"), GOOD[0], "no column 'micro batch'"),
    (HEAD + ",micro batch", GOOD[0] + ",2", "column 'micro batch' is there 2 times"),
    *((HEAD.replace(",", sign), GOOD[0].replace(",", sign).replace("5", "0,5"),
       f"cells seem to be divided by {what}: commas betw")
      for sign, what in ((";", "semicolons"), ("\t", "tabs")))])
def test_a_file_of_other_columns_is_refused(head, line, said, tmp_path):
    with pytest.raises(UsageError, match=said):
        read_steps(written(tmp_path, line, head=head))


def test_optional_columns_say_what_a_row_is(tmp_path):
    names = ",vocabulary,scheme,recompute,chunks,tied"
    more_than_heads = "1,8,16,2,256,4,4,64,8,1,1,5"
    rows, problems = read_steps(written(
        tmp_path, GOOD[1] + ",1000,1d-sp,none,2,no", GOOD[1] + ",,,,,",
        GOOD[1] + ",1,4d,none,1,no", more_than_heads, more_than_heads + ",,3d", head=HEAD + names))
    assert len(problems) == 2 and problems[0].startswith("line 4: scheme='4d' is unknown")
    assert problems[1] == "line 5: 8 of 8 tensor ranks divide 4 heads: at most 4 would do"
    model, plain, cube = (PipelineModel.of(row.config) for row in rows)
    assert cube.grids[0].sizes == (2, 2, 2)    # of which 2 divide heads
    assert (model.vocab, model.scheme, model.tied, model.named) == (
        1000, "1d-sp", False, "interleaved:2")
    assert (plain.vocab, plain.scheme, plain.tied, plain.named) == (51200, "1d", True, "1f1b")


def test_a_misspelt_column_is_named(tmp_path):
    """But not one of something else, nor one beside the column that it is like."""
    rows, problems = read_steps(written(tmp_path, GOOD[0] + ",1000,float16,x",
                                        head=HEAD + ",Vocab,dtype,time"))
    assert len(rows) == 1 and rows[0].config.model.vocab == 51200
    assert problems == ["column 'vocab' is not used; did you mean vocabulary?"]


def test_a_type_without_a_rate_leaves_out_its_row_alone(tmp_path, capsys):
    path = written(tmp_path, GOOD[1] + ",bfloat16", GOOD[1] + ",", GOOD[1] + ",int4",
                   head=HEAD + ",dtype")
    assert main(["predict", "--steps", path, "--machine", "v100-edr"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert ("line 2: machine v100-edr has no rate for bfloat16: it has float16, float32, float64"
            in said)
    assert "line 4: dtype='int4' is unknown: choose one of float32, float64, float16, b" in said
    assert "1 row: mean error" in said


def test_zero_divides_the_optimizer_of_a_row(tmp_path):
    rows, problems = read_steps(written(tmp_path, GOOD[0] + ",", GOOD[0] + ",1", GOOD[0] + ",4",
                                        head=HEAD + ",zero"))
    assert problems == ["line 4: zero='4' is unknown: choose one of 0, 1, 2, 3"]
    plain, divided = (one.step.shares["optimizer"] for one in predict_rows(rows, A100)[0])
    assert divided == pytest.approx(plain / 4)


def test_attention_of_a_row_comes_before_the_machines(tmp_path, capsys):
    path = written(tmp_path, GOOD[0] + ",flash", GOOD[0] + ",softmax", GOOD[0] + ",",
                   GOOD[0] + ",fused", head=HEAD + ",attention")
    rows, (problem,) = read_steps(path)
    assert problem.startswith("line 5: attention='fused' is unknown: choose one of flash, softmax")
    flash, softmax, own = (one.step.seconds for one in predict_rows(rows, A100)[0])
    plain, _ = read_steps(written(tmp_path, GOOD[0]))
    (fast,), _ = predict_rows(plain, msgspec.structs.replace(A100, attention="flash"))
    assert flash == fast.step.seconds < softmax == own
    assert main(["predict", "--steps", written(tmp_path, GOOD[0] + ",flash", GOOD[0] + ",softmax",
                                               head=HEAD + ",attention"),
                 "--machine", "dgx-a100"]) == 0
    assert "attention by flash and softmax" in capsys.readouterr().out


def test_rows_of_grids_count_all_of_their_gpus(tmp_path):
    rows, problems = read_steps(written(
        tmp_path, "1,16,16,2,256,4,4,64,8,2,1,5,3d", "1,8,16,2,256,4,4,64,4,2,1,5,3d",
        head=HEAD + ",scheme"))
    assert [(row.gpus, row.config.division.grid) for row in rows] == [(16, (2, 2, 2))]
    assert len(problems) == 1 and "line 3" in problems[0] and "4" in problems[0]


@pytest.mark.parametrize("name, machine", [("korthikanti", "dgx-a100"),
                                           ("megatron-core-h100", "dgx-h100"),
                                           ("llm-foundry-a100-80", "dgx-a100")])
def test_committed_tables_are_those_of_the_code(name, machine, tmp_path, capsys):
    """Of the first two rows, which take the shortest; the others change with them."""
    kept, table = tmp_path / "kept.csv", ROOT / "results/predictions/steps" / name
    lines = table.with_suffix(".csv").read_text("utf-8").splitlines(keepends=True)
    kept.write_text("".join(lines[:3]), "utf-8")
    assert main(["predict", "--steps", str(kept), "--machine", machine]) == 0
    rows, committed = ({tuple(line.split()) for line in text.splitlines() if line[:1].isdigit()
                        and re.search(r" [+-]\d", line)}    # those with an error
                       for text in (capsys.readouterr().out, table.with_suffix(".txt").read_text(
                           "utf-8")))
    assert len(rows) == 2 and rows <= committed, rows - committed


def test_a_fit_finds_the_fractions_that_made_the_seconds(tmp_path):
    """Rows whose seconds are a machine's own are fitted to it, but for terms that are small."""
    rows, _ = read_steps(written(tmp_path, *GOOD))
    true = msgspec.structs.replace(A100, achieved=Achieved(.5, .6, .4, .7, .5))
    made = [replace(one.row, seconds=one.step.seconds) for one in predict_rows(rows, true)[0]]
    fitted = fit_to_steps(made, A100)
    errors = [abs(one.error) for one in predict_rows(made, fitted)[0]]
    assert max(errors) < .02 < max(abs(one.error) for one in predict_rows(made, A100)[0])
    with pytest.raises(UsageError, match="4 rows"):
        fit_to_steps(rows[:4], A100)
    narrow = msgspec.structs.replace(A100, gemm_rate={"float32": 1e12})
    with pytest.raises(UsageError, match="0 rows to fit .*; line 2: machine dgx-a100 has no rate"):
        fit_to_steps(rows, narrow)


def test_the_choice_is_the_row_predicted_fastest(tmp_path):
    found, _ = predict_rows(read_steps(written(tmp_path, *GOOD[:3]))[0], A100)
    (first, best), = choices(found)
    assert best.row.seconds == .004
    assert first.step.seconds == min(one.step.seconds for one in found)
    assert "rows of at most 1 GPU:" in str(step_parts(A100, found, [], fitted_to=1))


def test_the_verb_prints_errors_and_fails_without_rows(tmp_path, capsys):
    path = written(tmp_path, *GOOD[:2], "1,9,16,2,256,4,4,64,2,4,1,5")
    assert main(["predict", "--steps", path, "--machine", "dgx-a100"]) == 0
    said = capsys.readouterr().out
    assert "line 4: tensor 2 x data 4 x pipeline 1 is 8, not 9 GPUs" in said
    assert said.rstrip().splitlines()[-1].startswith("2 rows: mean error ")
    assert main(["predict", "--steps", written(tmp_path, "1,9,16,2,256,4,4,64,2,4,1,5"),
                 "--machine", "dgx-a100"]) == 1
    said = capsys.readouterr().out
    assert "attention by softmax" in said and said.rstrip().endswith("no row could be predicted")
