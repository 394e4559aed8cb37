"""The page of all results: whole and safe; and what the end of a reproduction prints."""

import re
import shutil
import subprocess
from html.parser import HTMLParser
from urllib.parse import unquote
from xml.etree import ElementTree

import pytest

from bench.__main__ import main
from bench.cases.paper import load_tables, title
from bench.cases.selection import select_rows
from bench.document import Notes
from bench.records import run_file
from bench.records.folder import read_folder
from bench.reports import finish
from bench.reports.finish import warning_notes, write_page
from records import draw_only, emulated_run, made_up, matmul_record, wait_for_work, write_all


class Page(HTMLParser):
    """What a page refers to, its elements, and its text."""

    def __init__(self, path):
        super().__init__()
        self.references, self.tags, self.words = [], [], []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.references += [(tag, name, value) for name, value in attributes
                            if name in ("src", "href", "srcset", "data", "action", "poster")]
        assert not any(name.startswith("on") for name, _ in attributes)

    def handle_data(self, data):
        self.words.append(data)

    @property
    def text(self):
        return " ".join(" ".join(self.words).split())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("machine")
    write_all(folder, oversubscribed=True)
    run_file.write_run(matmul_record(), folder, "matmul")
    (folder / "cut.h5").write_bytes(b"\x89HDF\r\n\x1a\nno more")
    write_page(read_folder(folder))
    return folder


@pytest.fixture(scope="module")
def page(folder):
    return Page(folder / "report.html")


def test_nothing_is_fetched(folder, page):
    for tag, name, value in page.references:
        assert value.startswith("#") or tag == "a" or (
            (tag, name) == ("img", "src") and value.startswith("data:image/svg+xml,")), (
            tag, name, value[:40])
    assert not {"script", "link", "iframe", "object", "embed", "base"} & set(page.tags)
    source = (folder / "report.html").read_text()
    style = source[source.index("<style>"):source.index("</style>")]
    assert "url(" not in style and "@import" not in style and "prefers-color-scheme" in style


def test_figures_are_whole_in_their_urls(page):
    """No character of a figure ends its URL, or its attribute, early."""
    urls = [value for tag, _, value in page.references if tag == "img"]
    assert len(urls) >= 3 and not any(set(url) & set("#\n\t\"") for url in urls)
    for url in urls:
        drawn = ElementTree.fromstring(unquote(url.partition(",")[2], errors="strict"))
        assert drawn.tag == "{http://www.w3.org/2000/svg}svg" and len(list(drawn.iter())) > 100


def test_all_rows_figures_and_warnings_are_there(page):
    for row in load_tables().rows:
        assert f" {row.forward:.3f} " in page.text and f" {row.backward:.3f} " in page.text
    assert "missing" not in page.text
    assert "abt 64 x 32 x 16" in page.text
    assert page.tags.count("img") >= 3 and page.tags.count("caption") >= 7
    warnings = page.text[:page.text.index("Preset laptop")]
    assert "NOT SCALING RESULTS: in 18 of 18 rows" in warnings
    assert "WARNING: the one process was bound to 1 of 2 cores" in warnings
    assert page.tags.count("details") == 18 and page.text.count("MFU") >= 18
    assert "cut.h5" in page.text and "Some CPU" in page.text and "Some MPI 1.0" in page.text
    assert "the median of at least 3 repetitions after 2 to warm up" in page.text


def test_notes_that_begin_in_capitals_are_warnings():
    warnings = ["NOT SCALING RESULTS: none.", "STOPPED EARLY (signal): 0 of 7 steps."]
    assert warning_notes([Notes("", [*warnings, "Times: MPI.", "MPI: a name (C)"])]) == [
        *warnings, "MPI: a name (C)"]


def test_figures_come_first_and_runs_in_the_order_of_the_paper(tmp_path, monkeypatch):
    """In whatever order they were measured; a row with another's batch beside its own."""
    draw_only(monkeypatch, "words-per-rank")
    rows = [*reversed(select_rows("strong", "1d,3d")), *reversed(select_rows("weak", "1d,3d"))]
    for k, row in enumerate([*rows, rows[-1]]):
        run = made_up(row, created=f"2030-01-02T03:04:{k:02d}+00:00")
        run.configuration.update({"equal_tokens": "3d"} if k == len(rows) else {})
        run_file.write_run(run, tmp_path, str(k))
    source = write_page(read_folder(tmp_path))[0].read_text()
    assert 0 < source.index('id="figures"') < source.index('id="results"') < source.index(
        'id="each"')
    first, *others = [f"{row.table} {title(row.scheme)} {row.gpus} ranks, laptop"
                      for row in rows[::-1]]
    assert re.findall(r"<summary>(.*)</summary>", source) == [
        first, f"{first}, batch of 3-D", *others]


# Writes into the title which cells of a page are outside of it, or of what scrolls.
OUTSIDE = """<script>document.title = "outside:" + [...document.querySelectorAll(
"th, td, caption")].filter(cell => cell.getBoundingClientRect().right > 1 + Math.min(
document.documentElement.clientWidth, cell.closest(".wide").getBoundingClientRect().right)
).map(cell => cell.textContent.slice(0, 40)).join(";")</script>"""
BROWSERS = "chromium", "chromium-browser", "google-chrome", "google-chrome-stable"


@pytest.mark.parametrize("width", [1280, 1920])
def test_every_column_is_inside_the_page(tmp_path, folder, width):
    """As a browser lays it out, with all that is folded open."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if not browser:
        pytest.skip(f"needs a browser: one of {', '.join(BROWSERS)} on the PATH")
    opened = tmp_path / "opened.html"
    source = (folder / "report.html").read_text().replace("<details>", "<details open>")
    opened.write_text(source.replace("</body>", f"{OUTSIDE}</body>"))
    done = subprocess.run(
        [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom",
         f"--user-data-dir={tmp_path}/home", f"--window-size={width},900", opened.as_uri()],
        capture_output=True, text=True, timeout=120)
    found = re.search("<title>outside:(.*?)</title>", done.stdout, re.DOTALL)
    assert found, done.stderr[-2000:]
    assert found[1] == ""


HOSTILE = '<script>alert("x")</script><img src=x onerror=alert(1)> \' & {{ 7 * 7 }} $x_{ ../'


def test_hostile_text_in_a_record_is_only_text(tmp_path, monkeypatch):
    draw_only(monkeypatch, "average-step-time")    # whose panel names the preset
    run = made_up(select_rows("weak", "3d")[0])
    run.environment.update(cpu_model=HOSTILE, command=HOSTILE, mpi="</style>" + HOSTILE)
    run.configuration["preset"] = HOSTILE
    run_file.write_run(run, tmp_path, "weak")
    record = matmul_record()
    record.configuration["form"] = HOSTILE
    run_file.write_run(record, tmp_path, "matmul")
    page = Page(write_page(read_folder(tmp_path), tmp_path / "page.html")[0])
    assert "script" not in page.tags and page.tags.count("style") == 1
    assert {value for tag, name, value in page.references if tag == "img"
            and not value.startswith("data:")} == set()
    assert page.text.count(HOSTILE) >= 5    # in tables, headings, environment and runs


def test_the_verb_says_where_the_page_is(tmp_path, capsys):
    folder, out = tmp_path / "few", tmp_path / "page.html"
    folder.mkdir()
    run_file.write_run(matmul_record(), folder, "matmul")
    write_page(read_folder(folder))
    assert main(["report", str(folder), "--page", "--out", str(out)]) == 0
    assert main(["report", *map(str, folder.glob("*.h5")), "--page"]) == 0    # beside the file
    assert capsys.readouterr().out.split() == [str(out), str(folder / "report.html")]
    assert out.read_text() == (folder / "report.html").read_text()
    for wrong in (tmp_path / "no" / "page.html", tmp_path, out / "page.html"):
        assert main(["report", str(folder), "--page", "--out", str(wrong)]) == 2
        assert capsys.readouterr().err.startswith(f"error: --out {wrong}: a file in a folder that")
    assert main(["report", str(tmp_path), "--page"]) == 2
    assert re.search("error: no results in .*", capsys.readouterr().err)


def ends(text):
    """The lines on what figures show, each in one."""
    notes = text.partition("What these figures show, and what not:\n")[2].partition("\n\n")[0]
    return " ".join(notes.split()).split(" - ")


def test_a_summary_is_printed_and_all_tables_are_written(tmp_path, monkeypatch, capsys):
    draw_only(monkeypatch, "roofline")
    write_all(tmp_path, oversubscribed=True)
    finish.write_tables_and_figures(tmp_path)
    text = capsys.readouterr().out
    *lines, last = text.splitlines()
    assert last == (f"all tables: {tmp_path}/tables.txt; page: {tmp_path}/report.html; figures: "
                    "none") and lines[-1].startswith("not drawn: roofline-laptop: ")
    assert len(lines) < 75 and (tmp_path / "report.html").stat().st_size > 1000
    assert [line[:24] for line in lines if line.startswith("Table ")] == [
        "Table 1, weak scaling, p", "Table 2, strong scaling,", "Table 1, weak scaling: s",
        "Table 2, strong scaling:"]
    first, *others = (line.removeprefix("- ") for line in ends(text))
    assert first.startswith("NOT SCALING RESULTS: up to 64 ranks take turns on ")
    assert len(others) == 4 and others[0].startswith("Shown: ") and "Not shown" in others[0]
    # The verb prints everything, and so does the file.
    assert main(["report", str(tmp_path)]) == 0
    everything = capsys.readouterr().out
    assert everything == (tmp_path / "tables.txt").read_text()
    assert len(everything.splitlines()) > 2 * len(lines)


def test_of_an_emulated_cluster_ratios_stand_beside_predictions(tmp_path, capsys):
    for row in (one for one in load_tables().rows if one.gpus == 64):
        run = made_up(row, preset="emulated", oversubscribed=True)
        wait_for_work(run, "longhorn", 1600.0, 8.0)
        run.environment["emulated_cluster"] = "16x4:50Mbit"
        run_file.write_run(run, tmp_path, f"{row.table}-{row.scheme}")
    finish.write_tables_and_figures(tmp_path, figures=False)
    text = capsys.readouterr().out
    assert text.splitlines()[-1] == f"all tables: {tmp_path}/tables.txt"
    for column in ("published", "machine's", "predicted", "emulated", "low", "high"):
        assert column in text
    first, *others = (line.removeprefix("- ") for line in ends(text))
    assert first.startswith("EMULATED CLUSTER: 16 nodes x 4 ranks, 50 Mbit/s on 32 cores; ranks ")
    assert main(["report", str(tmp_path)]) == 0
    assert "shrunk by 8 and times 1600, in which" in " ".join(capsys.readouterr().out.split())
    assert len(others) == 4 and "an unknown share of 2-D on 64 ranks, weak" in others[1]
    assert others[2].startswith("* Table 1, weak scaling, 3-D on 64 GPUs: the paper prints")


def test_a_mark_is_explained_where_it_is_and_nowhere_else(tmp_path, capsys):
    """With the share of each row; not the average that the paper prints for another row."""
    for row in (one for one in select_rows("weak") if one.gpus == 8):
        run_file.write_run(emulated_run(row, 1.0, software=0.252 if row.scheme == "1d" else 0.2),
                           tmp_path, row.scheme)
    finish.write_tables_and_figures(tmp_path, figures=False)
    text = " ".join(capsys.readouterr().out.split())
    assert "of a step of rows whose ratios have a *" in text and (
        "not to be quoted: 25.2% of 1-D on 8 ranks, weak. " in text)
    assert "the paper prints" not in text


def test_rows_that_were_not_slowed_for_software_are_said_to_be(tmp_path, capsys):
    """Where no share was asked for, none is exceeded."""
    for row in (one for one in select_rows("weak") if one.gpus == 8):
        run = emulated_run(row, 1.0)
        run.configuration["software_share"] = 0.0
        run_file.write_run(run, tmp_path, row.scheme)
    finish.write_tables_and_figures(tmp_path, figures=False)
    text = " ".join(capsys.readouterr().out.split())
    assert ("links and waits were not slowed until software takes little of a step, in rows "
            "whose ratios have a *, which are not to be quoted: ") in text
    assert "0% of a" not in text


def test_the_preset_that_was_measured_last_is_shown(tmp_path, monkeypatch, capsys):
    """And a file that cannot be read is named once: printed, in the tables and on the page."""
    draw_only(monkeypatch, "roofline")
    row = select_rows("weak", "3d")[0]
    for preset, year in (("tiny", 2031), ("laptop", 2030)):
        run_file.write_run(made_up(row, preset=preset, created=f"{year}-01-01T00:00:00+00:00"),
                           tmp_path, preset)
    (tmp_path / "broken.h5").write_bytes(b"nothing")
    assert finish.write_tables_and_figures(tmp_path) == 1
    text, error = capsys.readouterr()
    assert error.startswith(f"left out: {tmp_path}/broken.h5 ") and error.count("\n") == 1
    for name in ("tables.txt", "report.html"):
        written = (tmp_path / name).read_text()
        assert written.count("Left out:") == written.count("broken.h5") == 1
    assert "preset tiny" in text and "preset laptop" not in text and "strong" not in text
    assert "speed-up" not in text and "broken.h5" not in text
    assert ends(text)[0].startswith("- Every rank had a core of its own.")
