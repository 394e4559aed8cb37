"""Write and submit jobs other than rows: pipelines, and trainings in several jobs."""

import hashlib
import re
import shlex
from pathlib import Path

from bench.errors import UsageError
from bench.records import atomic, journal
from jobs import scripts, site as sites, slurm, standings
from jobs.own_options import list_verb_problems
from jobs.scripts import JobSettings
from mm3d.checkpoints.folder import checkpoints, step_of
from mm3d.console import complain, say
from mm3d.hugging_face.config_file import CONFIG

VERBS = {"pipeline": "measure pipeline", "train": "train"}    # of bench
OF_FILES = ("--model", "--text")    # options that may name a file, or a folder with a model's
DIGITS = 8        # that tell the options of pipelines apart in names


def write_and_submit(verb: str, site: str, out: str | None, ranks: int, words: list[str],
                     name: str | None = None, times: int = 0) -> None:
    """Write the script that runs a pipeline or a training, and submit it `times` times.

    Slurm runs one job of a name at a time, so jobs of one training never overlap, even when it is
    submitted again while a job is under way.  `site` is a supplied one, or a file; `out` the
    folder of results, None for the site's; `words` are options of the verb of bench; by default
    `name` is of the ranks, and for pipelines also of the `words`.  UsageError for words that make
    no job.
    """
    words = [*map(from_anywhere, words, ["", *words])]
    for problem in list_verb_problems(VERBS[verb], words, ranks):
        raise UsageError(f"{verb}: after --: {problem}")
    digest = hashlib.sha256(shlex.join(words).encode()).hexdigest()
    name = check_job_name(name or f"{verb}-p{ranks:03d}" + f"-{digest[:DIGITS]}" * (
        verb == "pipeline"))
    work = make_work(site, out)
    script, text = work.script(name), scripts.verb_script(work, VERBS[verb], name, ranks, words)
    atomic.replace(script, text, scripts.MODE)    # as a whole: a job may be reading the old one
    say(script)
    kind = "pipeline" if verb == "pipeline" else "training"
    if kind == "training":
        say(f"{name}: {standing(work, name)}")
        if not (work.runs(name) / "complete").exists():
            standings.warn_of_source(work, kind, name)
    if not times:
        complain("nothing is submitted: --submit would do that")
    cluster = ""    # all on one: only there Slurm runs them one at a time
    for _ in range(times):
        job = slurm.submit_script(script, *slurm.on_cluster(cluster))
        say(f"job {job}")
        standings.record_job(work, kind, name, f"{kind} {name}", job)
        cluster = slurm.cluster_of_job(job)


def from_anywhere(word: str, before: str) -> str:
    """Return a word with the absolute path of the file that it names, as jobs run elsewhere."""
    option, equals, name = word.rpartition("=")
    path = Path(name)
    if (option or before) in OF_FILES and (path.is_file() or (path / CONFIG).is_file()):
        return f"{option}{equals}{path.absolute()}"
    return word


def describe_submitted(work: JobSettings, queue: slurm.Queue) -> list[str]:
    """Describe each submitted pipeline and training: state, job, log and its last line."""
    found = []
    for kind in standings.JOB_KINDS[1:]:
        for name, jobs in standings.read_submitted(work, kind).items():
            waiting = [job for job in jobs if job in queue.jobs]
            job = waiting[0] if waiting else jobs[-1]    # of one name, the first runs first
            own = standings.own_ending(work, name, job)
            state, reason = standings.DONE, ""
            if waiting or own != "done":
                state, reason = standings.describe_job(work, name, job, queue)
            if state == standings.WAITING or any(
                    queue.jobs[one].name in standings.QUEUEING for one in waiting):
                standings.warn_of_source(work, kind, name)
            if state == standings.JOB_FAILED and own.startswith("stopped near"):
                state = standings.STOPPED
            parts = [reason, progress(work, name) if kind == "training" else ""]
            if state in (standings.DONE, *standings.UNDER_WAY):    # of others the reason has it
                parts += [": ".join([str(log), *lines[-1:]])
                          for log, lines in standings.read_job_logs(work, job)]
            found.append(": ".join([f"{kind} {name}", "; ".join(filter(None, [
                f"{state}, job {job}", *parts]))]))
    return found


def check_job_name(name: str) -> str:
    """Check that a name can name a file and a job, and return it; UsageError otherwise."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
        raise UsageError(f"--name {name}: letters, digits, points, - and _ would do")
    return name


def standing(work: JobSettings, name: str) -> str:
    """Describe how far a training is, and how its last job ended."""
    ended = sorted(work.runs(name).glob("ended-*"),
                   key=lambda path: (path.stat().st_mtime, path.name))
    last = [path.read_text("utf-8", "replace").strip() for path in ended[-1:]]
    return "; ".join([progress(work, name), *(f"its last job: {text}" for text in last)])


def progress(work: JobSettings, name: str) -> str:
    """Describe how far a training is."""
    if (work.runs(name) / "complete").exists():
        return "complete"
    found = checkpoints(work.out / "train" / name)
    return f"step {step_of(found[-1])} is saved" if found else "no checkpoint yet"


def make_work(site: str, out: str | None) -> JobSettings:
    """Make the work of a site, and its folders."""
    work = JobSettings(sites.load_site(site), site, scripts.check_path(
        Path(out or atomic.LOCAL / Path(site).stem)))
    make_folders(work)
    return work


def make_folders(work: JobSettings) -> None:
    """Make the folders of scripts and of logs; StoreError if they cannot be written."""
    for folder in (work.folder, work.folder / "logs"):
        journal.check_folder(folder, keep=True)    # though empty: Slurm makes none
