"""Write and submit the jobs that are no rows: pipelines, and trainings that go on."""

import re
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from bench.records import atomic
from jobs import scripts, site as sites, slurm
from jobs.scripts import Work
from mm3d.checkpoints.folder import checkpoints, step_of

SCRIPT = 0o755    # permissions of a script
# What the script of a training says itself, or what has no place in a job.
OWN = ("--out", "--checkpoints", "--stop-file", "--max-seconds", "--backend", "--compare")


def submit_pipeline(arguments: Any) -> int:
    """Write the script of a pipeline and submit it if asked to; return the exit status."""
    if "--stages" not in option_names(arguments.words):
        raise UsageError("pipeline: give options of bench pipeline after --, such as -- --stages "
                         "8 --schedule 1f1b,zb-h1")
    work = make_work(arguments)
    script = work.folder / f"pipeline-p{arguments.ranks:03d}.sh"
    write(script, scripts.pipeline_script(work, arguments.ranks, arguments.words))
    if arguments.submit:
        print(f"job {slurm.submit(script)}")
    return 0


def submit_train(arguments: Any) -> int:
    """Write the script of a training, say how far it is, and submit its jobs if asked to.

    Slurm runs one job of a name at a time, so those of one training never meet, also when it is
    submitted again while a job is under way.
    """
    for name in option_names(arguments.words):
        if name in OWN:
            raise UsageError(f"train: {name} after --: the job says it, or has no use for it; "
                             f"leave it out")
    name = arguments.name or f"train-p{arguments.ranks:03d}"
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name, re.ASCII):
        raise UsageError(f"--name {name}: letters, digits, points, - and _ would do")
    work = make_work(arguments)
    script = work.folder / f"{name}.sh"
    write(script, scripts.training_script(work, name, arguments.ranks, arguments.words))
    print(f"{name}: {standing(work, name)}")
    for _ in range(arguments.jobs if arguments.submit else 0):
        print(f"job {slurm.submit(script)}")
    return 0


def standing(work: Work, name: str) -> str:
    """Return how far a training is, and how its last job ended."""
    folder = work.folder / "runs" / name
    found = checkpoints(work.out / "train" / name)
    so_far = ("complete" if (folder / "complete").exists() else
              f"step {step_of(found[-1])} is saved" if found else "no checkpoint yet")
    ended = sorted(folder.glob("ended-*"), key=lambda path: path.stat().st_mtime)
    return "; ".join([so_far, *(f"its last job: {path.read_text().strip()}"
                                for path in ended[-1:])])


def option_names(words: list[str]) -> list[str]:
    """Return the names of the options among `words`."""
    return [word.partition("=")[0] for word in words if word.startswith("--")]


def make_work(arguments: Any) -> Work:
    """Return the work of a site, after making its folders."""
    out = Path(arguments.out or Path("results") / Path(arguments.site).stem)
    work = Work(sites.load_site(arguments.site), arguments.site, scripts.check_path(out))
    for folder in (work.folder, work.folder / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    return work


def write(script: Path, text: str) -> None:
    """Write a script as a whole, and print where it is: a job may be reading the old one."""
    atomic.replace(script, text, SCRIPT)
    print(script)
