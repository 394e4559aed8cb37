"""Keep books of submitted jobs: which rows are done, under way or failed, and why."""

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from bench.cases.case import Case
from bench.cases.variants import recorded_variant
from bench.errors import StoreError, UsageError
from bench.records import journal, run_file
from jobs import slurm
from jobs.scripts import Work

DONE, RUNNING, WAITING = "done", "running", "waiting"
STOPPED, FAILED, MISSING = "stopped early", "failed", "not submitted"
UNDER_WAY = (RUNNING, WAITING)


@dataclass(frozen=True)
class Standing:
    """State of a row, the job that it was last submitted as, and the reason of a failure."""

    case: Case
    state: str
    job: str = ""
    reason: str = ""


@contextlib.contextmanager
def locked(work: Work) -> Iterator[None]:
    """Lock the books, so that a second submission waits and then sees the first's jobs.

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


def note(work: Work, case: Case, job: str) -> None:
    """Record that `case` was submitted as `job`.

    Raises
    ------
    StoreError
        When that cannot be: the job, which nobody would know of, is named.
    """
    path, number = books(work), job.partition("_")[0]
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


def submitted(work: Work) -> dict[str, str]:
    """Read the last job of each row, by the row's name."""
    entries = journal.read_entries(books(work)) if books(work).exists() else []
    return {entry["row"]: entry["job"] for entry in entries if {"row", "job"} <= entry.keys()}


def books(work: Work) -> Path:
    """Return the file of submitted jobs: a line for each row and job."""
    return work.folder / "submitted.jsonl"


def results(work: Work, case: Case) -> list[tuple[Path, run_file.Run]]:
    """List the sound files of a row, of its jobs and collected, with the sizes of its preset.

    Where a policy of recomputation was asked for, those that were measured with it.
    """
    found = []
    for folder in (work.runs(case), work.out):
        for path in sorted(folder.glob(f"{case.name}-*.h5")):
            with contextlib.suppress(StoreError):    # as if it were not there
                run = run_file.read_run(path)
                if (isinstance(run, run_file.Run) and not run.configuration["overridden"]
                        and (recorded_variant(run.configuration).arguments()
                             == case.variant.arguments())
                        and work.recompute in (None, run.configuration.get("recompute", "none"))):
                    found.append((path, run))
    return found


def survey(work: Work, cases: list[Case], queue: dict[str, slurm.State]) -> list[Standing]:
    """Find the standing of each row, given the jobs in the queue."""
    jobs = submitted(work)
    return [_standing(work, one, jobs.get(one.name, ""), queue) for one in cases]


def _standing(work: Work, case: Case, job: str, queue: dict[str, slurm.State]) -> Standing:
    found = [run for _, run in results(work, case)]
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
    return Standing(case, FAILED, job, why(work, case, job)) if job else Standing(case, MISSING)


def why(work: Work, case: Case, job: str) -> str:
    """Explain why a job left no result: in Slurm's words, its own, and those of its log."""
    parts = [slurm.ending(job)]
    own = work.runs(case) / f"ended-{job}"
    if own.exists():
        parts.append(own.read_text().strip())
    for log in (work.folder / "logs").glob(f"*-{job}.out"):
        lines = log.read_text(errors="replace").splitlines()
        telling = [line for line in lines if line.startswith(("failed", "error:", "slurmstepd:"))
                   and not line.endswith(", see the log")]
        parts += [" ".join(line.split()) for line in telling[:1]]
    return "; ".join(dict.fromkeys(filter(None, parts))) or "it ended without a word"
