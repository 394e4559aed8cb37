"""One document in every format, tables of microbenchmarks, and formats of files in words."""

import csv
import io
import json
import math
import re
import typing
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from bench.__main__ import main
from bench.cases.paper import load_tables
from bench.document import Column, Notes, Number, Table
from bench.errors import UsageError
from bench.prediction.machine_model import Achieved, Curve, Level, Line, Machine
from bench.prediction.meshes.rules_of_thumb import Rule, Rules, load_rules
from bench.prediction.model_file import ModelFile, load_model
from bench.records import run_file
from bench.records.measurements import Measurements, Variable
from bench.reports import formats, micro_tables
from bench.reports.formats import render
from bench.reports.log_tables import HEAD, describe_fields
from mm3d.tracing import dry_run
from records import format_tables, invented, made_up, matmul_record

NASTY = r"50 % of_a & b <i> #1 ~^\ {x} `y` *z* | w"
DOCUMENT = ["A heading", Table("Of " + NASTY, [
    Column("", "what"), Column("time", "(s)", "here"), Column("time", "(s)", "there"),
    Column("n")], [[NASTY, Number(1 / 3, "0.333"), Number(math.nan, "missing"), 3],
                   ["", Number(2.0, "2.00*"), Number(4.0, "4.0"), 12]]),
    Notes("Remarks:", ["first " * 30, NASTY])]


def test_text_is_aligned_and_bars_stand_between_groups():
    lines = render(DOCUMENT).splitlines()
    first = next(k for k, line in enumerate(lines) if line.split() == ["here", "there"])
    table = lines[first:first + 6]
    assert [len(line) for line in table[3:]] == [len(table[3])] * 3
    bars = {line.index("|", len(NASTY)) for line in (*table[1:3], *table[4:])}
    assert len(bars) == 1
    assert table[4].split("|")[-2].split()[-1] == "0.333"
    assert table[4].split("|")[-1].split() == ["missing", "3"]
    assert max(map(len, lines[first + 7:])) <= formats.WIDTH


def test_the_title_of_columns_has_dashes_on_both_sides_or_none():
    for title, said in (("a group", "a group"), ("a grou", " a grou"), ("a gro", "- a gro -")):
        table = Table("T", [Column("", "x"), Column("four", group=title),
                            Column("fou", group=title)], [["x", "1", "2"]])
        assert formats.format_text([table]).splitlines()[2].strip() == said.strip()


def test_csv_is_one_table_with_numbers_in_full():
    rows = list(csv.DictReader(io.StringIO(render(DOCUMENT + [
        Table("Another", [Column("n"), Column("m"), Column("m")], [[5, 6, 7]])], "csv"))))
    assert [row["here time (s)"] for row in rows] == [repr(1 / 3), "2.0", ""]
    assert [row["there time (s)"] for row in rows] == ["", "4.0", ""]
    assert rows[0]["what"] == NASTY and rows[0]["table"] == "Of " + NASTY
    assert [rows[2][name] for name in ("table", "n", "m", "m 2")] == ["Another", "5", "6", "7"]


def test_json_has_numbers_in_full():
    heading, table, notes = json.loads(render(DOCUMENT, "json"))
    assert heading == {"heading": "A heading"} and notes["items"][1] == NASTY
    assert table["columns"] == ["what", "here time (s)", "there time (s)", "n"]
    assert table["rows"] == [[NASTY, 1 / 3, None, 3], ["", 2.0, 4.0, 12]]
    infinite = render([Table("", [Column("")], [[Number(math.inf, "inf")]])], "json")
    assert json.loads(infinite)[0]["rows"] == [[None]]    # JSON has no such number


def test_markdown_escapes_what_means_something_to_it():
    lines = render(DOCUMENT, "markdown").splitlines()
    assert lines[0] == "## A heading" and lines[2].startswith("### Of 50 %")
    head, rule, first, second = (line for line in lines if line.startswith("|"))
    assert re.fullmatch(r"\|:?-+:?(\|:?-+:?){3}\|", rule)
    assert r"\`y\` \*z\* \| w" in first and r"of\_a" in first and r"\<i>" in first
    assert len({len(re.findall(r"(?<!\\)\|", line)) for line in (head, first, second)}) == 1


def test_rst_escapes_what_means_something_to_it():
    text = render(DOCUMENT, "rst")
    assert r"\`y\` \*z\* \| w" in text and r"of\_a" in text and r"~^\\ {x}" in text
    lines = text.splitlines()
    rules = [line for line in lines if re.fullmatch(r"=+(  =+)+", line)]
    assert len(rules) == 3 and len(set(rules)) == 1
    # A cell that is empty in the first column would join the row to the one above.
    assert lines[lines.index(rules[0]) + 4].startswith("\\ ")
    assert "A heading\n=========\n" in text


def test_latex_escapes_and_every_row_has_all_columns():
    text = render(DOCUMENT, "latex")
    body = text[text.index(r"\toprule"):text.index(r"\bottomrule")].splitlines()
    rows = [line for line in body if line.endswith(r"\\") and "multicolumn" not in line]
    assert [len(re.split(r"(?<!\\)&", line)) for line in rows] == [4] * 4
    assert r"50 \% of\_a \& b \textless{}i\textgreater{} \#1 " in text
    assert r"\textasciitilde{}\textasciicircum{}\textbackslash{} \{x\}" in text
    assert r"\cmidrule(lr){2-2} \cmidrule(lr){3-3}" in text
    assert text.count(r"\item") == 2 and text.count("begin{") == text.count("end{")


@pytest.mark.slow_but_first
@pytest.mark.parametrize("form", formats.FORMATS)
def test_the_verb_prints_all_rows_in_every_format(tmp_path, capsys, form):
    for row in load_tables().rows:
        run_file.write_run(made_up(row), tmp_path, row.table)
    run_file.write_run(matmul_record(), tmp_path, "matmul")
    assert main(["report", str(tmp_path), "--format", form]) == 0
    out = capsys.readouterr().out
    for row in load_tables().rows:
        assert f"{row.forward:.3f}" in out or repr(row.forward) in out
    assert "abt 64 x 32 x 16" in out
    if form == "csv":
        rows = [row for row in csv.DictReader(io.StringIO(out)) if row["product"]]
        assert [float(row["rate (GFLOP/s)"]) for row in rows] == pytest.approx(
            [65.536e-6 / 0.002, 131.072e-6 / 0.004])


DRY = ("dry", "--ranks", "8", "--hidden", "64", "--layers", "2", "--machine", "cpu")


@pytest.mark.parametrize("command, tables", [
    (["measure", "layer", "--scheme", "serial", "--hidden", "8,16", "--head-size", "8", "--batch",
      "1", "--seq", "4", "--repetitions", "2", "--max-repetitions", "2", "--out"], 2),
    (["reproduce", "--paper", "zero"], 5)])
def test_whatever_a_verb_prints_is_one_document(tmp_path, capsys, command, tables):
    """Of several tables, printed one after the other; lines for people go elsewhere."""
    assert main([*command, *[str(tmp_path)] * (command[-1] == "--out"), "--format", "json"]) == 0
    said = capsys.readouterr()
    found = [part for part in json.loads(said.out) if "table" in part]
    assert len(found) == tables and all(part["rows"] for part in found)
    assert not any("beside" in part["table"] for part in found)    # a layer alone
    assert said.err.count("written: ") == len(list(tmp_path.glob("*.h5")))


def test_counts_of_a_dry_run_are_whole_numbers_in_csv(capsys):
    """With all digits, also beyond those of a float, and without commas."""
    sizes = dict(layers=3, hidden=2 ** 18, heads=64, batch=1024, seq=4096)
    assert main(["dry", "--ranks", "1", "--scheme", "serial", "--format", "csv",
                 *(f"--{name}={size}" for name, size in sizes.items())]) == 0
    rows = csv.DictReader(io.StringIO(capsys.readouterr().out))
    flops = dry_run.extrapolate_step("serial", 1, **sizes).flops("forward")
    assert next(rows)["flops"] == str(flops) and flops > 2 ** 53


def test_the_state_of_figure_1_of_zero(capsys):
    """120, 31.4, 16.6 and 1.9 GB: 25 x 12 x 5000^2 = 7.5 billion parameters, 64 replicas."""
    assert main(["dry", "--ranks", "64", "--layers", "25", "--hidden", "5000", "--heads", "50",
                 "--batch", "64", "--seq", "8", "--dtype", "float16", "--data", "64"]) == 0
    rows = [line.replace(",", "").split() for line in capsys.readouterr().out.splitlines()
            if line[:2] in ("0:", "1:", "2:", "3:")]
    assert [round(int(row[-2]) / 1e9, 1) for row in rows] == [120, 31.4, 16.6, 1.9]


def test_copies_of_weights_count_in_the_state(capsys):
    common = ["--hidden", "48", "--heads", "4", "--layers", "2", "--batch", "16", "--seq", "8",
              "--data", "2", "--dtype", "float32", "--format", "csv"]
    values = {}
    for scheme, ranks in (("serial", 1), ("2d", 4), ("2.5d", 8)):
        more = ["--grid", "2x2x2"] if scheme == "2.5d" else []
        assert main(["dry", "--scheme", scheme, "--ranks", str(2 * ranks), *more, *common]) == 0
        [line] = [one for one in capsys.readouterr().out.splitlines() if "0: replicas" in one]
        values[scheme] = int(line.partition("0: replicas,")[2].split(",")[0])
    assert values["2.5d"] == values["2d"] < values["serial"] / 3


def test_overlap_is_in_the_tables_of_a_dry_run(capsys):
    """The calls in flight are some of the calls; the seconds do not claim that any is hidden."""
    found = []
    for more in ([], ["--overlap"]):
        assert main([*DRY, *more, "--format", "csv"]) == 0
        out = capsys.readouterr().out
        assert ("products hide no collective" in out) == bool(more)
        found.append(list(csv.DictReader(io.StringIO(out))))
    plain, overlapped = ([row for row in rows if row["collective"]] for rows in found)
    assert "in flight" not in plain[0]
    assert [row["calls"] for row in plain] == [row["calls"] for row in overlapped]
    assert all(0 <= int(row["in flight"]) <= int(row["calls"]) for row in overlapped)
    assert {row["collective"] for row in overlapped if int(row["in flight"])} == {
        "all_gather", "reduce_scatter"}
    peaks = [int(row["bytes"]) for rows in found for row in rows
             if row["arrays"] == "peak of the model's arrays"]
    assert peaks[0] < peaks[1]


def test_products_of_several_runs_share_a_table():
    table, notes = micro_tables.make_parts([matmul_record(), matmul_record()])
    assert len(table.rows) == 4
    assert [str(cell) for cell in table.rows[1]] == [
        "abt 64 x 32 x 16", "float32", "3d 2 x 2 x 1", "mpi", "backward", "4.000", "0.0", "1.000",
        "0.250", "0.200", "0.300", "1.000", "0.250", "800", "1.176"]
    assert str(table.rows[0][-1]) == "2.352"
    assert notes.items[0].startswith(
        "abt 64 x 32 x 16 float32, 3d 2 x 2 x 1, transport mpi: 6 repetitions of 7 calls")
    assert "BLAS takes 1 thread at most, of 2 cores: no fair reference" in notes.items[1]
    assert notes.items[2].startswith("WARNING: the one process was bound to 1 of 2 cores: no fair")


def test_rates_have_both_bounds_of_their_interval():
    """An asymmetric one: 16^3 x 2 operations in 2 us, from 1 to 8."""
    seconds = np.array([[[[2e-6, 1e-6, 8e-6, 0.97]]]])
    record = invented("gemm", {}, {"cores": 2}, {
        "dtype": ["float32"], "threads": [1], "size": [16]}, {
        "seconds": Variable(seconds, "s", ("dtype", "threads", "size", "bound")),
        "rate": Variable(8192 / seconds[..., 0], "s-1", ("dtype", "threads", "size"))}, [])
    table, _ = micro_tables.make_parts([record])
    assert [str(cell) for cell in table.rows[0]] == ["16", "4.1", "1.0", "8.2"]


def test_a_kind_that_is_not_known_still_gets_a_table():
    record = Measurements("something", {"layers": 2}, {"cores": 2}, {
        "size": [8, 16], "repetition": range(3), "bound": ("median", "low", "high", "confidence")},
        {"samples": Variable(np.ones((2, 3)), "s", ("size", "repetition")),
         "seconds": Variable(np.array([[2, 1, 3, 0.9]] * 2), "s", ("size", "bound")),
         "rate": Variable(np.array([5.0, 6.0]), "s-1", ("size",)),
         "total": Variable(np.array(7.0), "byte", ())}, [])
    sizes, total, notes = micro_tables.make_parts([record])
    assert [column.full for column in sizes.columns] == [
        "size", "seconds (s) median", "seconds (s) low", "seconds (s) high", "rate (s-1)"]
    assert [[str(cell) for cell in row] for row in sizes.rows] == [
        ["8", "2", "1", "3", "5"], ["16", "2", "1", "3", "6"]]
    assert [str(cell) for cell in total.rows[0]] == ["7"] and "layers 2" in notes.items[0]


def test_a_folder_of_microbenchmarks_alone_has_tables(tmp_path):
    run_file.write_run(matmul_record(), tmp_path, "matmul")
    later = replace(matmul_record(2.0), created="2999-01-01T00:00:00+00:00")
    later.configuration["seed"] = 5
    run_file.write_run(later, tmp_path, "matmul")
    text = format_tables(tmp_path)
    assert "Table 1" not in text
    # Of two runs of the same product the latest is shown.
    assert text.count("abt 64 x 32 x 16  ") == 2 and " 8.000 " in text and " 4.000 " in text


FORMATS = (Machine, Level, Achieved, Curve, Line, ModelFile, Rules, Rule)


@pytest.mark.parametrize("kind", FORMATS)
def test_a_docstring_tells_all_fields_and_no_other(kind):
    """Also whether each is optional, which fields told together share."""
    heads = [head for line in describe_fields(kind)
             if (head := HEAD.fullmatch(line.removeprefix("  ")))]
    told = {name: head[2].endswith("; optional")
            for head in heads for name in head[1].split(", ")}
    assert told == {field.name: not field.required for field in msgspec.structs.fields(kind)}


def test_all_parts_of_a_format_are_told():
    """No class that a file may contain is left out of `FORMATS`."""
    inner = {one for kind in FORMATS for field in msgspec.structs.fields(kind)
             for one in (field.type, *typing.get_args(field.type))
             if isinstance(one, type) and issubclass(one, msgspec.Struct)}
    assert inner and inner <= set(FORMATS)


@pytest.mark.parametrize("option, said", [
    ("machine", "Fields of node and network:"), ("model", "layers, hidden, heads"),
    ("rules", "Fields of each table of rules:")])
def test_help_prints_a_format_and_a_file_that_has_it(option, said, capsys):
    assert main(["plan", f"--{option}", "help"]) == 0
    text = capsys.readouterr().out
    assert said in text and 'name = "' in text or 'title = "' in text


@pytest.mark.parametrize("text, said", [
    ("layer = 3", "; did you mean layers?"),
    ('name = "m"\nlayers = 2', "missing required fields hidden, heads, vocab, seq"),
    ('name = "m"\nlayers = 2\nhidden = 8\nheads = 2\nvocab = "9"\nseq = 4',
     "vocab: a whole number would do, not a text"),
    ("layers = = 2", "Invalid value")])
def test_a_wrong_model_file_is_told_in_words(tmp_path, text, said):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError) as error:
        load_model(str(path))
    line = str(error.value)
    assert line.startswith(f"model file {path}: ") and said in line and "\n" not in line


def test_a_file_that_is_no_table_of_fields(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('title = "t"\nsource = "s"\nbatches = "b"\nrules = 3')
    with pytest.raises(UsageError, match="rules: a list would do, not a whole number"):
        load_rules(str(path))
