"""Reproductions that are stopped, killed, or in each other's way."""
import json
import multiprocessing
import os
import re
import resource
import signal
from types import SimpleNamespace

import pytest
from mpi4py import MPI

from bench.__main__ import main, parser
from bench.cases import selection
from bench.cases.case import make_case
from bench.cases.selection import select_rows
from bench.cases.variants import Variant
from bench.errors import StoreError, UsageError
from bench.experiments.rows import reproduction, resume
from bench.records import journal
from bench.records.journal import Journal
from bench.verbs import reproduce as reproduce_verb, run
from kills import kill_and_go_on, started
from support import run_python, run_ranks

FORK = multiprocessing.get_context("fork")
SMALL = ("--preset", "tiny", "--scheme", "1d-sp", "--repetitions", "2", "--max-repetitions", "2")


def entries(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / journal.JOURNAL).read_text().splitlines()]


def reproduce(folder, *options: str):
    return run_python("-m", "bench", "reproduce", *SMALL, "--ranks", "1", *options, "--out",
                      str(folder))


@pytest.mark.slow
@pytest.mark.limit(300)
def test_kills_lose_nothing_finished(tmp_path):
    events = kill_and_go_on(tmp_path, kills=3, seed=3, longest=2.5)
    assert events.count("begin") + events.count("resume") >= 2


def unfinished(folder) -> None:
    """Make of a reproduction that has ended one that was killed before its last row."""
    lines = (folder / journal.JOURNAL).read_text().splitlines(keepends=True)
    (folder / journal.JOURNAL).write_text("".join(lines[:-2]))
    os.unlink(folder / json.loads(lines[-2])["line"].split()[-1])


@pytest.fixture
def reproduce_here(tmp_path, monkeypatch, capsys):
    """``bench reproduce`` into `tmp_path` in this process, jobs of one rank too, without figures;
    what it printed."""
    def measure(cases, words, progress):
        rows = ",".join(f"{one.row.table}:{one.row.scheme}" for one in cases)
        arguments = parser(["run"]).parse_args(["run", f"--rows={rows}", *words])
        assert run.run(arguments, MPI.COMM_SELF) == 0
        for line in capsys.readouterr().out.splitlines():
            progress.row(line)

    def reproduce(*options: str) -> str:
        assert main(["reproduce", *SMALL, "--ranks", "1", *options, "--out", str(tmp_path)]) == 0
        claimed.pop().close()
        return capsys.readouterr().out

    def claim(folder):
        claimed.append(Journal(folder))
        return claimed[-1]
    claimed: list[Journal] = []
    monkeypatch.setattr(reproduce_verb, "Journal", claim)
    monkeypatch.setenv(journal.ENTRY_ENV, "")    # is set, and unset after the test
    monkeypatch.setenv("MPI_LOCALNRANKS", "1")
    monkeypatch.setattr(reproduce_verb, "measure_cases", measure)
    monkeypatch.setattr(reproduce_verb, "write_tables_and_figures", lambda *_, **__: 0)
    return reproduce


@pytest.mark.slow
def test_what_is_finished_is_not_measured_again_with_the_same_settings(tmp_path, reproduce_here):
    reproduce_here()
    first = {path.name for path in tmp_path.glob("*.h5")}
    unfinished(tmp_path)
    out = reproduce_here()
    assert "1 row of it measured before" in out and out.count("done: ") == 1
    assert len(first & {path.name for path in tmp_path.glob("*.h5")}) == 1
    assert len(list(tmp_path.glob("*.h5"))) == 2
    assert [e["event"] for e in entries(tmp_path)] == ["begin", "row", "resume", "row", "end"]
    # What came to its end is not gone on with; nor is what has other settings.
    out = reproduce_here()
    assert out.count("done: ") == 2 and len(list(tmp_path.glob("*.h5"))) == 4
    unfinished(tmp_path)
    out = reproduce_here("--dtype", "float64")
    assert out.count("done: ") == 2, out
    assert "beginning anew, because of: dtype float64 instead of float32\n" in out
    unfinished(tmp_path)
    out = reproduce_here("--dtype", "float64", "--fresh")
    assert out.count("done: ") == 2 and "anew" not in out


@pytest.mark.slow
def test_a_precise_reproduction_has_rounds_and_goes_on_with_the_last(tmp_path, reproduce_here):
    assert reproduce_here("--precise").count("done: ") == 6
    begun = [e["settings"]["round"] for e in entries(tmp_path) if e["event"] == "begin"]
    assert begun == [1, 2, 3]
    unfinished(tmp_path)
    out = reproduce_here("--precise")
    assert "round 3 of 3" in out and "round 2" not in out and out.count("done: ") == 1
    assert len(list(tmp_path.glob("*.h5"))) == 6
    unfinished(tmp_path)
    out = reproduce_here()
    assert "because of: round None instead of 3\n" in out and out.count("done: ") == 2


def test_rounds_follow_each_other():
    settings = {"seed": 0}
    log = []

    def next_round(**changes):
        return resume.next_round(log, settings | changes, 3)
    assert next_round() == 1
    for number in (1, 2, 3):
        log.append({"event": "begin", "at": "2030", "order": 1, "rows": ["a"],
                    "settings": settings | {"round": number}})
        assert next_round() == number and next_round(seed=1) == 1
        log.append({"event": "end", "outcome": "stopped"})
        assert next_round() == number
        log.append({"event": "end", "outcome": "complete"})
        assert next_round() == number % 3 + 1
    log.append({"event": "begin", "at": "2030", "order": 1, "rows": [], "settings": settings})
    assert next_round() == 1


def test_further_rounds_have_the_rows_of_the_most_ranks():
    cases = [make_case(row, "tiny") for row in select_rows("all", "3d")]
    assert [one.row.gpus for one in reproduce_verb.most_ranks(cases)] == [64, 64]


@pytest.mark.slow
def test_a_damaged_row_is_measured_again(tmp_path, reproduce_here):
    reproduce_here()
    unfinished(tmp_path)
    path, = tmp_path.glob("*.h5")
    os.truncate(path, path.stat().st_size // 2)
    assert reproduce_here().count("done: ") == 2


@pytest.mark.slow
def test_a_part_of_what_was_begun_does_not_complete_it(tmp_path, reproduce_here):
    """Of two rows none is measured, then each alone is asked for."""
    assert "still to measure" not in reproduce_here()
    for path in tmp_path.glob("*.h5"):
        path.unlink()
    lines = (tmp_path / journal.JOURNAL).read_text().splitlines(keepends=True)
    (tmp_path / journal.JOURNAL).write_text(lines[0])
    out = reproduce_here("--table", "weak")
    assert entries(tmp_path)[-1]["outcome"] == "incomplete"
    assert re.search(r"still to measure of what was begun at \S+ UTC: 1 row,", out)
    assert (journal.unfinished_reproduction(entries(tmp_path)).rows
            == tuple(entries(tmp_path)[0]["rows"]))
    out = reproduce_here("--table", "strong")
    assert entries(tmp_path)[-1]["outcome"] == "complete"
    assert "yet" not in out and len(list(tmp_path.glob("*.h5"))) == 2


def test_what_is_asked_for_later_is_of_the_reproduction_too():
    begin = {"event": "begin", "at": "2030", "order": 3, "settings": {}, "rows": ["a", "b"]}
    again = {"event": "resume", "order": 3, "rows": ["b", "c"]}
    assert journal.unfinished_reproduction([begin, again]).rows == ("a", "b", "c")
    assert journal.unfinished_reproduction([begin, again, begin]).rows == ("a", "b")
    end = {"event": "end", "outcome": "complete"}
    assert journal.unfinished_reproduction([begin, end]) is None


@pytest.mark.parametrize("words, without, left", [
    ("reproduce --fresh --out x", " without --fresh", "reproduce --out x"),
    ("reproduce --table weak -- ", "", "reproduce --table weak --")])
def test_the_command_that_measures_the_others(words, without, left):
    assert reproduce_verb.command_for_rest(words.split()) == (
        f"the same command{without} measures the others:\n  python -m bench {left}")


@pytest.mark.parametrize("sign, name", [
    (signal.SIGTERM, "SIGTERM"),
    pytest.param(signal.SIGINT, "SIGINT", marks=pytest.mark.slow)])
def test_a_signal_ends_it_with_what_is_there(tmp_path, sign, name):
    process = started(tmp_path)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if "done: " in line:
            process.send_signal(sign)
            break
    output = "".join(lines) + process.communicate()[0]
    assert process.returncode == 128 + sign, output
    there = len(list(tmp_path.glob("*.h5")))
    assert f"{name}: " in output and "of 6 rows are in" in output
    assert "the same command measures the others:\n  python -m bench reproduce --preset" in output
    table = "Table 1, weak scaling" if "done: weak" in line else "Table 2, strong scaling"
    assert table in output and (tmp_path / "tables.txt").exists()
    last = entries(tmp_path)[-1]
    assert last["event"] == "end" and last["outcome"] == "stopped" and 1 <= there < 6
    assert (journal.unfinished_reproduction(entries(tmp_path)).order
            == entries(tmp_path)[0]["order"])


def test_a_signal_that_comes_while_it_is_awaited_is_heard(monkeypatch):
    handle, before = signal.signal, signal.getsignal(signal.SIGTERM)

    def and_then(number, handler):
        handle(number, handler)
        if handler is not before and number == signal.SIGTERM:
            os.kill(os.getpid(), number)
    monkeypatch.setattr(signal, "signal", and_then)
    progress = SimpleNamespace(close=lambda: closed.append(True))
    closed: list[bool] = []
    assert str(reproduction.measure_cases([], [], progress)) == "SIGTERM"
    assert closed and signal.getsignal(signal.SIGTERM) is before


@pytest.mark.slow
def test_two_in_one_folder(tmp_path):
    holder = Journal(tmp_path)
    holder.claim()
    for done in (reproduce(tmp_path),
                 run_ranks(2, "-m", "bench", "run", *SMALL, "--out", str(tmp_path)),
                 run_python("-m", "bench", "measure", "gemm", "--sizes", "8", "--out",
                            str(tmp_path))):
        assert done.returncode == 2 and done.stderr.count("error: ") == 1
        assert f"{tmp_path} is in use: another run or reproduce" in done.stderr
    holder.close()


def hold(folder, pipe) -> None:
    Journal(folder).claim()
    pipe.send("held")
    signal.pause()


def test_a_claim_ends_with_its_process(tmp_path):
    told, pipe = FORK.Pipe(duplex=False)
    process = FORK.Process(target=hold, args=(tmp_path, pipe))
    process.start()
    assert told.recv() == "held"
    mine = Journal(tmp_path)
    with pytest.raises(StoreError, match="in use"):
        mine.claim()
    process.kill()
    process.join()
    mine.claim()
    mine.close()


@pytest.mark.parametrize("line", [
    '{"event": "row", "row": "b', "[" * 10 ** 5, '{"event": "begin", "rows": 3}', '{"event": []}',
    '{"event": "begin", "order": Infinity}', '{"event": "begin", "at": 3}',
    '{"event": "begin", "settings": 3}'])
def test_entries_that_were_cut_short_or_are_of_another_kind_are_left_out(tmp_path, line):
    log = Journal(tmp_path)
    log.write("row", row="a")
    with open(log.path, "a") as file:
        file.write(line)
    log.write("row", row="c")
    assert [entry["row"] for entry in log.entries()] == ["a", "c"]
    log.close()


def write_with_limit(folder, size: int, pipe) -> None:
    """Two entries where no file may have more than `size` bytes; tell what is there."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    log = Journal(folder)
    for row in ("first", "second" * 100):
        log.write("row", row=row)
    pipe.send([entry["row"] for entry in log.entries()])


def test_a_full_disk_ends_nothing(tmp_path):
    told, pipe = FORK.Pipe(duplex=False)
    process = FORK.Process(target=write_with_limit, args=(tmp_path, 300, pipe))
    process.start()
    assert told.recv() == ["first"]
    process.join()


def test_ranks_that_no_row_has(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("MPI_LOCALNRANKS", "1")
    assert main(["reproduce", "--preset", "tiny", "--scheme", "3d", "--ranks", "7", "--out",
                 str(tmp_path)]) == 2
    assert ("--ranks 7: no row of --table all --scheme 3d has so many: 8, 64 would do"
            in capsys.readouterr().err)


@pytest.mark.parametrize("named", ["weak:3d", "weak:3d,strong:3d"])
def test_rows_of_other_rank_counts(named):
    """What would do is named, and rows beside those that fit are left out."""
    arguments = parser(["run"]).parse_args(["run", "--rows", named])
    rows = selection.rows_by_name(named, 4)
    with pytest.raises(UsageError) as caught:
        run.make_cases(rows, 4, arguments, Variant())
    assert str(caught.value) == (
        f"no row of --rows {named} is for 4 ranks: there are rows for 8, 64 ranks, as in mpirun "
        "-n 8 python -m bench run")
    found = run.make_cases(selection.rows_by_name(named, 64), 64, arguments, Variant())
    assert [one.row.gpus for one in found] == [64] * len(named.split(","))
    own, = run.make_cases(selection.rows_by_name("weak:1d-sp", 5), 5, arguments, Variant())
    assert own.row.gpus == 5
    arguments = parser(["run"]).parse_args(["run", "--scheme", "2d"])
    with pytest.raises(UsageError, match="no row of --table all --scheme 2d is for 1 rank: .*the "
                                         "launcher started worlds of one"):
        run.make_cases(select_rows("all", "2d"), 1, arguments, Variant())


def test_a_row_is_there_once_however_often_it_is_named():
    for named, wanted in (("weak:3d,weak:3d", "weak:3d"), ("weak:all,weak:3d", "weak:all"),
                          ("weak:1d-sp,weak:1d-sp", "weak:1d-sp")):
        assert selection.rows_by_name(named, 8) == selection.rows_by_name(wanted, 8)
    assert select_rows("weak,weak", "1d-sp,1d-sp", 8) == select_rows("weak", "1d-sp", 8)


@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("options, message", [
    (["--rows", "weak:1d-sp", "--table", "strong"], "--rows weak:1d-sp --table strong: leave one"),
    (["--rows", "weak:1d-sp", "--scheme", "3d"], "--rows weak:1d-sp --scheme 3d: leave one"),
    (["--rows", "weak"], "--rows weak: give a table and a scheme, as in weak:3d"),
    (["--rows", ","], "--rows : give a table and a scheme")])
def test_rows_are_named_in_one_way(comm, options, message):
    arguments = parser(["run"]).parse_args(["run", "--out", "/dev/null/out", *options])
    with pytest.raises(UsageError, match=message):
        run.run(arguments, comm)


@pytest.mark.ranks(1, slow=(4,))
def test_rows_that_are_left_out_are_said(comm, shared_tmp_path, capfd):
    arguments = parser(["run"]).parse_args([
        "run", *SMALL[:2], *SMALL[4:], "--rows", "weak:1d-sp,strong:2d,weak:3d,strong:2d",
        "--out", str(shared_tmp_path)])
    assert run.run(arguments, comm) == 0
    said = capfd.readouterr().out.splitlines()
    said, done = said[:2], said[2:]
    expected = [f"left out: {pair} of --rows, which has no row for {comm.size} "
                f"rank{'s' * (comm.size > 1)}: its rows are for {counts}"
                for pair, counts in (("strong:2d", "16, 36, 64"), ("weak:3d", "8, 64"))]
    assert said == (expected if comm.rank == 0 else [])
    assert [line.partition(":")[0] for line in done] == ["done"] * (comm.rank == 0)
