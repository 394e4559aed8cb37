"""Record submitted jobs, and find which rows are done, under way or failed, and why."""

import contextlib
import fcntl
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

from bench.cases.combined import TABLE, AnyCase, TrainingCase
from bench.cases.variants import recorded_variant
from bench.errors import StoreError, Unreadable, UsageError
from bench.instruments.host import source_version
from bench.records import atomic, journal, model_run, run_file
from bench.records.measurements import Measurements
from bench.records.notes import describe_source
from jobs import slurm
from jobs.scripts import JobSettings
from mm3d.console import complain

DONE, RUNNING, WAITING = "done", "running", "waiting"
STOPPED, JOB_FAILED, MISSING = "stopped early", "failed", "not submitted"
UNCLEAR = "cannot tell"    # whether the row is done, or its last job has ended
UNDER_WAY = (RUNNING, WAITING)
JOB_KINDS = ("row", "pipeline", "training")
QUEUEING = ("PENDING", "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "RESV_DEL_HOLD",
            "SPECIAL_EXIT")    # states of jobs that wait for nodes


@dataclass(frozen=True)
class Standing:
    """State of a row, its last job, the reason of a failure, and the source that measured it."""

    case: AnyCase
    state: str
    job: str = ""
    reason: str = ""
    source: str = ""


@contextlib.contextmanager
def locked(work: JobSettings) -> Iterator[None]:
    """Lock the folder of scripts: a second submission waits, and then sees the jobs of the first.

    UsageError when the file system of the results has no locks.
    """
    journal.check_folder(work.folder)
    with open(work.folder / "lock", "wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError as error:
            raise UsageError(f"--out {work.out}: its file system cannot lock files "
                             f"({error.strerror}); choose a folder on another") from error
        yield


def record_job(work: JobSettings, kind: str, name: str, title: str, job: str) -> None:
    """Record that the job of this `kind` and `name`, `title` in messages, was submitted as `job`.

    StoreError when it cannot be recorded; the message names the job, which is in the queue.
    """
    path = submissions_file(work)
    cancel = " ".join(["scancel", *slurm.on_cluster(slurm.cluster_of_job(job)),
                       slurm.number_of_job(job).partition("_")[0]])
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, atomic.SHARED)
        try:
            journal.append_entry(file, {kind: name, "job": job, "source": present_source()})
        finally:
            os.close(file)
    except OSError as error:
        raise StoreError(
            f"job {job}, {title}, is in the queue, but {path} could not be written "
            f"({error.strerror}): {cancel}, make room, and submit again") from error


def read_submitted(work: JobSettings, kind: str = "row") -> dict[str, list[str]]:
    """Read the jobs of each row, or other `kind`, by name, the latest last."""
    found: dict[str, list[str]] = {}
    for entry in _entries(work, kind):
        found.setdefault(entry[kind], []).append(entry["job"])
    return found


def _entries(work: JobSettings, kind: str) -> list[dict[str, str]]:
    fields = {kind: str, "job": str, "source": str}
    return [entry for entry in journal.read_entries(submissions_file(work), **fields)
            if {kind, "job"} <= entry.keys()]


def present_source() -> str:
    """Describe the source as it is now, which jobs that start now would run."""
    return describe_source(*source_version())


def list_other_sources(work: JobSettings, found: list[Standing]) -> list[str]:
    """Say which rows ran, or would run, from other source than they were submitted with.

    Jobs run what lies in the checkout when they start.  Any job of a row may have measured it.
    """
    groups: dict[str, list[str]] = {}
    for one in found:
        waits = one.state == WAITING
        source = present_source() if waits else one.source
        before = [entry["source"] for entry in _entries(work, "row")
                  if entry["row"] == one.case.name and "source" in entry]
        if source and before and source not in (before[-1:] if waits else before):
            verb = "waits, and would run" if waits else "ran"
            groups.setdefault(f"submitted from commit {before[-1]}, {verb} from {source}",
                              []).append(one.case.title)
    return [f"{what}: {', '.join(titles)}" for what, titles in groups.items()]


def warn_of_source(work: JobSettings, kind: str, name: str) -> None:
    """Say on standard error that the next job would run other source than the last submitted."""
    before, now = [entry.get("source") for entry in _entries(work, kind)
                   if entry[kind] == name], present_source()
    if before and before[-1] not in (None, now):
        complain(f"warning: submitted from commit {before[-1]}, the next job would run from "
                 f"{now}: {kind} {name}")


def submissions_file(work: JobSettings) -> Path:
    """Return the path of the file of submitted jobs, with a line for each job."""
    return work.folder / "submitted.jsonl"


def read_results(work: JobSettings, case: AnyCase
                 ) -> tuple[list[tuple[Path, Measurements]], list[str]]:
    """List a row's readable files at its preset's sizes, from its jobs and those collected.

    If a policy of recomputation is chosen, only files measured with it are listed.  Returned are
    also the problems of files and folders that cannot be read.
    """
    found, unread = [], []
    for folder in (work.runs(case.name), work.out):
        try:
            paths = run_file.list_files(folder, f"{case.name}-")
        except Unreadable as error:
            unread.append(str(error))
            continue
        for path in paths:
            try:
                run = run_file.read_run(path)
            except Unreadable as error:
                unread.append(str(error))
            except StoreError:
                pass    # a damaged file counts as missing; tables report its problem
            else:
                if _is_result(work, case, run):
                    found.append((path, run))
    return found, unread


def _is_result(work: JobSettings, case: AnyCase, run: Measurements) -> bool:
    """Return whether a file with the name of a row was measured as the row is now."""
    chosen = run.configuration
    if isinstance(case, TrainingCase):
        return run.kind == TABLE and case.settings.items() <= chosen.items()
    return (isinstance(run, model_run.Run) and not chosen["overridden"]
            and recorded_variant(chosen).arguments() == case.variant.arguments()
            and work.recompute in (None, chosen.get("recompute", "none")))


def read_queues(work: JobSettings) -> slurm.Queue:
    """Read the queues of the clusters that the site names, and of those of submitted jobs."""
    homes = [name for option in work.site.slurm.options
             if option.startswith(("--clusters=", "--cluster="))    # two names of one option
             for name in option.partition("=")[2].split(",")] or [""]
    last = [jobs[-1] for kind in JOB_KINDS for jobs in read_submitted(work, kind).values()]
    return slurm.read_queue(dict.fromkeys([*homes,
                                           *filter(None, map(slurm.cluster_of_job, last))]),
                            homes)


def list_standings(work: JobSettings, cases: list[AnyCase], queue: slurm.Queue) -> list[Standing]:
    """Find the standing of each row, given the jobs in the queue."""
    jobs = read_submitted(work)
    return [_standing(work, one, jobs.get(one.name, [""])[-1], queue) for one in cases]


def _standing(work: JobSettings, case: AnyCase, job: str, queue: slurm.Queue) -> Standing:
    results, unread = read_results(work, case)
    found = [run for _, run in results]
    whole = [run for run in found if run.configuration["ended_by"] != "stopped"]
    if whole:
        return Standing(case, DONE, job, f"{len(whole[-1].scales['repetition'])} repetitions",
                        source_of(whole[-1]))
    state, reason = describe_job(work, case.name, job, queue) if job else (MISSING, "")
    if unread and state in (MISSING, JOB_FAILED):
        return Standing(case, UNCLEAR, job, unread[0])
    if found and state in (MISSING, JOB_FAILED):
        return Standing(case, STOPPED, job, f"with {len(found[-1].scales['repetition'])} "
                        "repetitions, as its time was over", source_of(found[-1]))
    return Standing(case, state, job, reason)


def source_of(run: Measurements) -> str:
    """Describe the source that measured a run."""
    return describe_source(run.environment["git_commit"], run.environment["git_clean"])


def describe_job(work: JobSettings, name: str, job: str, queue: slurm.Queue) -> tuple[str, str]:
    """Return the state, as in a `Standing`, of a job of this `name` and no result, and why."""
    state = queue.state(job)
    if state.name in QUEUEING:
        return WAITING, state.reason
    if state.name == slurm.UNKNOWN_STATE:
        return UNCLEAR, explain_ending(work, name, job, f"whether it has ended: {state.reason}")
    if state.ended:
        return JOB_FAILED, explain_ending(work, name, job, state.name)
    return RUNNING, state.name.lower() * (state.name != "RUNNING")


def own_ending(work: JobSettings, name: str, job: str) -> str:
    """Return how a job says that it ended; "" if it does not."""
    path = work.runs(name) / f"ended-{slurm.number_of_job(job)}"
    return path.read_text("utf-8", "replace").strip() if path.exists() else ""


def explain_ending(work: JobSettings, name: str, job: str, said: str) -> str:
    """Explain why a job has no result, from Slurm's answer `said`, its script and its log."""
    parts = [said, own_ending(work, name, job)]
    for log, lines in read_job_logs(work, job):
        new = [line for line in lines if line.removeprefix("error: ") not in parts]
        telling = [line for line in new if line.startswith(("failed", "error:", "slurmstepd:"))]
        parts.append(": ".join([str(log), *(telling[:1] or new[-1:])]))
    return "; ".join(dict.fromkeys(filter(None, parts))) or "it ended without a word"


def read_job_logs(work: JobSettings, job: str) -> list[tuple[Path, list[str]]]:
    """List the logs of a job, from the folder of results on, with their lines that say a word."""
    return [(path.relative_to(work.out), [" ".join(line.split()) for line in path.read_text(
        "utf-8", "replace").splitlines() if line.strip()])
        for path in (work.folder / "logs").glob(f"*-{slurm.number_of_job(job)}.out")]
