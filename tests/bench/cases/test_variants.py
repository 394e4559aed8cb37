"""Rows with options are rows of their own: never merged with, nor taken for, the plain ones."""
import argparse
import sys
from dataclasses import asdict

import numpy as np
import pytest

import mm3d
from bench.__main__ import main, parser
from bench.cases import variants
from bench.cases.case import make_case
from bench.cases.selection import select_rows
from bench.cases.variants import Variant
from bench.checks import against_serial, tolerances
from bench.command_line import row_options
from bench.errors import UsageError
from bench.experiments.rows import resume
from bench.records import run_file
from bench.records.folder import results_by_preset, read_folder
from bench.records.journal import Reproduction
from bench.reports.figures.every_figure import make_drawings
from bench.reports.formats import render
from bench.reports.paper_tables import make_document
from jobs import scripts, site, standings as books
from jobs.__main__ import main as jobs_main
from jobs.scripts import JobSettings
from mm3d.arrays import backend
from mm3d.arrays.numpy_backend import NumpyBackend
from records import made_up, wait_for_work
from reference import fits
from support import run_ranks

ROW = select_rows("weak", "3d")[0]
VARIANTS = [Variant(), Variant(keep="weight"), Variant(keep="both"), Variant(overlap=True),
            Variant(causal=True), Variant(dtype="float16"), Variant(dtype="bfloat16"),
            Variant(dtype="float64"), Variant(tf32=True), Variant(work="wait"),
            Variant("both", True, True, "bfloat16")]


def run_of(variant: Variant, seconds: float = 1.0, **more):
    """A run of a row in that variant; the plain one as files of before have it."""
    run = made_up(ROW, seconds, 2 * seconds, **more)
    if variant != Variant():
        run.configuration.update(asdict(variant))
    if variant.waits:
        wait_for_work(run, "longhorn", 1600.0, 16.0)
    return run


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: v.slug or "plain")
def test_a_variant_goes_through_file_and_command_line(tmp_path, variant):
    """What is recorded is read again; what `reproduce` passes on is what it was asked for."""
    path = run_file.write_run(run_of(variant), tmp_path, "one")
    assert variants.recorded_variant(run_file.read_run(path).configuration) == variant
    words = ["run", *variant.arguments()]
    asked = row_options.variant(parser(["run"]).parse_args(words))
    assert asked == Variant(variant.keep, variant.overlap, variant.causal, variant.dtype,
                            work=variant.work)


def test_each_has_a_name_of_its_own():
    cases = [make_case(ROW, "tiny", variant) for variant in VARIANTS]
    assert len({one.name for one in cases}) == len({one.title for one in cases}) == len(cases)
    assert (cases[0].name, cases[0].title) == ("weak-3d-p008-tiny", "weak 3-D 8 ranks")
    assert cases[-1].name == "weak-3d-p008-tiny-keep-both-overlap-causal-bfloat16"


@pytest.mark.slow
def test_tables_and_figures_show_each_apart(tmp_path):
    """Also where the variant's file is the later one; a variant has no line for what is missing
    and names itself in every heading."""
    runs = [run_of(variant, 1 + n, created=f"2030-01-01T00:00:{n:02d}+00:00")
            for n, variant in enumerate(VARIANTS)]
    found = results_by_preset(runs)
    assert len(found) == len(VARIANTS) and not any(results.earlier for results in found)
    for n, run in enumerate(runs):
        run_file.write_run(run, tmp_path, f"row-{n}")
    found = read_folder(tmp_path)
    assert found.results[0].plain and len(found.results[0].rows("weak")) == 9
    for results in found.results:
        mine = runs[VARIANTS.index(results.variant)]
        assert np.array_equal(results.get(ROW).samples["forward"], mine.samples["forward"])
    text = render(make_document(found), "text")
    for variant in VARIANTS[1:]:
        assert f"preset laptop{variant.label}" in text
        assert f"VARIANT: {', '.join(variant.words)}: these rows" in " ".join(text.split())
    assert {len(results.rows("weak")) for results in found.results[1:]} == {1}
    names = [one.name for one in make_drawings(found)]
    assert len(set(names)) == len(names)


def test_policies_of_one_row_are_apart_and_of_several_rows_are_not(tmp_path):
    """A later run that recomputes does not take the place of the plain one; where each row has
    one policy, as on a cluster, all are in the same tables."""
    other = select_rows("weak", "1d")[0]
    plain, again, third = run_of(Variant()), run_of(Variant(), 3.0), made_up(other)
    again.configuration["recompute"] = third.configuration["recompute"] = "uniform:2+selective"
    mixed, = results_by_preset([plain, third])
    assert mixed.plain and mixed.get(ROW) is plain and mixed.get(other) is third
    for n, run in enumerate((plain, again)):
        run_file.write_run(run, tmp_path, f"row-{n}")
    found = read_folder(tmp_path)
    first, second = found.results
    assert first.plain and not second.plain and first.earlier == second.earlier == 0
    assert np.array_equal(first.get(ROW).samples["forward"], plain.samples["forward"])
    assert np.array_equal(second.get(ROW).samples["forward"], again.samples["forward"])
    assert "preset laptop, recompute uniform:2+selective" in render(make_document(found), "text")
    names = [one.name for one in make_drawings(found)]
    assert len(set(names)) == len(names) and "roofline-laptop" in names
    assert "roofline-laptop-recompute-uniform-2-selective" in names


def test_a_variant_is_not_compared_with_the_plain_row(tmp_path, capsys):
    for name, variant in (("a", Variant()), ("b", Variant(causal=True))):
        (tmp_path / name).mkdir()
        run_file.write_run(run_of(variant), tmp_path / name, "row")
    assert main(["compare", str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "nothing in common" in capsys.readouterr().err


def test_a_reproduction_takes_up_rows_of_its_own_variant_alone(tmp_path):
    """Though the name of each file begins as that of the plain row does."""
    variant = Variant(causal=True)
    run = run_of(variant)
    run.configuration.update(order=7, seed=0, warmup=2, repetitions=3)
    run_file.write_run(run, tmp_path, make_case(ROW, "laptop", variant).name)
    for asked in (variant, Variant(), Variant(dtype="float16")):
        settings = {"seed": 0, "warmup": 2, "repetitions": 3, **asdict(asked)}
        old = Reproduction(7, "2000-01-01", settings, ())
        name = make_case(ROW, "laptop").name
        assert resume.is_measured(name, old, tmp_path) == (asked == variant)


def test_jobs_are_of_one_variant(tmp_path):
    work = JobSettings(site.load_site("cpu"), "cpu", tmp_path)
    variant = Variant(keep="both", causal=True)
    one = make_case(ROW, "laptop", variant)
    assert {"--keep=both", "--causal"} <= {*scripts.row_script(work, one).split()}
    run_file.write_run(run_of(variant), tmp_path, one.name)
    assert len(books.read_results(work, one)[0]) == 1
    assert not books.read_results(work, make_case(ROW, "laptop"))[0]


@pytest.mark.parametrize("words, message", [
    (["--dtype", "bfloat16"], "--dtype bfloat16: backend 'numpy' has no such type here; choose "
                              "one of float64, float32, float16, or pip install ml_dtypes for "
                              "bfloat16"),
    (["--keep", "both"], "--keep both: scheme 'serial' has no such option; choose --scheme 3d"),
    (["--overlap"], "--overlap: scheme 'serial' has no such option; choose --scheme 3d")])
def test_what_cannot_be_is_refused_in_a_line(tmp_path, capsys, words, message, monkeypatch):
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    assert main(["run", "--scheme", "serial", "--preset", "tiny", "--backend", "numpy",
                 "--out", str(tmp_path / "new"), *words]) == 2
    assert capsys.readouterr().err == f"error: {message}\n"
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", [
    [main, "run", "--scheme", "3d"], [main, "reproduce", "--scheme", "3d"],
    [jobs_main, "render", "--site", "cpu", "--scheme", "3d"]], ids=lambda words: words[1])
def test_what_selective_cannot_keep_is_refused_before_the_start(tmp_path, capsys, command):
    program, *words = command
    assert program([*words, "--preset", "tiny", "--keep", "both", "--recompute", "selective",
                    "--out", str(tmp_path / "new")]) == 2
    found = capsys.readouterr()
    assert found.err == ("error: --keep both --recompute selective: selective keeps nothing that "
                         "products gather; leave one of them out, or choose --recompute full\n")
    assert not (tmp_path / "new").exists()


@pytest.mark.slow
@pytest.mark.limit(240)
def test_a_row_with_every_option_is_measured_and_valid(tmp_path, capsys):
    words = ["--keep", "both", "--overlap", "--causal", "--dtype", "float16"]
    done = run_ranks(8, "-m", "bench", "run", "--table", "weak", "--scheme", "3d", "--preset",
                     "tiny", "--repetitions", "1", "--max-seconds", "0.1", "--out", str(tmp_path),
                     *words)
    assert done.returncode == 0, done.stderr
    assert "done: weak 3-D 8 ranks, keep both, overlap, causal, float16: " in done.stdout
    path, = tmp_path.glob("weak-3d-p008-tiny-keep-both-overlap-causal-float16-*.h5")
    assert (variants.recorded_variant(run_file.read_run(path).configuration)
            == Variant("both", True, True, "float16"))
    assert main(["validate", str(path)]) == 0, capsys.readouterr().out


# --- How strictly results in 16 bits are verified --------------------------------------------

MUTATIONS = {
    "a factor of 1.02": lambda a: a * a.dtype.type(1.02),
    "a missing term": lambda a: np.r_[a[:-1], 0 * a[-1:]] if len(a) > 1 else 0 * a,
    "a block transposed": lambda a: a[::-1].copy()}


@pytest.mark.ranks(1, 4, 8, first=(8,))
@pytest.mark.parametrize("name, layers", [("1d", 2), ("3d", 1), ("2d", 1)])
def test_wrong_gradients_in_16_bits_are_seen(comm, name, layers):
    """Nothing where nothing is wrong; each mutation of each gradient of a layer."""
    if not fits(name, comm.size):
        pytest.skip(f"{name} has no grid of {comm.size} ranks")
    sizes = mm3d.ModelSizes(layers=layers, hidden=32, heads=8, batch=8, seq=8)
    scheme = mm3d.scheme(name, comm)
    model = mm3d.Transformer(scheme, **sizes, dtype="float16", causal=True)
    y, saved = model.forward(model.random("input"))
    dx = model.backward(model.random("output gradient"), saved)

    def failed() -> list[str]:
        checks = against_serial.compare_with_serial(model, y, dx, "float16")
        return [check.quantity for check in checks if not check.passed]
    assert failed() == []
    for what, mutate in MUTATIONS.items():
        right = [p.grad.copy() for p in model.parameters]
        for p in model.parameters:
            p.grad[...] = mutate(p.grad)
        missed = {f"gradient of {p.name}" for p in model.parameters} - {*failed()}
        for p, gradient in zip(model.parameters, right):
            p.grad[...] = gradient
        assert not missed, (what, missed)
    scheme.grid.free()


def test_tolerances_are_a_few_roundings():
    """A factor of 1.02 is seen in bfloat16, of up to two layers, and of 1.003 in float16."""
    for rounding, seen in (("bfloat16", 0.02), ("float16", 0.003), ("tf32", 0.003)):
        assert max(tolerances.beside_serial(rounding, 2)) < seen
    assert tolerances.beside_serial("float32", 24) == tolerances.SERIAL["float32"]


def test_bfloat16_is_known_where_a_backend_has_it(monkeypatch):
    class Device(NumpyBackend):
        name, more_dtypes = "device", ("bfloat16",)
    monkeypatch.setitem(sys.modules, "ml_dtypes", None)
    asked = argparse.Namespace(keep="none", overlap=False, causal=False, dtype="bfloat16")
    variants.check_variant(row_options.variant(asked), ["1d"], Device())
    with pytest.raises(UsageError, match="pip install ml_dtypes"):
        variants.check_variant(row_options.variant(asked), ["1d"], backend.get("numpy"))
