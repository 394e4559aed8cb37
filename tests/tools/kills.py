"""Kill a running reproduction at random moments, and go on.

After each kill every row that was ever finished must be there, unchanged and readable; what is
begun again must not measure a finished row again; and at last it must come to its end.
"""
import hashlib
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

from bench.records import run_file
from bench.records.journal import JOURNAL, read_entries
from support import ROOT, clean_environment

ROWS = ("--preset", "tiny", "--scheme", "1d-sp", "--ranks", "1,2,3", "--repetitions", "2",
        "--max-repetitions", "2")    # six rows, three jobs


def started(folder: Path, *options: str) -> subprocess.Popen:
    """A reproduction in a process group of its own."""
    command = [sys.executable, "-m", "bench", "reproduce", *ROWS, *options, "--out", str(folder)]
    return subprocess.Popen(command, cwd=ROOT, env=clean_environment(), start_new_session=True,
                            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                            stderr=subprocess.STDOUT, text=True)


def killed(folder: Path, seconds: float, begun: bool, *options: str) -> bool:
    """Kill a reproduction after so many seconds, unless it has ended; whether it was killed.

    They count from its start, or from the moment that the journal tells that it has `begun`.
    """
    journal = folder / JOURNAL
    before = journal.stat().st_size if journal.exists() else 0
    process = started(folder, *options)
    while begun and process.poll() is None and (
            not journal.exists() or journal.stat().st_size == before):
        time.sleep(0.01)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
    output = process.communicate()[0]
    assert process.returncode in (0, -signal.SIGKILL), output
    return process.returncode != 0


def check(folder: Path, seen: dict[str, str]) -> None:
    """All that is finished is there, whole, as it was `seen` before, and once in each order."""
    found = {path.name: path for path in folder.glob("*.h5")}
    assert seen.keys() <= found.keys(), seen.keys() - found.keys()
    times = Counter()
    for name, path in found.items():
        run = run_file.read_run(path)
        digest = hashlib.blake2b(path.read_bytes()).hexdigest()
        assert seen.setdefault(name, digest) == digest, name
        times[run.configuration["order"], name.rpartition("-tiny-")[0]] += 1
    assert set(times.values()) <= {1}, times
    for entry in read_entries(folder / JOURNAL):
        if entry["event"] == "row":
            assert entry["outcome"] == "done" and entry["line"].split()[-1] in found, entry


def kill_and_go_on(folder: Path, kills: int, seed: int, longest: float) -> list[str]:
    """Kill so many reproductions, by turns within `longest` seconds of their start and of the
    moment that they have begun; then let one end.  Return the events of the journal."""
    draw, seen, dead = random.Random(seed), {}, 0
    while dead < kills:
        fresh = ["--fresh"] * (draw.random() < 0.2)    # so that rows are being measured
        dead += killed(folder, draw.uniform(0.3, longest), dead % 2 == 1, *fresh)
        check(folder, seen)
    process = started(folder)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    check(folder, seen)
    entries = read_entries(folder / JOURNAL)
    begin = [entry for entry in entries if entry["event"] == "begin"][-1]
    rows = [path for path in folder.glob("*.h5")
            if run_file.read_run(path).configuration["order"] == begin["order"]]
    assert len(rows) == 6 == len(begin["rows"])
    assert entries[-1]["event"] == "end" and entries[-1]["outcome"] == "complete"
    assert not [*folder.glob("*.part")]
    return [entry["event"] for entry in entries]
