"""What is printed at the end of a reproduction, and what is written."""
from bench.__main__ import main
from bench.cases.paper import load_tables
from bench.cases.selection import select_rows
from bench.records import run_file
from bench.reports import finish
from records import draw_only, emulated_run, made_up, wait_for_work, write_all


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
