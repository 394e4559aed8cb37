"""Call sbatch, squeue, sacct and scontrol, with a message for each kind of failure."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

LIMIT = 60    # seconds for an answer: sbatch retries a full queue for minutes


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
    # A job inherits its own options in these variables; the jobs that it submits have others.
    env = {name: value for name, value in os.environ.items()
           if not name.startswith(("SBATCH_", "SLURM_")) or name == "SLURM_CONF"}
    limit = limit or LIMIT
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit, env=env,
                              stdin=subprocess.DEVNULL)
    except FileNotFoundError as error:
        raise SlurmError(f"there is no {command[0]} on PATH: is this a login node of a cluster "
                         "with Slurm?") from error
    except subprocess.TimeoutExpired as error:
        said = (error.stderr or b"").decode().strip().splitlines()
        raise SlurmError(f"{command[0]} did not end within {limit:g} seconds"
                         f"{': ' + said[-1] if said else ''}") from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise SlurmError(said[-1] if said else f"{command[0]} ended with {done.returncode}")
    return done.stdout + (done.stderr if "--test-only" in command else "")


def submit(script: Path, *options: str) -> str:
    """Submit a script; return the job's number."""
    return run_command("sbatch", "--parsable", *options, str(script)).strip().partition(";")[0]


def test_only(script: Path) -> str:
    """Ask Slurm when it would run a script, without submitting it."""
    return run_command("sbatch", "--test-only", str(script)).strip().removeprefix("sbatch: ")


def read_queue() -> dict[str, State]:
    """Read this user's waiting and running jobs, by number; elements of arrays as 12_3."""
    lines = run_command("squeue", "--noheader", "--array", f"--user={os.geteuid()}",
                        "--format=%i|%T|%r").splitlines()
    return {number: State(state, reason)
            for number, state, reason in (line.split("|", 2) for line in lines)}


def job_ending(job: str) -> str:
    """Return the final state of a job, such as TIMEOUT; "" if Slurm no longer knows it."""
    for command in (("sacct", "--noheader", "--allocations", "--parsable2", "--format=State",
                     f"--jobs={job}"), ("scontrol", "--oneliner", "show", "job", job)):
        try:
            text = run_command(*command, limit=20).strip()
        except SlurmError:
            continue    # without a database sacct fails, and scontrol forgets after minutes
        if command[0] == "sacct" and text:
            return text.split()[0]
        for word in text.split():
            if word.startswith("JobState="):
                return word.removeprefix("JobState=")
    return ""
