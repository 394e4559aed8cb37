"""Figures are the same whatever a user's matplotlib is set to; what is not drawn is a line."""
import contextlib
import os
import shutil
import subprocess
import sys
from importlib import resources
from pathlib import Path

import matplotlib
import pytest

from bench.__main__ import main
from bench.cases.selection import select_rows
from bench.errors import UsageError
from bench.records import run_file
from bench.records.folder import read_folder
from bench.reports.figures import roofline_and_memory, style
from bench.reports.finish import write_page, write_tables_and_figures
from records import draw_only, made_up
from support import ROOT

RC = """
text.usetex: True
font.family: serif
font.size: 30
figure.dpi: 37
savefig.dpi: 40
savefig.format: pdf
savefig.bbox: tight
savefig.transparent: True
axes.formatter.use_locale: True
backend: nonsense
svg.fonttype: none
path.sketch: 1, 100, 2
"""


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    """Pictures without settings of a user."""
    folder = tmp_path_factory.mktemp("plain")
    run_file.write_run(made_up(select_rows("weak", "3d")[0]), folder, "weak")
    with contextlib.chdir(folder):
        exec(DRAW, {})
    return folder


DRAW = """
from bench.__main__ import main
from bench.records.folder import read_folder
from bench.reports.figures import every_figure, style
figures = [one for one in every_figure.make_drawings(read_folder(".")) if "step" in one.name]
drawn, left_out = style.save_drawings(figures, style.Path(), ("svg",))
assert len(drawn) == 1 and not left_out
assert main(["cube", "--grid=2x1x1", "--out", "cube.png"]) == 0
"""


def pictures(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()
            if path.suffix in (".png", ".svg")}


@pytest.mark.slow_but_first
@pytest.mark.parametrize("place, value", [
    ("MPLBACKEND", "module://matplotlib_inline.backend_inline"), ("settings", RC),
    ("settings", b"\xff\xfe nothing"), ("working folder", RC.replace("backend: nonsense", ""))])
def test_settings_of_the_user_change_no_figure(plain, tmp_path, place, value):
    folder, settings = tmp_path / plain.name, tmp_path / "settings"
    folder.mkdir()
    [run] = plain.glob("*.h5")
    (folder / run.name).symlink_to(run)
    variables = {"MPLBACKEND": value}
    if place != "MPLBACKEND":
        where = settings if place == "settings" else folder
        where.mkdir(exist_ok=True)
        (where / "matplotlibrc").write_bytes(value if isinstance(value, bytes)
                                             else value.encode())
        variables = {} if where == folder else {"MPLCONFIGDIR": str(where),
                                                "MATPLOTLIBRC": str(where)}
        for fonts in Path(matplotlib.get_cachedir()).glob("fontlist-*.json"):
            shutil.copy(fonts, where)    # a search for them takes long, and is said after 5 s
    done = subprocess.run([sys.executable, "-c", DRAW], cwd=folder, text=True,
                          capture_output=True, env=os.environ | variables)
    assert done.returncode == 0 and not done.stderr, done.stderr
    assert len(pictures(plain)) == 2 and pictures(folder) == pictures(plain)


def test_variables_and_settings_of_a_program_stay(monkeypatch):
    monkeypatch.setenv("MPLBACKEND", "svg")
    monkeypatch.delenv("MATPLOTLIBRC", raising=False)
    with matplotlib.rc_context({"font.size": 31}):
        with style.figure_style():
            assert matplotlib.rcParams["font.size"] == 9
        assert matplotlib.rcParams["font.size"] == 31
    assert os.environ["MPLBACKEND"] == "svg" and "MATPLOTLIBRC" not in os.environ


@pytest.fixture
def one_run(tmp_path, monkeypatch):
    """A folder with a run, of which two figures are drawn."""
    run_file.write_run(made_up(select_rows("weak", "3d")[0]), tmp_path, "weak")
    draw_only(monkeypatch, "average-step-time", "roofline")
    return tmp_path


class Unwritable:
    """A figure that matplotlib cannot write."""

    def savefig(self, *_, **__):
        raise RuntimeError("no\n  letters")


def test_a_figure_that_cannot_be_drawn_is_one_line(one_run, monkeypatch, capsys):
    """The others are drawn, and what is printed and written beside them is not lost."""
    monkeypatch.setattr(roofline_and_memory, "draw_roofline", lambda _: Unwritable())
    write_tables_and_figures(one_run)
    said, line = capsys.readouterr(), "not drawn: roofline-laptop: RuntimeError: no letters\n"
    assert said.err == line and said.out.endswith("; figures: average-step-time-laptop.png\n")
    assert (one_run / "average-step-time-laptop.png").exists()
    assert "RuntimeError: no letters" in (one_run / "report.html").read_text()
    for more in ([], ["--figures"]):    # each is said once
        assert main(["report", str(one_run), "--page", *more]) == 1
        assert capsys.readouterr().err == line


def test_figures_that_are_drawn_are_named_where_the_page_cannot_be_written(
        one_run, capsys):
    (one_run / "report.html").mkdir()
    assert main(["report", str(one_run), "--figures", "--page"]) > 0
    assert "average-step-time-laptop.png\n" in capsys.readouterr().out


def test_an_error_of_the_program_is_not_hidden(one_run, monkeypatch, capsys):
    """Only the end of a run that has measured goes on, after it is printed."""
    draw_only(monkeypatch, "average-step-time", drawn_by="against_ranks.nothing")
    for draw_all in (lambda: main(["report", str(one_run), "--figures"]),
                     lambda: write_page(read_folder(one_run))):
        with pytest.raises(AttributeError, match="nothing"):
            draw_all()
    capsys.readouterr()
    write_tables_and_figures(one_run)
    assert "AttributeError: module 'bench" in capsys.readouterr().err
    assert (one_run / "tables.txt").exists()


def test_a_style_that_cannot_be_read_is_one_line(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(resources, "files", lambda _: tmp_path)    # without a style file
    assert main(["cube", "--grid=2x1x1", "--out", str(tmp_path / "a.png")]) == 1
    said = capsys.readouterr().err
    assert said.startswith("not drawn: ") and said.count("\n") == 1


def test_a_picture_that_cannot_be_written_is_one_line(capsys):
    assert main(["cube", "--grid=2x1x1", "--format=csv", "--out", "/dev/null/a.png"]) == 1
    said = capsys.readouterr()
    assert said.err == "not drawn: /dev/null/a.png cannot be written (Not a directory)\n"
    assert said.out.startswith("table,step,")    # the steps are not lost


def test_a_wrong_ending_is_refused_before_anything_is_drawn():
    with pytest.raises(UsageError, match=r"a.jpg: a picture's name ends in .png, .svg or .pdf"):
        style.save_picture("a.jpg", lambda: pytest.fail("it was drawn"))


def test_pictures_after_one_that_fails_are_drawn(tmp_path, capsys):
    def fails():
        raise style.NoFigure("for a reason")
    assert style.draw_pictures([fails, lambda: tmp_path]) == 1
    said = capsys.readouterr()
    assert said == (f"{tmp_path}\n", "not drawn: for a reason\n")


def test_without_matplotlib_tables_are_written(tmp_path):
    """A program that nothing was drawn in, in a folder whose matplotlib is broken."""
    results = tmp_path / "results"
    results.mkdir()
    run_file.write_run(made_up(select_rows("weak", "3d")[0]), results, "weak")
    (tmp_path / "matplotlib").mkdir()
    (tmp_path / "matplotlib" / "__init__.py").write_text("raise ImportError('no matplotlib')")
    done = subprocess.run(
        [sys.executable, "-m", "bench", "report", "results", "--figures"], cwd=tmp_path, text=True,
        capture_output=True, env=os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"})
    assert done.returncode == 1
    assert {line.split(": ", 2)[2] for line in done.stderr.splitlines()} == {
        "ImportError: no matplotlib"}
