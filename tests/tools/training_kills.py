"""Kill a training at random moments, and go on.

After each kill, of all processes at once or of one rank, what the history says of every step must
be, to the bit, what a training says that was never killed, and at last the newest checkpoints are
the same.  A job of which one rank was killed must end by itself within 10 seconds.

Where a folder can be mounted, the jobs have a /dev/shm of their own.  A job that was not killed
leaves it empty, and what others leave there, ``bench doctor --clean`` finds.  A training that has
come to its end leaves nothing of the checkpoints that were being written.
"""
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np

from bench.instruments.leftover_memory import abandoned_segments, remove_segments
from bench.records.journal import read_entries
from mm3d import launcher
from mm3d.checkpoints.folder import checkpoints
from support import ROOT, clean_environment, processes_of

STEPS, PATIENCE = 60, 10.0    # the latter in seconds
OPTIONS = ("--layers", "2", "--hidden", "16", "--heads", "2", "--batch", "4", "--seq", "8",
           "--steps", str(STEPS), "--lr-warmup", "5", "--dropout", "0.1",
           "--data", "2", "--zero", "2", "--microbatches", "2", "--save-every", "3",
           "--validate-every", "7")
SCHEMES = {2: "serial", 4: "1d"}    # by the number of ranks
MOUNT = ["unshare", "-m", "sh", "-c", 'mount --bind "$0" /dev/shm && exec "$@"']


class Job:
    """A training on some ranks in a folder, with the folder beside it as /dev/shm."""

    def __init__(self, folder: Path, ranks: int):
        self.folder, self.history = folder, folder / "saved" / "history.jsonl"
        self.memory = folder.with_suffix(".shm")    # its /dev/shm
        self.memory.mkdir(exist_ok=True)
        self.output = open(folder.with_suffix(".log"), "w+")
        mount = [*MOUNT, str(self.memory)]
        can_mount = shutil.which(mount[0]) and not subprocess.run(
            [*mount, "true"], stderr=subprocess.DEVNULL).returncode
        command = mount * bool(can_mount) + launcher.mpirun_command(
            ranks, sys.executable, "-m", "bench", "train", *OPTIONS, "--scheme", SCHEMES[ranks],
            "--checkpoints", str(folder / "saved"), "--out", str(folder / "out"))
        self.process = subprocess.Popen(
            command, cwd=ROOT, env=clean_environment(), start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=self.output, stderr=subprocess.STDOUT)
        self.history_lines = len(self.lines())

    def wait_for_lines(self, more: int) -> None:
        """Wait until the history has so many lines more, or the job has ended."""
        wanted = self.history_lines + more
        while self.process.poll() is None and len(self.lines()) < wanted:
            time.sleep(0.005)

    def ranks(self) -> list[int]:
        """The processes of its ranks."""
        return processes_of(lambda words: str(self.folder / "saved") in words)

    def kill(self, one: bool) -> bool:
        """Kill its last rank, or all of it; whether it was still running."""
        ranks, running = self.ranks(), self.process.poll() is None
        with contextlib.suppress(ProcessLookupError):    # it has just ended
            if not (one and ranks):
                os.killpg(self.process.pid, signal.SIGKILL)
            for rank in ranks[-1:] if one else ranks:
                os.kill(rank, signal.SIGKILL)
        return running

    def wait(self, seconds: float | None = None) -> int:
        """Wait for its end, and for that of its ranks."""
        status = self.process.wait(seconds)
        end = time.monotonic() + PATIENCE
        while self.ranks():
            assert time.monotonic() < end, "ranks are left"
            time.sleep(0.02)
        self.output.close()
        return status

    def lines(self) -> list[dict]:
        """The history, without the seconds of steps; a line that was cut short is left out."""
        return [{key: value for key, value in entry.items() if key != "seconds"}
                for entry in read_entries(self.history)]


def arrays(folder: Path) -> dict[str, np.ndarray]:
    """All arrays of the newest checkpoint, by h5py alone."""
    found = {}
    with h5py.File(checkpoints(folder)[-1] / "index.h5") as index:
        for kind in ("parameters", "optimizer"):
            index[kind].visititems(lambda name, item: found.update(
                {f"{kind}/{name}": item[()]}) if isinstance(item, h5py.Dataset) else None)
    return found


def kill_at_some_moment(job: Job, draw: random.Random, begins: float) -> bool:
    """Kill a job, or one of its ranks, while it begins or after some steps; whether it ran."""
    if draw.random() < 0.3:
        with contextlib.suppress(subprocess.TimeoutExpired):
            job.process.wait(draw.uniform(0, begins))
    else:
        job.wait_for_lines(draw.randint(1, 15))
        time.sleep(draw.uniform(0, 0.05))
    return job.kill(one=draw.random() < 0.4)


def train_and_kill(folder: Path, kills: int, seed: int = 0, ranks: int = 2) -> int:
    """Kill trainings so many times; return how many of them came to their end in spite of it."""
    draw, killed, complete = random.Random(seed), 0, 0
    folder.mkdir(exist_ok=True)
    whole, begin = Job(folder / "whole", ranks), time.monotonic()
    whole.wait_for_lines(1)
    begins = time.monotonic() - begin
    assert whole.wait() == 0, (folder / "whole.log").read_text()
    assert not [*whole.memory.iterdir()]
    expected = {json.dumps(line) for line in whole.lines()}
    weights = arrays(folder / "whole" / "saved")
    while killed < kills:
        own, status = folder / f"killed{complete}", 1
        while status:
            job = Job(own, ranks)
            dead = killed < kills and kill_at_some_moment(job, draw, begins)
            status = job.wait(PATIENCE if dead else None)
            assert dead or not status, own.with_suffix(".log").read_text()
            killed += dead
            wrong = [line for line in job.lines() if json.dumps(line) not in expected]
            assert not wrong, wrong
        assert {json.dumps(line) for line in job.lines()} == expected
        found = arrays(own / "saved")
        assert found.keys() == weights.keys() and all(
            np.array_equal(a, weights[name]) for name, a in found.items())
        remove_segments(abandoned_segments(job.memory))    # of killed jobs; nothing else is left
        left = [*job.memory.iterdir(), *(own / "saved").glob(".step-*")]
        assert not left, left
        complete += 1
    return complete
