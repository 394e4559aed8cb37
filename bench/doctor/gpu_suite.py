"""Run everything that needs a GPU for ``bench doctor --gpu whole``, whatever fails.

The steps are the doctor, the self-test of every transport, the tests that need a GPU on 1 and 8
ranks, and each part of ``bench measure gpu``.  Each is a process of its own with a time limit: one
that crashes or hangs does not affect the others.  The output of each is in ``DIR/NAME.log`` as
soon as it is printed, results are in DIR, and ``DIR/summary.txt`` has a line for each.
"""

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Iterator, Mapping, Sequence

import bench
from bench.doctor.child_jobs import describe_failure
from bench.errors import UsageError
from bench.experiments.gpu.parts import GPU_PARTS
from mm3d import launcher
from mm3d.child_process import CHILDREN_PRINT, run_child

ROOT = Path(bench.__file__).parents[1]    # where the tests are


@dataclass(frozen=True)
class SuiteStep:
    """A program to run within `limit` seconds, with variables added to its environment."""

    name: str
    command: list[str]
    limit: float
    settings: Mapping[str, str] = field(default_factory=dict)


def list_steps(out: Path, ranks: int, limit: float, rehearse: bool) -> list[SuiteStep]:
    """List the steps in their order: short and telling ones first.

    Jobs of several ranks may share GPUs.  A measurement or the tests may take `limit` seconds, a
    self-test half of them.  A rehearsal runs on NumPy, without a GPU.
    """
    python, library = [sys.executable, "-m"], "numpy" if rehearse else "cupy"
    job = launcher.mpirun_command(ranks, *python)
    found = [SuiteStep("doctor",
                       [*python, "bench", "doctor", *["--gpu"] * (not rehearse), "--ranks",
                        str(ranks), "--limit", str(limit / 4)], limit)]
    for kind in ("mpi", "shared") if rehearse else ("staged", "device", "nccl"):
        found.append(SuiteStep(f"selftest-{kind}", [*job, "mm3d.selftest"], limit / 2,
                               {"MM3D_BACKEND": library, "MM3D_TRANSPORT": kind}))
    found += [SuiteStep("tests-1", [*python, "pytest", "-q", "-m", "gpu"], limit),
              SuiteStep(f"tests-{ranks}", [*job, "pytest", "-q", "-m", "gpu"], limit)]
    measured = {f"gpu-{part}": ["--part", part] for part in GPU_PARTS}
    if not rehearse:
        measured["gpu-layer-graph"] = ["--part", "layer", "--graph"]
    scale = ["--backend", "numpy", "--scale", "tiny"] if rehearse else []
    for name, words in measured.items():
        command = [*python, "bench", "measure", "gpu", *words, *scale, "--out", str(out / name)]
        found.append(SuiteStep(name, command, limit))
    return found


def select_steps(steps: Sequence[SuiteStep], only: str | None) -> list[SuiteStep]:
    """Select the steps named in `only`, separated by commas; all of them if it is not given.

    Raises UsageError when a name is unknown.
    """
    names = [step.name for step in steps]
    asked = only.split(",") if only else names
    if set(asked) - set(names):
        raise UsageError(f"--only {only}: choose of {', '.join(names)}")
    return [step for step in steps if step.name in asked]


def _run_step(step: SuiteStep, log: Path) -> str:
    """Run a step, with its output in `log`; return how it failed, "" if it did not."""
    variables = launcher.environment_without_launcher() | launcher.mpirun_settings()
    try:
        child = run_child(step.command, step.limit, log, cwd=ROOT,
                          env={**variables, **step.settings}, with_parent=True)
    except OSError as error:    # the program is not there
        return str(error)
    return describe_failure(child.status, child.out, step.limit)


@dataclass(frozen=True)
class SuiteOutcome:
    """The end of a step: how it failed, "" when it ended well, and the last line of its log.

    It is `skipped` if pytest skipped all of its tests, which proves nothing.
    """

    name: str
    seconds: float
    problem: str
    last_line: str
    skipped: bool

    def __str__(self) -> str:
        state = "failed" if self.problem else "skipped" if self.skipped else "ok"
        return (f"{state:8}{self.name:20}{self.seconds:7.1f} s  "
                f"{self.problem or self.last_line}").rstrip()


def run_steps(steps: Sequence[SuiteStep], out: Path) -> Iterator[SuiteOutcome]:
    """Run the steps, one after another, and write a line for each into the summary in `out`."""
    out.mkdir(parents=True, exist_ok=True)
    with (out / "summary.txt").open("w", encoding="utf-8") as summary:
        for step in steps:
            begun, log = time.monotonic(), out / f"{step.name}.log"
            problem = _run_step(step, log)
            took, said = time.monotonic() - begun, _last_line(log)
            # The status of pytest is 0 even when it skips all tests.
            skipped = "pytest" in step.command and "skipped" in said and "passed" not in said
            outcome = SuiteOutcome(step.name, took, problem, said, skipped)
            summary.write(f"{outcome}\n")
            summary.flush()
            yield outcome


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(CHILDREN_PRINT, "replace").splitlines()]
    return next(filter(None, reversed(lines)), "")[:100]
