"""Do all that needs a GPU, one step after another, whatever fails.

The steps are the doctor, every transport's self-test, the tests that need a GPU on 1 and 8 ranks,
and each part of ``bench gpu``, each in a process of its own with a limit of time: one that crashes
or hangs costs the others nothing.  The output of each is in ``DIR/NAME.log`` as soon as it is
printed, results are in DIR, and ``DIR/summary.txt`` has a line for each.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Iterator, Mapping, NamedTuple, Sequence

import bench
from bench.doctor.child_jobs import died, ended
from bench.errors import UsageError
from bench.experiments.gpu.parts import PARTS
from mm3d import launcher

ROOT = Path(bench.__file__).parents[1]    # where the tests are


class Step(NamedTuple):
    """A program to run."""

    name: str
    command: list[str]
    limit: float                    # seconds
    settings: Mapping[str, str] = {}


def steps(out: Path, ranks: int, limit: float, rehearse: bool) -> list[Step]:
    """List the steps in their order: those that are short and tell most come first.

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
        return launcher.mpirun_command(count, *python, *words)
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


def chosen(every: Sequence[Step], only: str | None) -> list[Step]:
    """Choose the steps named in `only`, with commas between; all unless it is given.

    Raises
    ------
    UsageError
        When a name is unknown.
    """
    names = [step.name for step in every]
    asked = only.split(",") if only else names
    if set(asked) - set(names):
        raise UsageError(f"--only {only}: choose of {', '.join(names)}")
    return [step for step in every if step.name in asked]


def outcome(step: Step, log: Path) -> str:
    """Run a step; "" if it ended well, else how it ended."""
    variables = launcher.without_launcher() | launcher.launcher_environment()
    with log.open("w") as said:
        process = subprocess.Popen(step.command, stdin=subprocess.DEVNULL, stdout=said,
                                   stderr=subprocess.STDOUT, start_new_session=True, cwd=ROOT,
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


class Outcome(NamedTuple):
    """The end of a step.

    Attributes
    ----------
    name : str
        Of the step.
    seconds : float
        That it took.
    problem : str
        How it failed; "" when it ended well.
    said : str
        The last line that it printed: of tests, how many were skipped.
    """

    name: str
    seconds: float
    problem: str
    said: str

    def __str__(self) -> str:
        return (f"{'failed' if self.problem else 'ok':8}{self.name:20}{self.seconds:7.1f} s  "
                f"{self.problem or self.said}").rstrip()


def run(every: Sequence[Step], out: Path) -> Iterator[Outcome]:
    """Run the steps, one after another, and write a line for each into the summary in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "summary.txt").open("w") as summary:
        for step in every:
            begun = time.monotonic()
            log = out / f"{step.name}.log"
            try:
                problem = outcome(step, log)
            except OSError as error:    # the program is not there
                problem = str(error)
            found = Outcome(step.name, time.monotonic() - begun, problem, _last_line(log))
            summary.write(f"{found}\n")
            summary.flush()
            yield found


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines()]
    return next(filter(None, reversed(lines)), "")[:100]
