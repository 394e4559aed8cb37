"""Provide the facts for the checks of ``bench doctor``: requirements, and reports of child jobs.

Only ranks can see some of them, so a child job (`bench.doctor.census`) reports these under a time
limit.  It may hang or crash without taking the doctor with it.
"""

import contextlib
import json
import re
import signal
import sys
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from bench.doctor.census import CENSUS_MARK
from mm3d import launcher, shared_room
from mm3d.child_process import CHILDREN_PRINT, run_child

TIMED_OUT = "timeout"    # the status of a child job that a script has ended at its limit

# What Open MPI says between two lines of dashes; Python's exceptions, also behind a rank number;
# the stack of an MPICH, whose last line names the cause; what a launcher says of the ranks that it
# ends after one has failed, and an MPI of itself; and other lines that may name an error.
BLOCK = re.compile(r"^-{20,}\n(.*?)^-{20,}$", re.M | re.S)
EXCEPTION = re.compile(r"(^|[:>\]] ?)[\w.]*(Error|Exception): ")
STACK = re.compile(r"^\w+\(\d+\)\.*: *\w")
FOLLOWING = re.compile(r"^\[(proxy|mpiexec)|CANCELLED AT|step aborted|forcing job|got SIGCONT|"
                       r"Terminat(ing|ed) StepId|Exited with|: (Terminated|Killed)\b|exited with "
                       r"non-zero status|Local abort before MPI_INIT|error occurred in MPI_Init")
TELLING = re.compile("[Ee]rror|[Ss]ignal|[Ss]egmentation")


@dataclass(frozen=True)
class Facts:
    """The requirements of a user, and the reports of the child jobs.

    Attributes
    ----------
    launcher : list of str
        The command that starts that many ranks, without the program.
    ranks_per_node, gpus_per_node : int
        The most ranks and the fewest GPUs on a node; 0 for any number.
    backend : str or None
        The array library that the ranks must be able to use.
    device_buffers : bool
        Whether MPI must read device memory itself.
    folder : str or None
        The folder of results, which must be writable.
    limit : float
        Seconds that a child job may take.
    seen : Path or None
        The folder with the output of child jobs that a script has run; then `launcher` only
        serves messages.
    clean : bool
        Whether to remove the shared memory that killed jobs have left here.
    """

    ranks: int
    launcher: list[str]
    ranks_per_node: int = 0
    gpus_per_node: int = 0
    backend: str | None = None
    device_buffers: bool = False
    variables: dict[str, str] = field(default_factory=dict)
    modules: list[str] = field(default_factory=list)
    folder: str | None = None
    limit: float = 60.0
    seen: Path | None = None
    clean: bool = False

    @cached_property
    def census(self) -> tuple[list[list[dict[str, Any]]], str]:
        """The reports of all ranks, a list for each world that was started; and the problem."""
        return self.run_child_job("census", *self.variables)

    @property
    def world(self) -> list[dict[str, Any]]:
        """The reports of the ranks of one world of the size required; empty if there is none."""
        worlds = self.census[0]
        return worlds[0] if [len(ranks) for ranks in worlds] == [self.ranks] else []

    @property
    def sees_gpus(self) -> bool:
        """True if a rank sees a GPU."""
        return any(rank["gpus"] for rank in self.world)

    def run_child_job(self, report: str, *words: str) -> tuple[list[Any], str]:
        """Run `bench.doctor.census` under the launcher: the report of each world, the problem."""
        if self.seen:
            return self.read_child_job(report)
        command = [*self.launcher, sys.executable, "-m", "bench.doctor.census", report, *words]
        try:
            child = run_child(command, self.limit, env=launcher.environment_to_start(command),
                              with_parent=True)
        except OSError as error:
            return [], f"cannot be started: {error.strerror}"
        problem = describe_failure(child.status, child.err, self.limit)
        if child.status is None and launcher.in_slurm_step() and "srun" in command[0]:
            problem += (", as srun within a step waits for the step's own cores: run doctor "
                        "in the job's script, or under salloc")
        hint = shared_room.hint(self.ranks)
        if child.status and hint and shared_room.SHARED_FOLDER not in problem:
            problem += f"; {hint}"
        return _parse_reports(child.out), problem

    def read_child_job(self, report: str) -> tuple[list[Any], str]:
        """Read the output of a child job that a script has run: REPORT.out, .err and .status."""
        try:
            out, err, text = ((self.seen / f"{report}.{end}").read_text(CHILDREN_PRINT, "replace")
                              for end in ("out", "err", "status"))
        except OSError as error:
            return [], f"was not started: {error.filename}: {error.strerror}"
        if not text.strip():
            return _parse_reports(out), "left no status, as on a full disk"
        status = None if text.strip() == TIMED_OUT else int(text)
        return _parse_reports(out), describe_failure(status, err, self.limit)


def _parse_reports(out: str) -> list[Any]:
    """Return the report of each world from the output of a child job, but those cut short."""
    found = []
    for line in out.splitlines():
        if CENSUS_MARK in line:
            with contextlib.suppress(ValueError):
                found.append(json.loads(line.partition(CENSUS_MARK)[2]))
    return found


def describe_failure(status: int | None, output: str, limit: float) -> str:
    """Describe how a child job failed, with the last line of its output that explains it.

    It is "" for status 0; for others see `mm3d.child_process.ChildResult`.
    """
    if status == 0:
        return ""
    said = _last_error(output)
    if status is None:
        return f"did not end within {limit:g} seconds{f': {said}' if said else ''}"
    how = f"signal {-status}" if status < 0 else f"status {status}"
    if status - 128 in set(signal.Signals):    # a shell's, and srun's, number for a signal
        how += f" ({signal.Signals(status - 128).name})"
    return f"ended with {how}: {said or 'it said nothing'}"


def _last_error(output: str) -> str:
    """Return the line of a child job's output that explains its failure best; "" for none."""
    # A traceback stands between dashes that are no pair, as of several ranks.
    output = BLOCK.sub(lambda block: block[0] if "Traceback" in block[1] else " ".join(
        block[1].split()), output)
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    lines = [line for line in lines if not FOLLOWING.search(line)] or lines
    found = ([line for line in lines if EXCEPTION.search(line)]
             or [line for line in lines if STACK.search(line)]
             or [line for line in lines if TELLING.search(line)] or lines or [""])
    return found[-1][:200]
