"""Train a GPT on a text, verified first, with checkpoints, until it is done or stops."""

import math
import os
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Callable, Iterator

import mm3d
from bench.agreement import agree, broadcast_from_rank_0, make_on_rank_0
from bench.errors import StoreError, WrongResult, as_usage_error
from bench.experiments.training.history import NAME, History, HistoryFile
from bench.experiments.training.plan import Plan, make_optimizer
from bench.experiments.training.text import Text
from bench.experiments.training.verification import verify
from bench.instruments.stopping import Stop, stop_on_request
from bench.records.measurements import Check
from mm3d.arrays import backend as backends
from mm3d.arrays.plain_numbers import said
from mm3d.config import Config, Division
from mm3d.examples.train import take_steps
from mm3d.training.gpt import GPT
from mm3d.training.norms import largest_magnitude

VERIFIED_SCALE = 128.0    # of the loss in float16: gradients neither vanish nor overflow with it


@dataclass(frozen=True)
class Course:
    """When a training validates, saves checkpoints, and stops."""

    validate_every: int = said("steps between two validations with the end of the text, a tenth "
                               "of it, that is held out", 50, least=1)
    validation_batches: int = said("batches of a validation, at most", 4, least=1)
    save_every: int = said("steps between two checkpoints", 100, least=1)
    keep: int = said("newest checkpoints that are kept", 2, least=1, option="keep-checkpoints")
    checkpoints: str | None = said("folder of the checkpoints, from which the same command goes "
                                   "on; none for none", None, letter="DIR")
    max_seconds: float | None = said("stop after this time with a checkpoint, as after Ctrl-C",
                                     None, above=True, letter="SECONDS",
                                     nothing=": no limit", option="stop-after")
    stop_file: str | None = said("stop with a checkpoint when this file exists, as a job does "
                                 "near its time limit", None, letter="FILE", nothing="")


@dataclass(frozen=True)
class TrainingEnd:
    """The outcome of a training; the same on every rank but for the history.

    Attributes
    ----------
    history : History
        The history of all steps, including those before this run; complete on rank 0.
    began, steps : int
        The step that this run began with, and the number of steps that are done.
    ended_by : str
        "steps", or one of `bench.instruments.stopping.REASONS`.
    checks : list of Check
        Those of the model before the first step.
    """

    history: History
    began: int
    steps: int
    ended_by: str
    checks: list[Check]


class TrainingRun:
    """A model, its optimizer and its text on the ranks of a communicator.

    Raises UsageError on every rank alike, for what cannot be trained so.
    """

    def __init__(self, comm: Any, plan: Plan, division: Division, text: Text) -> None:
        self.comm, self.plan, self.text = comm, plan, text
        self.peak_bytes = 0
        with as_usage_error():
            self.backend = backends.get(division.backend)
            self.others_bytes = self.backend.memory()["in_use"]
            self.model = GPT(Config(plan, division), comm)
            self.mesh, self.division = self.model.mesh, self.model.config.division
            self.optimizer = make_optimizer(plan, self.model)
            plan.rate(0)    # refuses a rise that is longer than the training

    def batch(self, step: int) -> tuple:
        """Return tokens and targets of a step."""
        return self.text.batch(self.plan.seed, step, self.plan.batch, self.plan.seq)

    def take_steps(self, numbers: range) -> Iterator[tuple[int, float]]:
        """Take steps as `mm3d.examples.train.take_steps`.

        Raises FloatingPointError on every rank alike, when loss or gradients are not finite; but
        loss scaling skips such steps.
        """
        def check(step: int, loss: float) -> None:
            if self.optimizer.loss_scaling is None and not math.isfinite(loss):
                raise FloatingPointError    # without clipping nothing else would notice
        return take_steps(self.model, self.optimizer, self.batch, numbers, self.plan.rate, check)

    def utilisation(self) -> dict[str, float]:
        """Return how the last step used the experts, as entries of a `History`; {} without."""
        routed = self.model.routings.values()
        if not routed:
            return {}
        return {"entropy": min(one.entropy for one in routed),
                "dropped": sum(int(one.dropped.sum()) for one in routed)
                / sum(int(one.chosen.sum()) for one in routed)}

    def validate(self, batches: int) -> float:
        """Return the mean loss of the first batches of the held-out text, without dropout."""
        sizes = self.plan.batch, self.plan.seq
        count = min(batches, self.text.validation_batches(*sizes))
        return sum(self.model.evaluate(*self.text.validation(number, *sizes))
                   for number in range(count)) / count

    def verify(self) -> list[Check]:
        """Compare loss and gradient of a batch with a model in NumPy, without dropout."""
        self.model.dropout_step = None
        scale = self.model.loss_scale
        self.model.loss_scale = min(scale, VERIFIED_SCALE)
        checks = verify(self.model, self.batch(0), self.plan, self.comm)
        self.model.loss_scale = scale
        return checks

    def settings(self) -> dict[str, Any]:
        """Return the settings that determine the curve."""
        return {**self.plan.settings(), "text": self.text.name, "text_digest": self.text.digest}

    def free(self) -> None:
        """Free the communicators; every rank must call it."""
        self.model.free()


def run_training(training: TrainingRun, course: Course,
                 report: Callable[[int, History], None] = lambda step, history: None
                 ) -> TrainingEnd:
    """Train from the newest checkpoint, or from the start, until all steps are done or it stops.

    Every rank calls this; `report` is called on rank 0 after each step and each validation, with
    the number of steps done.

    Raises
    ------
    WrongResult
        On every rank, when the model computes a wrong loss or gradient, and nothing is trained
        then; or when gradients are no longer finite.
    StoreError, UsageError
        On every rank alike, when the folder cannot be used, is of another training, or is full.
    """
    with ExitStack() as stack:
        stop = stack.enter_context(stop_on_request(
            training.comm, course.max_seconds, course.stop_file))
        file = _open_history(training, course)
        if file:
            stack.callback(file.close)
        comm = training.comm
        done = began = _restore_newest(training, course)
        history = file.history.before(done) if file else History()
        checks = training.verify()
        reason = stop.agree_on_signal()    # with a limit of time each run still trains a step
        steps = training.take_steps(range(done, training.plan.steps))

        def write(entry: dict[str, Any]) -> None:
            if course.checkpoints is not None:    # a full disk ends the training on all ranks
                make_on_rank_0(lambda: file.write(entry), comm)

        def keep(entry: dict[str, Any]) -> None:
            if comm.rank == 0:
                history.add(entry)
                report(done, history)
            write(entry)

        while True:
            if not reason and _is_due(done, training.plan.steps, course.validate_every):
                if not comm.bcast(done in history.validation):
                    loss = training.validate(course.validation_batches)
                    keep({"step": done, "validation": loss})
            if reason or done >= training.plan.steps:
                break
            loss, seconds, reason = _timed_step(training, steps, done, stop)
            done += 1
            reason = reason if done < training.plan.steps else ""
            keep({"step": done - 1, "loss": loss, "seconds": seconds, **training.utilisation()})
            if reason or _is_due(done, training.plan.steps, course.save_every):
                _save_checkpoint(training, course, done)
        if not reason:
            write({"complete": True})
        return TrainingEnd(history, began, done, reason or "steps", checks)


def _clipping_remedy(plan: Plan) -> str:
    """Return a further remedy against numbers that are not finite, where nothing is clipped."""
    return "" if plan.clip else ", or a --clip above 0"


def lost_loss(training: TrainingRun, outcome: TrainingEnd) -> str:
    """Return what is wrong with the last loss, on every rank; empty where it is finite.

    Loss scaling skips a step whose gradients are not finite, also where every step is such a one.
    """
    def said() -> str:
        history, done = outcome.history, outcome.steps
        last = history.validation.get(done, history.losses.get(done - 1, 0.0))
        return "" if math.isfinite(last) else (
            f"the loss after {done} steps is not finite, which loss scaling cannot mend: a lower "
            f"--lr than {training.plan.lr:g} would do{_clipping_remedy(training.plan)}")
    return broadcast_from_rank_0(said, training.comm)


def _open_history(training: TrainingRun, course: Course) -> HistoryFile | None:
    """Open the history on rank 0; None on the others, and without a folder."""
    if course.checkpoints is None:
        return None
    # Losses of other batches would be another curve of validation.
    return make_on_rank_0(lambda: HistoryFile(course.checkpoints, {
        **training.settings(), "validation_batches": course.validation_batches}), training.comm)


def _restore_newest(training: TrainingRun, course: Course) -> int:
    """Restore the newest checkpoint, if there is one; return the number of steps done.

    Raises StoreError on every rank alike, when it is damaged, of another model, or unseen by one.
    """
    if course.checkpoints is None:
        return 0
    comm = training.comm    # before anything is trained that no rank could save
    agree("" if os.path.exists(Path(course.checkpoints, NAME)) else (    # False, if forbidden
        f"--checkpoints {course.checkpoints}: rank {comm.rank} does not see what rank 0 has "
        f"written there; a folder that all ranks share would do"), comm, StoreError)
    try:
        return mm3d.restore(course.checkpoints, training.model, training.optimizer).step
    except FileNotFoundError:    # a new training
        return 0
    except (OSError, ValueError) as error:
        raise StoreError(str(error)) from error


def _save_checkpoint(training: TrainingRun, course: Course, done: int) -> None:
    """Save a checkpoint after `done` steps.

    Raises StoreError on every rank alike, when it cannot be written; WrongResult, when parameters
    are not finite, and older checkpoints stay.
    """
    if course.checkpoints is None:
        return
    masters = (p.master for p in training.model.trained)
    if math.isinf(largest_magnitude(masters, training.comm)):
        raise WrongResult(f"parameters after step {done - 1} are not finite, and are not saved: a "
                          f"lower --lr than {training.plan.lr:g} would do"
                          f"{_clipping_remedy(training.plan)}")
    try:
        mm3d.save(course.checkpoints, training.model, training.optimizer, step=done,
                  keep=course.keep)
    except OSError as error:
        raise StoreError(str(error)) from error


def _is_due(done: int, steps: int, every: int) -> bool:
    """Return whether something is to be done after `done` steps: each `every`, and at the end."""
    return done % every == 0 or done == steps


def _timed_step(training: TrainingRun, steps: Iterator[tuple[int, float]], step: int,
                stop: Stop) -> tuple[float, float, str]:
    """Return the loss of the next step, the slowest rank's seconds, and why to stop if at all.

    Raises WrongResult on every rank alike, when loss or gradients are not finite.
    """
    training.backend.reset_peak()
    start = time.perf_counter()
    try:
        _, loss = next(steps)
    except FloatingPointError as error:
        plan = training.plan
        raise WrongResult(f"loss or gradients of step {step} are not finite: a lower --lr than "
                          f"{plan.lr:g} would do{_clipping_remedy(plan)}") from error
    training.backend.synchronize()
    seconds = time.perf_counter() - start
    peak = training.backend.memory()["peak"] - training.others_bytes
    training.peak_bytes = max(training.peak_bytes, peak)
    return loss, *stop.agree(seconds)
