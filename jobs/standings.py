"""Record submitted jobs, and find which rows are done, under way or failed, and why."""

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from bench.cases.case import Case
from bench.cases.variants import recorded_variant
from bench.errors import StoreError, UsageError
from bench.records import journal, model_run, run_file
from jobs import slurm
from jobs.scripts import Work

DONE, RUNNING, WAITING = "done", "running", "waiting"
STOPPED, FAILED, MISSING = "stopped early", "failed", "not submitted"
UNDER_WAY = (RUNNING, WAITING)


@dataclass(frozen=True)
class Standing:
    """State of a row, its last job, and the reason of a failure."""

    case: Case
    state: str
    job: str = ""
    reason: str = ""


@contextlib.contextmanager
def locked(work: Work) -> Iterator[None]:
    """Lock the folder of scripts: a second submission waits, and then sees the jobs of the first.

    Raises
    ------
    UsageError
        When the file system of the results has no locks.
    """
    run_file.check_folder(work.folder)
    with open(work.folder / "lock", "w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise UsageError(f"--out {work.out}: its file system cannot lock files "
                             f"({error.strerror}); choose a folder on another") from error
        yield


def record_submission(work: Work, case: Case, job: str) -> None:
    """Record that `case` was submitted as `job`.

    Raises
    ------
    StoreError
        When it cannot be recorded; the message names the job, which is in the queue.
    """
    path, number = submissions_file(work), job.partition("_")[0]
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            journal.append_entry(file, {"row": case.name, "job": job})
        finally:
            os.close(file)
    except OSError as error:
        raise StoreError(
            f"job {job}, {case.title}, is in the queue, but {path} could not be written "
            f"({error.strerror}): scancel {number}, make room, and submit again") from error


def read_submitted(work: Work) -> dict[str, str]:
    """Read the last job of each row, by the row's name."""
    path = submissions_file(work)
    entries = journal.read_entries(path) if path.exists() else []
    return {entry["row"]: entry["job"] for entry in entries if {"row", "job"} <= entry.keys()}


def submissions_file(work: Work) -> Path:
    """Return the path of the file of submitted jobs, with a line for each row and job."""
    return work.folder / "submitted.jsonl"


def list_results(work: Work, case: Case) -> list[tuple[Path, model_run.Run]]:
    """List the readable files of a row, of its jobs and collected, with the sizes of its preset.

    If a policy of recomputation is chosen, only files measured with it are listed.
    """
    found = []
    for folder in (work.runs(case), work.out):
        for path in sorted(folder.glob(f"{case.name}-*.h5")):
            with contextlib.suppress(StoreError):    # an unreadable file counts as missing
                run = run_file.read_run(path)
                if (isinstance(run, model_run.Run) and not run.configuration["overridden"]
                        and (recorded_variant(run.configuration).arguments()
                             == case.variant.arguments())
                        and work.recompute in (None, run.configuration.get("recompute", "none"))):
                    found.append((path, run))
    return found


def list_standings(work: Work, cases: list[Case], queue: dict[str, slurm.State]) -> list[Standing]:
    """Find the standing of each row, given the jobs in the queue."""
    jobs = read_submitted(work)
    return [_standing(work, one, jobs.get(one.name, ""), queue) for one in cases]


def _standing(work: Work, case: Case, job: str, queue: dict[str, slurm.State]) -> Standing:
    found = [run for _, run in list_results(work, case)]
    whole = [run for run in found if run.ended_by != "stopped"]
    if whole:
        return Standing(case, DONE, job, f"{len(whole[-1].samples['forward'])} repetitions")
    if job in queue:
        state = queue[job]
        waits = state.name in ("PENDING", "CONFIGURING")
        return Standing(case, WAITING if waits else RUNNING, job, state.reason if waits else
                        state.name.lower() * (state.name != "RUNNING"))
    if found:
        return Standing(case, STOPPED, job, f"with {len(found[-1].samples['forward'])} "
                                            "repetitions, as its time was over")
    if job:
        return Standing(case, FAILED, job, explain_failure(work, case, job))
    return Standing(case, MISSING)


def explain_failure(work: Work, case: Case, job: str) -> str:
    """Explain why a job has no result, by the words of Slurm, of the script and of its log."""
    parts = [slurm.job_ending(job)]
    own = work.runs(case) / f"ended-{job}"
    if own.exists():
        parts.append(own.read_text().strip())
    for log in (work.folder / "logs").glob(f"*-{job}.out"):
        lines = log.read_text(errors="replace").splitlines()
        telling = [line for line in lines if line.startswith(("failed", "error:", "slurmstepd:"))
                   and not line.endswith(", see the log")]
        parts += [" ".join(line.split()) for line in telling[:1]]
    return "; ".join(dict.fromkeys(filter(None, parts))) or "it ended without a word"
