"""Call sbatch, squeue, sacct and scontrol, with a message for each kind of failure."""

import contextlib
import os
import re
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterable

from mm3d.child_process import CHILDREN_PRINT

LIMIT = 60    # seconds for an answer: sbatch retries a full queue for minutes
SHORT_LIMIT = 20    # seconds for an answer about a single job

# Variables by which a user changes what Slurm's commands print and do, and in which a job inherits
# its own options.  The commands here get none but `KEPT`: where Slurm is, and who asks.
VARIABLES = ("SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCONTROL_", "SLURM_")
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")

# States that a job does not leave any more.
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL",
         "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "TIMEOUT")
REVOKED = "REVOKED"    # of a job that another cluster of a federation has taken
UNKNOWN_STATE = "UNKNOWN"    # of a job, where no command says whether it has ended

# Slurm's own lines; wrappers of its commands may print others.
SUBMITTED = re.compile(r"^\s*(\d+(?:;[\w.-]+)?)\s*$", re.M)
QUEUED = re.compile(r"^(\d+(?:[_+]\d+)?)\|([A-Z_]+)\|(.*)$", re.M)
SHOWN = re.compile(r"\bJobState=(\w+)")
ACCOUNTED = re.compile(r"^([A-Z_]{4,})(?: by \S+)?$", re.M)
FORGOTTEN = re.compile(r"Invalid job id|Job [\d_+]+ not found")    # a job that ended long ago
IN_DOUBT = re.compile("did not end|timed out|transmitted", re.I)    # sbatch's answer was lost


class SlurmError(Exception):
    """Raised when Slurm refuses, does not answer in time, or is not installed."""


@dataclass(frozen=True)
class JobState:
    """State of a job, such as RUNNING, and the reason why it waits or is unknown.

    The name is "" for a job that Slurm has forgotten, minutes after its end.
    """

    name: str
    reason: str

    @property
    def ended(self) -> bool:
        """True if the job has ended or Slurm has forgotten it; False otherwise, or if unknown."""
        return not self.name or self.name in ENDED


@dataclass(frozen=True)
class Queue:
    """This user's waiting and running jobs, as clusters report them.

    `jobs` are by job as `submit_script` returns it, elements of arrays as 12_3; `silent` says why
    clusters gave no answer, "" if a job without a cluster may be there.
    """

    jobs: dict[str, JobState] = field(default_factory=dict)
    silent: dict[str, str] = field(default_factory=dict)

    def state(self, job: str) -> JobState:
        """Return the state of a job: in the queue, final, forgotten or unknown."""
        if job in self.jobs:
            return self.jobs[job]
        if cluster_of_job(job) in self.silent:
            return JobState(UNKNOWN_STATE, self.silent[cluster_of_job(job)])
        return look_up(job)


def run_command(*command: str, limit: float = LIMIT) -> str:
    """Run one of Slurm's commands; return its output.

    SlurmError when there is no such command, it fails, or it takes too long.
    """
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(VARIABLES) or name in KEPT}
    try:
        done = subprocess.run(command, capture_output=True, encoding=CHILDREN_PRINT,
                              errors="replace", timeout=limit, env=env,
                              stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise SlurmError(f"there is no {command[0]} on PATH: is this a login node of a cluster "
                         "with Slurm?") from error
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode(errors="replace").strip().splitlines()
        raise SlurmError(f"{command[0]} did not end within {limit:g} seconds"
                         f"{': ' + said[-1] if said else ''}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()
        said = [line for line in said if re.search("error|fatal|fail", line, re.I)] or said
        raise SlurmError(said[-1] if said else f"{command[0]} ended with {done.returncode}")
    return done.stdout + (done.stderr if "--test-only" in command else "")


def submit_script(script: Path, *options: str, limit: float = LIMIT) -> str:
    """Submit a script; return the job's number, with its cluster where sbatch says it: 12;here.

    SlurmError as from `run_command`, and when sbatch prints no number.  Where it may have taken
    the job the message says so.
    """
    doubt = f"look with squeue whether it has taken {script.name}, and cancel it"
    try:
        text = run_command("sbatch", "--parsable", *options, str(script), limit=limit)
    except SlurmError as error:
        if IN_DOUBT.search(str(error)):
            raise SlurmError(f"{error}; {doubt}") from error
        raise
    found = SUBMITTED.findall(text)
    if not found:
        raise SlurmError(f"sbatch printed no number of a job, but {text.strip()!r}; {doubt}")
    return found[-1]


def number_of_job(job: str) -> str:
    """Return the number of a job on its cluster, which an element of an array has too: 12_3."""
    return job.partition(";")[0]


def cluster_of_job(job: str) -> str:
    """Return the cluster of a job; "" for this one."""
    return job.partition(";")[2]


def on_cluster(cluster: str) -> list[str]:
    """Return the option by which Slurm's commands ask a cluster."""
    return [f"--clusters={cluster}"] * bool(cluster)


def test_script(script: Path) -> str:
    """Ask Slurm when it would run a script, without submitting it."""
    lines = run_command("sbatch", "--test-only", str(script)).strip().splitlines() or [""]
    own = [line for line in lines if line.startswith("sbatch: Job ")]
    return (own or lines)[-1].removeprefix("sbatch: ")


def read_queue(clusters: Iterable[str] = ("",), homes: Iterable[str] = ("",)) -> Queue:
    """Read this user's waiting and running jobs from `clusters`; "" is this one.

    In `homes` may be jobs without a cluster.
    """
    queue = Queue()
    for cluster in clusters:
        names = [cluster, *[""] * (cluster in homes)]
        try:
            # All: also in partitions that are hidden.
            text = run_command("squeue", "--noheader", "--array", "--all",
                               f"--user={os.geteuid()}", "--format=%i|%T|%r",
                               *on_cluster(cluster))
        except SlurmError as error:
            queue.silent.update(dict.fromkeys(names, str(error)))
            continue
        for number, state, reason in QUEUED.findall(text):
            for name in names if state != REVOKED else []:
                queue.jobs.setdefault(f"{number};{name}".rstrip(";"), JobState(state, reason))
    return queue


def look_up(job: str, limit: float = SHORT_LIMIT) -> JobState:
    """Look up the state of a job that squeue does not show: ended, or another user's."""
    number, cluster = number_of_job(job), on_cluster(cluster_of_job(job))
    name, problem = "", ""
    try:
        text = run_command("scontrol", *cluster, "--oneliner", "show", "job", number,
                           limit=limit)
        name = (SHOWN.findall(text) or [""])[-1]
        problem = f"scontrol says nothing of job {job}"
    except SlurmError as error:
        problem = "" if FORGOTTEN.search(str(error)) else str(error)
    if name in ("", REVOKED):
        with contextlib.suppress(SlurmError):    # without a database it fails
            text = run_command(
                "sacct", *(cluster or ["--federation"]), "--noheader", "--allocations",
                "--parsable2", "--format=State", f"--jobs={number}", limit=limit)
            name = (ACCOUNTED.findall(text) or [name])[-1]
    if problem and not name:
        return JobState(UNKNOWN_STATE, problem)
    return JobState(name, "squeue does not show it")
