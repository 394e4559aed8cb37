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
from bench.records.journal import NAME, read_entries
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
    journal = folder / NAME
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


class Watch:
    """What was found in a folder before, and must stay as it was."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.seen = folder, {}

    def check(self) -> None:
        """All that is finished is there, whole, unchanged, and once in each reproduction."""
        found = {path.name: path for path in self.folder.glob("*.h5")}
        assert self.seen.keys() <= found.keys(), self.seen.keys() - found.keys()
        times = Counter()
        for name, path in found.items():
            run = run_file.read_run(path)
            digest = hashlib.blake2b(path.read_bytes()).hexdigest()
            assert self.seen.setdefault(name, digest) == digest, name
            times[run.configuration["order"], name.rpartition("-tiny-")[0]] += 1
        assert set(times.values()) <= {1}, times
        for entry in self.journal():
            if entry["event"] == "row":
                assert entry["outcome"] == "done" and entry["line"].split()[-1] in found, entry

    def journal(self) -> list[dict]:
        """The entries of the journal that are whole."""
        path = self.folder / NAME
        return read_entries(path) if path.exists() else []


def kill_and_go_on(folder: Path, kills: int, seed: int, longest: float) -> dict[str, int]:
    """Kill so many reproductions, by turns within `longest` seconds of their start and of the
    moment that they have begun; then let one end."""
    draw, watch, count = random.Random(seed), Watch(folder), Counter()
    while count["kills"] < kills:
        fresh = ["--fresh"] * (draw.random() < 0.2)    # so that rows are being measured
        dead = killed(folder, draw.uniform(0.3, longest), count["kills"] % 2 == 1, *fresh)
        count["kills" if dead else "ended"] += 1
        watch.check()
    process = started(folder)
    output = process.communicate()[0]
    assert process.returncode == 0, output
    watch.check()
    events = [entry["event"] for entry in watch.journal()]
    last = len(events) - events[::-1].index("begin") - 1
    begin = watch.journal()[last]
    runs = [run_file.read_run(path) for path in folder.glob("*.h5")]
    rows = [run for run in runs if run.configuration["order"] == begin["order"]]
    assert len(rows) == 6 == len(begin["rows"]) and events[-1] == "end"
    assert watch.journal()[-1]["outcome"] == "complete"
    left = [path.name for path in folder.iterdir() if path.name.endswith(".part")]
    assert not left, left
    return {**count, "begun": events.count("begin"), "resumed": events.count("resume"),
            "files": len(runs)}
