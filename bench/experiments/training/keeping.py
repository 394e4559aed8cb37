"""Open the history of a training, and restore and save its checkpoints, on all ranks."""

import math
from typing import Any

import mm3d
from bench.errors import StoreError, UsageError, WrongResult
from bench.experiments.training.history import HistoryFile
from bench.experiments.training.plan import Plan
from mm3d.training.norms import largest_magnitude


def clipping_remedy(plan: Plan) -> str:
    """Return a further remedy against numbers that are not finite, where nothing is clipped."""
    return "" if plan.clip else ", or a --clip above 0"


def open_history(training: Any, course: Any) -> HistoryFile | None:
    """Open the history on rank 0; None on the others, and without a folder."""
    if course.checkpoints is None:
        return None
    made = problem = None
    if training.comm.rank == 0:
        try:
            # Losses of other batches would be another curve of validation.
            made = HistoryFile(course.checkpoints, {
                **training.settings(), "validation_batches": course.validation_batches})
        except (StoreError, UsageError) as error:
            problem = error
    problem = training.comm.bcast(problem)
    if problem is not None:
        raise problem
    return made


def restore(training: Any, course: Any) -> int:
    """Restore the newest checkpoint, if there is one; return the number of steps done.

    Raises
    ------
    StoreError
        On every rank alike, when it is damaged, or of another model.
    """
    if course.checkpoints is None:
        return 0
    try:
        return mm3d.restore(course.checkpoints, training.model, training.optimizer).step
    except FileNotFoundError:    # a new training
        return 0
    except (OSError, ValueError) as error:
        raise StoreError(str(error)) from error


def save(training: Any, course: Any, done: int) -> None:
    """Save a checkpoint after `done` steps.

    Raises
    ------
    StoreError
        On every rank alike, when it cannot be written.
    WrongResult
        On every rank alike, when parameters are not finite; older checkpoints stay.
    """
    if course.checkpoints is None:
        return
    masters = (p.master for p in training.model.trained)
    if math.isinf(largest_magnitude(masters, training.comm)):
        raise WrongResult(f"parameters after step {done - 1} are not finite, and are not saved: a "
                          f"lower --lr than {training.plan.lr:g} would do"
                          f"{clipping_remedy(training.plan)}")
    try:
        mm3d.save(course.checkpoints, training.model, training.optimizer, step=done,
                  keep=course.keep)
    except OSError as error:
        raise StoreError(str(error)) from error
