"""Measure a training step beside PyTorch's own parallel trainings, in one run."""

import math
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from typing import Sequence

import numpy as np

from bench.checks.passed import require_passed
from bench.errors import UsageError
from bench.experiments.torch.child import TorchProcesses, compare_kernels, gpt_step_flops
from bench.experiments.torch.parallel import PARALLELS
from bench.experiments.training import verification
from bench.experiments.training.record import mesh_settings
from bench.experiments.training.timed_step import ADAMW_OPTIONS, STEP_PARTS, TimedTraining
from bench.instruments.clock import Clock
from bench.instruments.sampling import compare_in_turns, measured_environment, time_side
from bench.instruments.timing import Limits
from bench.records.model_run import add_numbers, make_record
from bench.records.measurements import Check, Measurements
from mm3d.config import Model
from mm3d.launcher import wait_patiently

KIND = "training-step"
OWN = "mm3d"
FIRST_STEPS = 3     # steps whose losses must agree
# Relative tolerances: losses of first steps and after the last, and norm of the first gradient.
LOSS, LAST_LOSS, NORM = 1e-4, 1e-2, 1e-4
STEP_LIMITS = Limits(5, 30, 120.0)    # by default


def refuse_division(case: Model, kinds: Sequence[str], ranks: int) -> None:
    """Raise UsageError for what PyTorch's parallelism cannot divide evenly."""
    if unknown := [kind for kind in kinds if kind not in PARALLELS]:
        raise UsageError(f"--torch-parallel {','.join(unknown)}: {', '.join(PARALLELS)} would do")
    if len(set(kinds)) < len(kinds):
        raise UsageError(f"--torch-parallel {','.join(kinds)}: each at most once would do")
    for kind, name, count in (("ddp", "batch", case.batch), ("fsdp2", "batch", case.batch),
                              ("tp", "heads", case.heads), ("tp", "vocab", case.vocab)):
        if kind in kinds and count % ranks:
            raise UsageError(f"--torch-parallel {kind} --{name} {count}: PyTorch divides it among "
                             f"{ranks} ranks, a multiple of {ranks} would do")


def measure_beside(subject: TimedTraining, python: str | None, kinds: Sequence[str],
                   limits: Limits) -> Measurements | None:
    """Measure steps of all sides in turns, in random order; the others sleep meanwhile.

    Before the first repetition loss and gradient are verified (`verification.verify`), and the
    first losses of all sides and the norms of their first gradients are compared; after the last
    repetition the losses are compared again.

    Parameters
    ----------
    subject : TimedTraining
        mm3d's side; every rank calls this.
    python : str or None
        An interpreter that has PyTorch; None measures mm3d alone.
    kinds : sequence of str
        PyTorch's sides, of `bench.experiments.torch.parallel.PARALLELS`.

    Returns
    -------
    Measurements or None
        A record of kind "training-step"; on rank 0, None on the others.

    Raises UsageError on all ranks, when the interpreter cannot train so; WrongResult when loss or
    gradients of any side differ.
    """
    comm, case = subject.comm, subject.case
    checks = verification.verify(subject.model, subject.batch, case, comm)
    references: dict[str, TorchProcesses] = {}
    kernels = {}
    with ExitStack() as stack:
        if python:
            state = subject.model.state()
            arrays = {**state, "tokens": subject.batch[0], "targets": subject.batch[1]}
            for kind in kinds:
                references[kind] = stack.enter_context(closing(TorchProcesses(
                    python, "parallel:ParallelTraining",
                    {**case.settings(), **ADAMW_OPTIONS, "kind": kind},
                    None if comm.rank else arrays, comm, f"train by --torch-parallel {kind}",
                    1 if kind == "one" else comm.size)))
            del state, arrays
            kernels = compare_kernels(
                subject.products(), case.dtype, subject.mesh.scheme.grid.backend,
                references[kinds[0]], case.seed, gpt_step_flops(
                    case.batch * case.seq, case.layers, case.hidden, case.seq, case.vocab,
                    causal=True))
        checks += _compare_first_steps(subject, references)
        clock = Clock(comm)
        own = partial(time_side, subject.step, comm,
                      subject.mesh.scheme.grid.backend.synchronize, clock)
        found, ended_by = compare_in_turns(
            {OWN: own, **{kind: one.sample for kind, one in references.items()}}, limits,
            case.seed, comm)
        losses = np.array([[one.result if side == OWN else _mean_of_processes(one.result)
                            for one in samples] for side, samples in found.items()]).T
        checks += _compare_losses(losses[-1], list(found), "last loss", LAST_LOSS)
        require_passed(checks)
        about = [f"{PARALLELS[kind]}: {one.about}" for kind, one in references.items()
                 if comm.rank == 0]
    parts = comm.gather(subject.trace(clock))
    environs = measured_environment(subject.mesh.scheme.grid.backend.name, comm)
    if parts is None:
        return None
    times = np.array([[one.times for one in samples] for samples in found.values()])
    settings = {**case.settings(), "optimizer": "adamw",
                **{name: value for name, value in ADAMW_OPTIONS.items() if name != "betas"},
                "beta1": ADAMW_OPTIONS["betas"][0], "beta2": ADAMW_OPTIONS["betas"][1],
                "mesh": str(subject.division), **mesh_settings(subject.mesh, subject.division),
                "ended_by": ended_by, **asdict(limits), "torch": "; ".join(about) or "none"}
    record = make_record(KIND, settings, environs, {
        "s": {"times": times.swapaxes(0, 1), "part_seconds": parts}, "1": {"loss": losses}},
        checks, side=list(found), part=STEP_PARTS)
    return add_numbers(record, kernels)


def _compare_first_steps(subject: TimedTraining,
                         references: dict[str, TorchProcesses]) -> list[Check]:
    """Take the first steps of all sides, and compare losses and the norm of the gradient."""
    checks, sides = [], [OWN, *references]
    for number in range(FIRST_STEPS):
        losses, norms = [subject.step()], []
        if not number:
            norms = [math.sqrt(sum(float(np.sum(np.square(a, dtype=np.float64)))
                                   for a in subject.model.gradients().values()))]
        wait_patiently(subject.comm)
        for one in references.values():
            found = one.sample("step" if number else "check").result
            losses.append(_mean_of_processes(found))
            if not number:
                norms.append(found[0]["norm"])
        checks += _compare_losses(losses, sides, f"loss of step {number + 1}", LOSS)
        if not number:
            checks += _compare_losses(norms, sides, "norm of the first gradient", NORM)
    require_passed(checks)
    return checks


def _mean_of_processes(found: list[dict[str, float]]) -> float:
    """Return the mean loss of a side, whose processes report the means of equal parts."""
    return sum(one["loss"] for one in found) / len(found)


def _compare_losses(numbers: Sequence[float], sides: Sequence[str], what: str,
                    tolerance: float) -> list[Check]:
    """Compare the numbers of all sides with mm3d's."""
    return [Check(f"{what}, {side}", abs(number - numbers[0]) / abs(numbers[0]), tolerance)
            for side, number in zip(sides[1:], numbers[1:], strict=True)]
