"""Everything that a machine with a GPU is asked, one after another, whatever fails.

``python -m bench.gpusuite DIR`` runs the doctor, every transport's self-test, the tests that need
a GPU on 1 and 8 ranks, and each part of ``bench gpu``, each in a process of its own with a limit
of time: one that crashes or hangs costs the others nothing.  What each prints is in
``DIR/NAME.log`` as soon as it is printed, results are in DIR, and ``DIR/summary.txt`` says what
came of each.
``--rehearse`` does the same on NumPy at tiny sizes.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Mapping, NamedTuple, Sequence

from bench.facts import died, ended
from bench.gpu import PARTS
from mm3d import environment


class Step(NamedTuple):
    """A program to run."""

    name: str
    command: list[str]
    limit: float                    # seconds
    settings: Mapping[str, str] = {}


def steps(out: Path, ranks: int, limit: float, rehearse: bool) -> list[Step]:
    """What is run, in order: what is short and tells most comes first.

    Parameters
    ----------
    out : Path
        The folder for results.
    ranks : int
        Of the jobs of several ranks, which may share GPUs.
    limit : float
        Seconds that a measurement or the tests may take; a self-test takes half.
    rehearse : bool
        Without a GPU: on NumPy.
    """
    python, library = [sys.executable, "-m"], "numpy" if rehearse else "cupy"

    def job(count: int, *words: str) -> list[str]:
        return environment.mpirun_command(count, *python, *words)
    found = [Step("doctor", [*python, "bench", "doctor", *["--gpu"] * (not rehearse), "--ranks",
                             str(ranks), "--limit", str(limit / 4)], limit)]
    for kind in ("mpi", "shared") if rehearse else ("staged", "device", "nccl"):
        found.append(Step(f"selftest-{kind}", job(ranks, "mm3d.selftest"), limit / 2,
                          {"MM3D_BACKEND": library, "MM3D_TRANSPORT": kind}))
    found += [Step("tests-1", [*python, "pytest", "-q", "-m", "gpu"], limit),
              Step(f"tests-{ranks}", job(ranks, "pytest", "-q", "-m", "gpu"), limit)]
    measured = {f"gpu-{part}": ["--part", part] for part in PARTS}
    if not rehearse:
        measured["gpu-layer-graph"] = ["--part", "layer", "--graph"]
    scale = ["--backend", "numpy", "--scale", "tiny"] if rehearse else []
    for name, words in measured.items():
        command = [*python, "bench", "gpu", *words, *scale, "--out", str(out / name)]
        found.append(Step(name, command, limit))
    return found


def outcome(step: Step, log: Path) -> str:
    """Run a step; "" if it ended well, else how it ended."""
    variables = environment.without_launcher() | environment.launcher_environment()
    with log.open("w") as said:
        process = subprocess.Popen(step.command, stdin=subprocess.DEVNULL, stdout=said,
                                   stderr=subprocess.STDOUT, start_new_session=True,
                                   env={**variables, **step.settings})
        try:
            status = process.wait(step.limit)
        except subprocess.TimeoutExpired:
            ended(process)
            return f"did not end within {step.limit:g} seconds"
        except BaseException:    # Ctrl-C ends what goes on
            ended(process)
            raise
    return died(status, log.read_text(errors="replace")) if status else ""


def run(every: Sequence[Step], out: Path) -> int:
    """Run all steps; how many did not end well."""
    failed = 0
    with (out / "summary.txt").open("w") as summary:
        for step in every:
            begun = time.monotonic()
            log = out / f"{step.name}.log"
            try:
                problem = outcome(step, log)
            except OSError as error:    # the program is not there
                problem = str(error)
            failed += bool(problem)
            line = (f"{'failed' if problem else 'ok':8}{step.name:20}"
                    f"{time.monotonic() - begun:7.1f} s  {problem or _last_line(log)}").rstrip()
            print(line, flush=True)
            print(line, file=summary, flush=True)
    return failed


def _last_line(log: Path) -> str:
    """What was said last: of tests, how many were skipped."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next(filter(None, reversed(lines)), "")[:100]


def main(words: Sequence[str] | None = None) -> int:
    """Do what the command line says; 1 when a step did not end well."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpusuite", description=(
        "Run all that needs a GPU, one after another, whatever fails."))
    parser.add_argument("out", type=Path, metavar="DIR", help="for logs, summary and results")
    parser.add_argument("--ranks", type=int, default=8, metavar="N",
                        help="of the jobs of several ranks (default 8)")
    parser.add_argument("--limit", type=float, default=600, metavar="SECONDS",
                        help="for a measurement or the tests (default 600)")
    parser.add_argument("--only", metavar="NAME,...", help="of the steps, in their order")
    parser.add_argument("--rehearse", action="store_true", help="on NumPy, without a GPU")
    options = parser.parse_args(words)
    out = options.out.resolve()
    try:
        every = steps(out, options.ranks, options.limit, options.rehearse)
    except FileNotFoundError as error:
        parser.error(str(error))
    names = [step.name for step in every]
    chosen = options.only.split(",") if options.only else names
    if set(chosen) - set(names):
        parser.error(f"--only {options.only}: choose of {', '.join(names)}")
    out.mkdir(parents=True, exist_ok=True)
    os.chdir(Path(__file__).parents[1])    # where the tests are
    return min(1, run([step for step in every if step.name in chosen], out))


if __name__ == "__main__":
    sys.exit(main())
