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
    record_job(work, "row", case.name, case.title, job)


def record_job(work: Work, kind: str, name: str, title: str, job: str) -> None:
    """Record that what `kind` and `name` say, and messages call `title`, was submitted as `job`.

    Raises
    ------
    StoreError
        As from `record_submission`.
    """
    path, number = submissions_file(work), job.partition("_")[0]
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            journal.append_entry(file, {kind: name, "job": job})
        finally:
            os.close(file)
    except OSError as error:
        raise StoreError(
            f"job {job}, {title}, is in the queue, but {path} could not be written "
            f"({error.strerror}): scancel {number}, make room, and submit again") from error


def read_submitted(work: Work, kind: str = "row") -> dict[str, list[str]]:
    """Read the jobs of each row, or other `kind`, by its name, the last one last."""
    path = submissions_file(work)
    found: dict[str, list[str]] = {}
    for entry in journal.read_entries(path) if path.exists() else []:
        if {kind, "job"} <= entry.keys():
            found.setdefault(entry[kind], []).append(entry["job"])
    return found


def submissions_file(work: Work) -> Path:
    """Return the path of the file of submitted jobs, with a line for each job."""
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
    return [_standing(work, one, jobs.get(one.name, [""])[-1], queue) for one in cases]


def _standing(work: Work, case: Case, job: str, queue: dict[str, slurm.State]) -> Standing:
    found = [run for _, run in list_results(work, case)]
    whole = [run for run in found if run.ended_by != "stopped"]
    if whole:
        return Standing(case, DONE, job, f"{len(whole[-1].samples['forward'])} repetitions")
    if job in queue:
        return Standing(case, *state_in_queue(job, queue[job]))
    if found:
        return Standing(case, STOPPED, job, f"with {len(found[-1].samples['forward'])} "
                                            "repetitions, as its time was over")
    if job:
        return Standing(case, FAILED, job, explain_failure(work, work.runs(case), job))
    return Standing(case, MISSING)


def state_in_queue(job: str, state: slurm.State) -> tuple[str, str, str]:
    """Return state, job and reason, as those of a `Standing`, of a job in the queue."""
    if state.name in ("PENDING", "CONFIGURING"):
        return WAITING, job, state.reason
    return RUNNING, job, state.name.lower() * (state.name != "RUNNING")


def explain_failure(work: Work, folder: Path, job: str) -> str:
    """Explain why a job has no result, by the words of Slurm, of the script and of its log.

    `folder` is the one into which the job writes how it ended.
    """
    parts = [slurm.job_ending(job)]
    own = folder / f"ended-{job}"
    if own.exists():
        parts.append(own.read_text().strip())
    for log in (work.folder / "logs").glob(f"*-{job}.out"):
        lines = log.read_text(errors="replace").splitlines()
        telling = [line for line in lines if line.startswith(("failed", "error:", "slurmstepd:"))
                   and not line.endswith(", see the log")]
        parts += [" ".join(line.split()) for line in telling[:1]]
    return "; ".join(dict.fromkeys(filter(None, parts))) or "it ended without a word"
