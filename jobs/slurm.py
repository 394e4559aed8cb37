"""Call sbatch, squeue, sacct and scontrol, with a message for each kind of failure."""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

LIMIT = 60    # seconds for an answer: sbatch retries a full queue for minutes

# Variables by which a user changes what Slurm's commands print and do, and in which a job inherits
# its own options.  None reaches the commands here, but where Slurm is, and who asks.
VARIABLES = ("SBATCH_", "SRUN_", "SALLOC_", "SQUEUE_", "SACCT_", "SCONTROL_", "SLURM_")
KEPT = ("SLURM_CONF", "SLURM_CONF_SERVER", "SLURM_JWT")

# States that a job does not leave any more.
ENDED = ("BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "LAUNCH_FAILED", "NODE_FAIL",
         "OUT_OF_MEMORY", "PREEMPTED", "RECONFIG_FAIL", "TIMEOUT")
REVOKED = "REVOKED"    # of a job that another cluster of a federation has taken

# Lines that are Slurm's; others are what wrappers of its commands print.
SUBMITTED = re.compile(r"^\s*(\d+(?:;[\w.-]+)?)\s*$", re.M)
QUEUED = re.compile(r"^(\d+(?:[_+]\d+)?)\|([A-Z_]+)\|(.*)$", re.M)
ACCOUNTED = re.compile(r"^([A-Z_]{4,})(?: by \S+)?$", re.M)


class SlurmError(Exception):
    """Raised when Slurm refuses, does not answer in time, or is not installed."""


@dataclass(frozen=True)
class State:
    """State of a job in the queue, such as RUNNING or PENDING, and the reason why it waits."""

    name: str
    reason: str


def run_command(*command: str, limit: float | None = None) -> str:
    """Run one of Slurm's commands; return its output.

    Raises
    ------
    SlurmError
        When there is no such command, it fails, or it takes too long.
    """
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(VARIABLES) or name in KEPT}
    limit = limit or LIMIT
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace",
                              timeout=limit, env=env, stdin=subprocess.DEVNULL)
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


def submit(script: Path, *options: str) -> str:
    """Submit a script; return the job's number, with its cluster where sbatch says it: 12;here.

    Raises
    ------
    SlurmError
        As from `run_command`, and when sbatch prints no number: it may have taken the job.
    """
    text = run_command("sbatch", "--parsable", *options, str(script))
    found = SUBMITTED.findall(text)
    if not found:
        raise SlurmError(f"sbatch printed no number of a job, but {text.strip()!r}; look with "
                         f"squeue whether it has taken {script.name}, and cancel it")
    return found[-1]


def number_of(job: str) -> str:
    """Return the number of a job on its cluster, which an element of an array has too: 12_3."""
    return job.partition(";")[0]


def cluster_of(job: str) -> str:
    """Return the cluster of a job; "" for this one."""
    return job.partition(";")[2]


def on_cluster(cluster: str) -> list[str]:
    """Return the option by which Slurm's commands ask a cluster."""
    return [f"--clusters={cluster}"] * bool(cluster)


def test_only(script: Path) -> str:
    """Ask Slurm when it would run a script, without submitting it."""
    lines = run_command("sbatch", "--test-only", str(script)).strip().splitlines() or [""]
    own = [line for line in lines if line.startswith("sbatch: Job ")]
    return (own or lines)[-1].removeprefix("sbatch: ")


def read_queue(*clusters: str) -> dict[str, State]:
    """Read this user's waiting and running jobs, by number; elements of arrays as 12_3.

    With `clusters` these are asked, "" for this one, and their jobs are also there with their
    cluster, as `submit` returns them.
    """
    found: dict[str, State] = {}
    for cluster in clusters or [""]:
        # All: also in partitions that are hidden.
        text = run_command("squeue", "--noheader", "--array", "--all", f"--user={os.geteuid()}",
                           "--format=%i|%T|%r", *on_cluster(cluster))
        for number, state, reason in QUEUED.findall(text):
            if state == REVOKED:
                continue
            found[f"{number};{cluster}".rstrip(";")] = State(state, reason)
            found.setdefault(number, State(state, reason))
    return found


def job_ending(job: str) -> str:
    """Return the final state of a job, such as TIMEOUT; "" if Slurm no longer knows it."""
    number, cluster, found = number_of(job), on_cluster(cluster_of(job)), ""
    # Without a database sacct fails, and scontrol forgets after minutes.
    for command, pattern in (
            (("scontrol", *cluster, "--oneliner", "show", "job", number), r"\bJobState=(\w+)"),
            (("sacct", *(cluster or ["--federation"]), "--noheader", "--allocations",
              "--parsable2", "--format=State", f"--jobs={number}"), ACCOUNTED)):
        try:
            states = re.findall(pattern, run_command(*command, limit=20))
        except SlurmError:
            continue
        found = (states or [found])[-1]
        if found not in ("", REVOKED):
            break
    return found
