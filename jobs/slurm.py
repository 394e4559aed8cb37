"""Call sbatch, squeue, sacct and scontrol, with a message for each way to fail."""

import os
import subprocess
from dataclasses import dataclass
from pathlib import Path

LIMIT = 60    # seconds that an answer may take: sbatch itself tries a full queue for minutes


class SlurmError(Exception):
    """Slurm refused, did not answer in time, or is not there."""


@dataclass(frozen=True)
class State:
    """State of a job in the queue, such as RUNNING or PENDING, and why it waits."""

    name: str
    reason: str


def ask(*command: str, limit: float | None = None) -> str:
    """Run one of Slurm's commands; return its output.

    Raises
    ------
    SlurmError
        When there is no such command, it fails, or it takes too long.
    """
    # A job inherits options meant for itself; the ones it submits have their own.
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
    return ask("sbatch", "--parsable", *options, str(script)).strip().partition(";")[0]


def test_only(script: Path) -> str:
    """Ask when Slurm would run a script; nothing is submitted."""
    return ask("sbatch", "--test-only", str(script)).strip().removeprefix("sbatch: ")


def queue() -> dict[str, State]:
    """Read this user's waiting and running jobs, by number; elements of arrays as 12_3."""
    lines = ask("squeue", "--noheader", "--array", f"--user={os.geteuid()}",
                "--format=%i|%T|%r").splitlines()
    return {number: State(state, reason)
            for number, state, reason in (line.split("|", 2) for line in lines)}


def ending(job: str) -> str:
    """Ask how a job that left the queue ended, such as TIMEOUT; "" where Slurm has forgotten."""
    for command in (("sacct", "--noheader", "--allocations", "--parsable2", "--format=State",
                     f"--jobs={job}"), ("scontrol", "--oneliner", "show", "job", job)):
        try:
            text = ask(*command, limit=20).strip()
        except SlurmError:
            continue    # without a database sacct fails, and scontrol forgets after minutes
        if command[0] == "sacct" and text:
            return text.split()[0]
        for word in text.split():
            if word.startswith("JobState="):
                return word.removeprefix("JobState=")
    return ""
