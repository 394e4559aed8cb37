"""The paper's rows as data, and how tables and figures show them."""
import re
from pathlib import Path

import numpy as np
import pytest

from bench.cases.case import make_case, scaled_hidden
from bench.cases.paper import load_tables
from bench.cases.selection import equal_token_rows, rows_by_name, select_rows
from bench.errors import UsageError
from bench.records import run_file
from bench.records.folder import read_folder
from bench.records.measurements import Check, Group, Variable
from bench.reports import merit
from bench.reports.paper_tables import measured_notes, verified_notes, words_agree
from records import format_tables, made_up, write_all


@pytest.mark.parametrize("preset", load_tables().presets)
def test_presets_make_models(preset):
    for row in load_tables().rows:
        one = make_case(row, preset)
        assert one.sizes.heads == load_tables().settings.heads[row.hidden]
        for sizes in (one.sizes, one.verified):
            assert sizes.hidden % sizes.heads == 0
            assert min(sizes.layers, sizes.batch, sizes.seq) >= 1
        assert (one.verified == one.sizes) == (preset != "paper")


def test_paper_preset_is_the_paper():
    for row in load_tables().rows:
        sizes = make_case(row, "paper").sizes
        assert (sizes.batch, sizes.hidden, sizes.seq, sizes.layers) == (
            row.batch, row.hidden, 512, 24)


def test_hidden_sizes_are_scaled_to_whole_heads():
    assert scaled_hidden(6120, 72, 8, "nearest") == 792
    assert scaled_hidden(8192, 128, 8, "nearest") == 1024
    assert scaled_hidden(3072, 64, 32, "up") == 128
    assert scaled_hidden(64, 64, 32, "nearest") == 64


def test_schemes_that_the_paper_lacks_have_rows_of_their_own():
    """At any number of ranks, with the sizes of the nearest row of the table."""
    weak, strong = select_rows("all", "1d-sp", ranks=27)
    assert (weak.table, weak.gpus, weak.batch, weak.hidden) == ("weak", 27, 288, 6120)
    assert (strong.table, strong.gpus, strong.batch, strong.hidden) == ("strong", 27, 24, 3072)
    assert not weak.published and weak.consistent and make_case(weak, "tiny").sizes.batch == 144
    assert [row.gpus for row in select_rows("strong", "1d-sp")] == [8, 16, 36, 64]
    assert not {row.scheme for row in select_rows()} - {"1d", "2d", "3d"}


def test_all_schemes_have_rows_at_the_ranks_of_the_tables_that_they_have_grids_for():
    """After the paper's rows, and not published; on a given number of ranks those that fit."""
    every = select_rows("strong", "all")
    assert every[:len(select_rows("strong"))] == select_rows("strong")
    found = {}
    for row in every:
        found.setdefault(row.scheme, []).append(row.gpus)
        assert row.published == (row.scheme in ("1d", "2d", "3d"))
    assert found["2.5d"] == [8, 16, 36, 64] and found["faces"] == [8, 64]
    assert "serial" not in found and list(found)[:3] == ["1d", "2d", "3d"]
    assert {row.scheme for row in select_rows("weak", "all", ranks=27) if row.gpus == 27} == {
        "1d-sp", "2.5d", "faces"}


def test_tables_show_every_scheme_that_was_run(tmp_path):
    row = select_rows("weak", "1d-sp", ranks=27)[0]
    for one in (row, select_rows("weak", "3d")[0]):
        run_file.write_run(made_up(one), tmp_path, make_case(one, "laptop").name)
    line = next(line for line in format_tables(tmp_path).splitlines()
                if line.startswith("1-D, sequence") and "|" in line)
    assert line.split("|")[0].split()[-6:] == ["27", "-", "-", "-", "-", "-"]
    assert line.split("|")[1].split()[-1] == f"{0.75 / make_case(row, 'laptop').sizes.batch:.5f}"


def test_sizes_that_make_no_model():
    row = select_rows("weak", "3d")[0]
    with pytest.raises(UsageError, match="--hidden 100: .* multiple of the 32 heads, such as 96"):
        make_case(row, "tiny", hidden=100)
    with pytest.raises(UsageError, match="--seq 0"):
        make_case(row, "tiny", seq=0)


def test_few_repetitions_cannot_differ_significantly(tmp_path):
    """Three against three: at best 2 of 20 orders."""
    write_all(tmp_path)
    found = [line.split("|")[1].split() for line in format_tables(tmp_path).splitlines()
             if line.startswith("over ")]
    assert {" ".join(words[5:]) for words in found if words[0] != words[1]} == {"1 no, p = 0.1"}


def test_missing_rows_and_crowded_ranks_are_said(tmp_path):
    row = select_rows("weak", "3d")[1]
    run_file.write_run(made_up(row, oversubscribed=True), tmp_path, "weak")
    text = " ".join(format_tables(tmp_path).split())
    assert "Missing, 17 of 18 rows: weak 1-D 8," in text
    assert "the repetitions, of 1 row: " in text
    assert re.search(r"Reached: the wider interval of a row is [\d.]+ % wide\. ", text)
    assert "NOT SCALING RESULTS: in 1 of 1 rows ranks outnumber cores, with up to 64 ranks on " \
           "32 cores" in text


@pytest.mark.parametrize("form", ["text", "csv"])
def test_headings_say_that_crowded_ranks_do_not_scale(tmp_path, form):
    """Every table of times; and no test of repetitions that take turns."""
    for scheme in ("1d", "3d"):
        row, = [row for row in select_rows("weak", scheme) if row.gpus == 8]
        run_file.write_run(made_up(row, oversubscribed=True), tmp_path, scheme)
        strong, = [row for row in select_rows("strong", scheme) if row.gpus == 8]
        run_file.write_run(made_up(strong), tmp_path, f"strong-{scheme}")
    text = format_tables(tmp_path, form)
    said = "preset laptop (NOT SCALING RESULTS: up to 8 ranks take turns on 4 cores)"
    assert text.count(f"Table 1, weak scaling, {said}") == (4 if form != "csv" else 16)
    assert f"Table 2, strong scaling, {said}" not in text
    crowded = next(line for line in text.splitlines() if "over 1-D" in line and "30" in line)
    assert "not tested" in crowded and "p =" not in crowded
    assert form == "csv" or "Speed-ups are ratios of seconds a sequence." in " ".join(text.split())


def test_rows_with_equal_tokens():
    """Of each pair of unequal batches both, each with the batch of the other."""
    rows = [row for row in select_rows() if row.gpus == 64]
    found = [make_case(row, "laptop") for row in equal_token_rows(rows)]
    assert [(one.name, one.sizes.batch) for one in found] == [
        ("weak-1d-as-3d-p064-laptop", 192), ("weak-3d-as-1d-p064-laptop", 15),
        ("strong-1d-as-3d-p064-laptop", 12), ("strong-3d-as-1d-p064-laptop", 6)]
    assert found[1].title == "weak 3-D 64 ranks, batch of 1-D"
    for scheme in ("1d", "2d", "3d"):    # by itself: its part of all of them
        assert equal_token_rows(row for row in rows if row.scheme == scheme) == [
            one.row for one in found if one.row.scheme == scheme]
    assert rows_by_name("weak:3d:1d", 64)[-1] == found[1].row
    with pytest.raises(UsageError, match="--rows '4d' is unknown"):
        rows_by_name("weak:3d:4d", 64)


def test_each_machine_is_said_with_its_rows(tmp_path):
    for row in [*select_rows("weak", "3d"), *select_rows("strong", "3d")]:
        run = made_up(row)
        other = row.table == "strong" and row.gpus == 64
        run.environment.update(git_commit="cd" if other else "ab", cores=4)
        run_file.write_run(run, tmp_path, row.table)
    lines = [line for line in measured_notes(read_folder(tmp_path).results[0])
             if "Machine" in line]
    assert [line.partition(":")[0] for line in lines] == [
        "Machine of strong 3-D 8, all weak rows", "Machine of strong 3-D 64"]
    assert [line.rpartition(" ")[2] for line in lines] == ["ab.", "cd."]


def test_the_machine_of_a_row_with_anothers_batch_alone_is_said(tmp_path):
    run = made_up(select_rows("weak", "3d")[0])
    run.configuration["equal_tokens"] = "1d"
    run_file.write_run(run, tmp_path, "weak")
    assert "Machine: Some CPU" in format_tables(tmp_path)


def test_what_was_not_verified_at_its_size_is_a_warning():
    """Unless the measured model itself was checked by residuals."""
    run, beside = (made_up(row) for row in select_rows("weak", "3d"))
    run.configuration["verified_measured_model"] = False
    _, smaller, warning = verified_notes([run, beside])
    assert smaller.startswith("In 1 row that was a smaller model of the same scheme and grid, ")
    assert warning == ("NOT VERIFIED AT ITS SIZE: in 1 row the measured model itself was not "
                       "checked.")
    run.checks.append(Check("residual of layers.0", 1e-7, 1e-3))
    _, _, looked = verified_notes([run, beside])
    assert looked.startswith("In 1 row the measured model itself was checked by the residuals ")


@pytest.mark.parametrize("transport, said", [("mpi", 1), ("shared", 3)])
def test_the_peak_of_memory_is_beside_a_dry_run(tmp_path, transport, said):
    run = made_up(select_rows("weak", "3d")[0])
    run.configuration["transport"] = transport
    words, = merit.merit_notes([run])
    assert "counted from shapes" in words and f"What it moves, {transport}: " in words
    run.groups["memory"] = Group({"rank": range(8)}, {
        "pool_peak": Variable(np.full(8, 3.0 * 2 ** 20), "byte", ("rank",)),
        "expected_pool_peak": Variable(np.float64(2 ** 22), "byte", ())})
    run_file.write_run(run, tmp_path, "weak")
    text = format_tables(tmp_path)
    line, = [line for line in text.splitlines() if "peak memory" in line or "dry run" in line][1:2]
    assert line.endswith("dry run")
    _, note = merit.merit_notes([run])
    assert note.count(". ") + 1 == said and "Peak memory: all arrays" in text


def test_the_latest_run_is_shown_and_bad_files_are_named(tmp_path):
    row = select_rows("strong", "3d")[0]
    for second, forward in ((5, 0.125), (7, 0.5), (6, 0.25)):
        run_file.write_run(made_up(row, forward, created=f"2030-01-02T03:04:0{second}+00:00"),
                           tmp_path,
                           "strong")
    (tmp_path / "broken.h5").write_bytes(b"\x89HDF\r\n\x1a\nno more")
    found = read_folder(tmp_path)
    problems = found.problems
    assert found.results[0].get(row).samples["forward"].max(axis=1)[1] == pytest.approx(0.5)
    assert found.results[0].earlier == 2
    assert len(problems) == 1 and "broken.h5" in problems[0]
    assert "2 earlier runs" in " ".join(format_tables(tmp_path).split())


def test_words_that_differ_from_the_closed_form_are_said(tmp_path):
    run = made_up(select_rows("weak", "2d")[0])
    assert words_agree(run)
    run.groups["traffic"].variables["expected_words"].values[0, 0, 0] += 1
    run_file.write_run(run, tmp_path, "weak")
    text = " ".join(format_tables(tmp_path).split())
    assert "differ from the closed form in: weak 2-D 16" in text


def test_emulated_clusters_are_named(tmp_path):
    """In headings, in place of the warning that nothing scales, and in notes; each apart."""
    for table, emulated in (("weak", "16x4:200Mbit"), ("strong", None), ("weak", None)):
        row, = [row for row in select_rows(table, "3d") if row.gpus == 64]
        run = made_up(row, oversubscribed=True)
        if emulated:
            run.environment.update(emulated_cluster=emulated, kernel="6.1")
        run_file.write_run(run, tmp_path, f"{table}-{bool(emulated)}")
    text = " ".join(format_tables(tmp_path).split())
    said = ("(emulated cluster, 16 nodes x 4 ranks, 200 Mbit/s; up to 64 ranks take turns on 32 "
            "cores)")
    assert f"Table 1, weak scaling, preset laptop, cluster 16x4:200Mbit {said}" in text
    assert "Table 1, weak scaling, preset laptop (NOT SCALING RESULTS: up to 64" in text
    assert "Table 2, strong scaling, preset laptop (NOT SCALING RESULTS: up to 64" in text
    assert "EMULATED CLUSTER: 1 of 1 rows were measured in an emulated cluster, 16 nodes" in text
    assert "Linux 6.1" in text
    assert "NOT SCALING RESULTS: in 2 of 2 rows" in text and "earlier run" not in text
    assert "32 cores; emulated cluster, 16 nodes x 4 ranks, 200 Mbit/s; Some MPI" in text


@pytest.mark.parametrize("printed", [
    "paper-laptop/tables.txt", "paper-emulated/tables.txt", "gpu/tables.txt",
    "gpu/h100/tables.txt", "large-messages/tables.txt", "layer/tables.txt",
    "layer/numba/tables.txt", "layer/xeon/tables.txt", "products/tables.txt",
    "products/algorithms/tables.txt", "products/pipelined/tables.txt",
    "products/pipelined-4-nodes/tables.txt", "experts/experts.txt", "step/step.txt",
    "training/meshes/meshes.txt"])
def test_a_folder_gives_the_tables_that_its_verb_printed(printed):
    """Published figures beside measured ones, speed-ups, notes: all that a folder holds."""
    file = Path(__file__).parents[3] / "results" / printed
    assert format_tables(file.parent).rstrip() == file.read_text(encoding="utf-8").rstrip()


def test_pipelines_of_layers_and_of_waits_have_tables_of_their_own():
    """In one folder: each as its verb printed it, under its own notes."""
    folder = Path(__file__).parents[3] / "results/pipeline/beside-pytorch"
    text = format_tables(folder)
    layers, waits = ((folder / f"{name}.txt").read_text(encoding="utf-8").strip()
                     for name in ("layers", "waits"))
    assert layers in text and len(waits.split("About these")) == 3
    for notes in re.findall(r"About these.*?\n(?=\n)", waits + "\n\n", re.DOTALL):
        assert notes in text + "\n\n"
    assert re.search(r"1f1b +16 +1457.4 +1444.8", text)
