"""What the checks of ``bench doctor`` go by: what is wanted, and what child jobs saw.

What only ranks can see is asked of a child job (`bench.doctor.census`) with a time limit, which
may hang or crash without taking the doctor with it.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.doctor.census import MARK
from mm3d import launcher

TIMED_OUT = (124, 137)    # of the command timeout


@dataclass
class Facts:
    """What is wanted, and what the child jobs saw.

    Attributes
    ----------
    ranks : int
        Ranks that the launcher shall start.
    launcher : list of str
        The command that starts so many, without the program.
    ranks_per_node, gpus_per_node : int
        Wanted of each node; 0 for whatever there is.
    device_buffers : bool
        Whether MPI is to read device memory itself.
    modules : list of str
        That must be loaded.
    folder : str or None
        Where results will be written.
    limit : float
        Seconds that a child job may take.
    seen : Path or None
        Where the child jobs' output lies, when somebody else has run them; then `launcher` only
        serves messages.
    clean : bool
        Whether shared memory that killed jobs have left here is removed.
    """

    ranks: int
    launcher: list[str]
    ranks_per_node: int = 0
    gpus_per_node: int = 0
    device_buffers: bool = False
    modules: list[str] = field(default_factory=list)
    folder: str | None = None
    limit: float = 60.0
    seen: Path | None = None
    clean: bool = False

    @cached_property
    def census(self) -> tuple[list[list[dict[str, Any]]], str]:
        """Of each world that came about what its ranks see; and what went wrong."""
        return self.child("census")

    @property
    def world(self) -> list[dict[str, Any]]:
        """What the ranks of the only world see; nothing when it is not the one wanted."""
        worlds = self.census[0]
        return worlds[0] if [len(ranks) for ranks in worlds] == [self.ranks] else []

    @property
    def sees_gpus(self) -> bool:
        """Whether some rank sees a GPU."""
        return any(rank["gpus"] for rank in self.world)

    def child(self, what: str) -> tuple[list[Any], str]:
        """Run `bench.doctor.census` under the launcher: what each world said, and what went
        wrong."""
        if self.seen:
            return self.kept(what)
        command = [*self.launcher, sys.executable, "-m", "bench.doctor.census", what]
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, text=True,
                stderr=subprocess.PIPE, start_new_session=True,
                env=launcher.for_launcher(command))
        except OSError as error:
            return [], f"{shlex.join(self.launcher)} cannot be started: {error.strerror}"
        try:
            out, err = process.communicate(timeout=self.limit)
            problem = "" if process.returncode == 0 else died(process.returncode, err)
        except subprocess.TimeoutExpired:
            out, problem = ended(process), f"did not end within {self.limit:g} seconds"
            if launcher.in_step() and "srun" in command[0]:
                problem += (", as srun within a step waits for the step's own cores: run doctor "
                            "in the job's script, or under salloc")
        return said(out), problem

    def kept(self, what: str) -> tuple[list[Any], str]:
        """What a child job said that somebody else has run: WHAT.out, .err and .status."""
        try:
            out, err, status = ((self.seen / f"{what}.{end}").read_text()
                                for end in ("out", "err", "status"))
        except OSError as error:
            return [], f"was not started: {error.filename}: {error.strerror}"
        if int(status) in TIMED_OUT:
            return said(out), f"did not end within {self.limit:g} seconds"
        return said(out), died(int(status), err) if int(status) else ""


def said(out: str) -> list[Any]:
    """What each world said."""
    return [json.loads(line.partition(MARK)[2]) for line in out.splitlines() if MARK in line]


def ended(process: subprocess.Popen) -> str:
    """End a job that takes too long; what it said."""
    for sign, grace in ((signal.SIGTERM, 10), (signal.SIGKILL, None)):
        try:
            os.killpg(process.pid, sign)
            return process.communicate(timeout=grace)[0]
        except (subprocess.TimeoutExpired, ProcessLookupError):
            continue
    return process.communicate()[0]


def died(status: int, err: str) -> str:
    """How a child job ended, with the last line that says something about it."""
    lines = [line.strip() for line in err.splitlines() if line.strip()]
    telling = [line for line in lines if re.search("[Ee]rror|[Ss]ignal|[Ss]egmentation", line)]
    how = f"signal {-status}" if status < 0 else f"status {status}"
    return f"ended with {how}: {(telling or lines or ['it said nothing'])[-1][:200]}"
