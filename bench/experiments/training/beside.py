"""Measure a training step beside PyTorch's own parallel trainings, in one run."""

import math
from dataclasses import asdict
from typing import Sequence

import numpy as np

from bench.records.kinds import makespans
from bench.statistics import median_interval
import mm3d
from bench.errors import UsageError, WrongResult
from bench.experiments.products import operands
from bench.experiments.training import verification
from bench.experiments.training.timed_step import OPTIMIZER, PARTS, MeasuredTraining, StepCase
from bench.experiments.training.torch_group import KINDS, TorchGroup
from bench.instruments import timing
from bench.instruments.clock import Clock, time_on_all_ranks, wait_patiently
from bench.instruments.sampling import measured_environment
from bench.instruments.timing import Limits
from bench.records.measurements import Check, Measurements, Variable, grid_settings

KIND = "training-step"
OWN = "mm3d"
FIRST_STEPS = 3     # whose losses must agree
# Relative: losses of the first steps and after the last one, and the norm of the first gradient.
LOSS, LAST_LOSS, NORM = 1e-4, 1e-2, 1e-4
LIMITS = Limits(5, 30, 120.0)    # by default


def refuse_case(case: StepCase, kinds: Sequence[str], ranks: int) -> None:
    """Raise UsageError for what PyTorch's parallelism cannot divide evenly."""
    if unknown := [kind for kind in kinds if kind not in KINDS]:
        raise UsageError(f"--torch-parallel {','.join(unknown)}: {', '.join(KINDS)} would do")
    if len(set(kinds)) < len(kinds):
        raise UsageError(f"--torch-parallel {','.join(kinds)}: each at most once would do")
    for kind, name, count in (("ddp", "batch", case.batch), ("fsdp2", "batch", case.batch),
                              ("tp", "heads", case.heads), ("tp", "vocab", case.vocab)):
        if kind in kinds and count % ranks:
            raise UsageError(f"--torch-parallel {kind} --{name} {count}: PyTorch divides it among "
                             f"{ranks} ranks, a multiple of {ranks} would do")


def measure_beside(subject: MeasuredTraining, python: str | None, kinds: Sequence[str],
                   limits: Limits = LIMITS) -> Measurements | None:
    """Measure steps of all sides in turns, in random order; the others sleep meanwhile.

    Before the first repetition loss and gradient are verified (`verification.verify`), and the
    first losses of all sides and the norms of their first gradients are compared; after the last
    repetition the losses are compared again.

    Parameters
    ----------
    subject : MeasuredTraining
        The own side; every rank calls this.
    python : str or None
        An interpreter that has PyTorch; None measures the own side alone.
    kinds : sequence of str
        PyTorch's sides, of `torch_group.KINDS`.
    limits : Limits
        When to stop repeating.

    Returns
    -------
    Measurements or None
        A record of kind "training-step"; on rank 0, None on the others.

    Raises
    ------
    UsageError
        On all ranks, when the interpreter cannot train so.
    WrongResult
        On all ranks, when loss or gradients of any side differ.
    """
    comm, case = subject.comm, subject.case
    sides = (OWN, *(kinds if python else ()))
    checks = verification.verify(subject.model, subject.batch, case.heads, case.dtype, comm)
    state = subject.model.state()
    arrays = {**state, "tokens": subject.batch[0], "targets": subject.batch[1]}
    references = (TorchGroup(python, kinds, {**asdict(case), **OPTIMIZER}, arrays, comm)
                  if python else None)
    del state, arrays
    try:
        checks += compare_first_steps(subject, references, sides)
        clock = Clock(comm)
        sampler = Sampler(subject, references, sides, clock)
        repetitions, times, losses = sampler.take(limits)
        checks += compare_losses(losses[-1], sides, "last loss", LAST_LOSS)
        reject(checks)
        about = references.about if references else {}
    finally:
        if references:
            references.close()
    parts = comm.gather(subject.trace(clock))
    environs = measured_environment(subject.mesh.scheme.grid.backend.name, comm)
    if parts is None:
        return None
    settings = {**settings_of(subject), "ended_by": repetitions.ended_by, **asdict(limits),
                "torch": "; ".join(about.values()) or "none"}
    return step_record(sides, times, losses, np.array(parts), settings, environs, checks)


def settings_of(subject: MeasuredTraining) -> dict:
    """Return the settings of a record: what was trained, and where."""
    mesh, placement = subject.mesh, subject.placement
    return {**asdict(subject.case), "optimizer": "adamw",
            **{name: value for name, value in OPTIMIZER.items() if name != "betas"},
            "beta1": OPTIMIZER["betas"][0], "beta2": OPTIMIZER["betas"][1],
            "scheme": mesh.scheme.name, **grid_settings(mesh.shape),
            "stage_grids": "; ".join(map(str, mesh.grids)), "mesh": str(placement),
            "data": placement.data, "stages": placement.stages, "zero": placement.zero,
            "schedule": placement.schedule, "microbatches": placement.microbatches,
            "recompute": placement.recompute,
            "transport": operands.transport_names(mesh.scheme.grid)}


def compare_first_steps(subject: MeasuredTraining, references: TorchGroup | None,
                        sides: Sequence[str]) -> list[Check]:
    """Take the first steps of all sides, and compare losses and the norm of the gradient."""
    checks = []
    for number in range(FIRST_STEPS):
        losses, norms = [subject.step()], []
        if not number:
            norms = [gradient_norm(subject.model)]
        wait_patiently(subject.comm)
        for side in sides[1:]:
            found = references.step(side, check=not number)
            losses.append(mean_loss(found))
            if not number:
                norms.append(found[0]["norm"])
        checks += compare_losses(losses, sides, f"loss of step {number + 1}", LOSS)
        if not number:
            checks += compare_losses(norms, sides, "norm of the first gradient", NORM)
    reject(checks)
    return checks


def gradient_norm(model: mm3d.GPT) -> float:
    """Compute the norm of all gradients in float64; every rank must call it."""
    return math.sqrt(sum(float(np.sum(np.square(a, dtype=np.float64)))
                         for a in model.gradients().values()))


def mean_loss(found: list[dict[str, float]]) -> float:
    """Return the mean of what the processes of a side print: each the mean of equal parts."""
    return sum(one["loss"] for one in found) / len(found)


def compare_losses(numbers: Sequence[float], sides: Sequence[str], what: str,
                   tolerance: float) -> list[Check]:
    """Compare the numbers of all sides with the own one."""
    return [Check(f"{what}, {side}", abs(number - numbers[0]) / abs(numbers[0]), tolerance)
            for side, number in zip(sides[1:], numbers[1:], strict=True)]


def reject(checks: Sequence[Check]) -> None:
    """Raise WrongResult, on all ranks alike, when a check did not pass."""
    wrong = [one for one in checks if not one.passed]
    if wrong:
        raise WrongResult("; ".join(
            f"{one.quantity}: {one.error:.3g} from {OWN}'s, relative, at most {one.tolerance:g} "
            f"would do" for one in wrong))


class Sampler:
    """Take steps of all sides in turns.

    Parameters
    ----------
    subject, references : MeasuredTraining, TorchGroup or None
        The sides.
    sides : sequence of str
        Their names, the own one first.
    clock : Clock
        Of all ranks.
    """

    def __init__(self, subject: MeasuredTraining, references: TorchGroup | None,
                 sides: Sequence[str], clock: Clock) -> None:
        self.subject, self.references, self.sides, self.clock = subject, references, sides, clock

    def sample(self, side: int) -> tuple[np.ndarray, float]:
        """Take a step of a side; return begin and end on its ranks, NaN on others, and the loss.
        """
        comm, library = self.subject.comm, self.subject.mesh.scheme.grid.backend
        wait_patiently(comm)
        if side == 0:
            return time_on_all_ranks(self.subject.step, comm, library.synchronize, self.clock)
        times, found = np.full((comm.size, 2), np.nan), self.references.step(self.sides[side])
        for rank, one in enumerate(found):
            times[rank] = one["begin"], one["end"]
        return times - np.nanmin(times), mean_loss(found)

    def take(self, limits: Limits) -> tuple[timing.Repetitions, np.ndarray, np.ndarray]:
        """Repeat until the limits are reached; return the repetitions, times and losses."""
        comm, order = self.subject.comm, np.random.default_rng(self.subject.case.seed)
        kept: list[np.ndarray] = []
        losses: list[np.ndarray] = []

        def intervals() -> list:
            return [median_interval(column) for column in makespans(np.array(kept)).T]

        repetitions = timing.Repetitions(limits, comm, intervals, warmup=1)
        for counts in repetitions:
            times = np.full((len(self.sides), comm.size, 2), np.nan)
            loss = np.zeros(len(self.sides))
            for side in order.permutation(len(self.sides)):
                times[side], loss[side] = self.sample(int(side))
            if counts:
                kept.append(times)
                losses.append(loss)
        return repetitions, np.array(kept), np.array(losses)


def step_record(sides: Sequence[str], times: np.ndarray, losses: np.ndarray,
                parts: np.ndarray, settings: dict, environs: dict,
                checks: list[Check]) -> Measurements:
    """Make the record."""
    variables = {
        "times": Variable(times, "s", ("repetition", "side", "rank", "edge")),
        "loss": Variable(losses, "1", ("repetition", "side")),
        "part_seconds": Variable(parts, "s", ("rank", "traced", "part"))}
    scales = {"repetition": range(len(times)), "side": sides, "rank": range(times.shape[2]),
              "edge": ("begin", "end"), "traced": range(parts.shape[1]),
              "part": PARTS}
    return Measurements(KIND, settings, environs, scales, variables, checks)
