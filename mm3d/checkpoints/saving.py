"""Save a model and its optimizer: each rank its own blocks, then one index."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mm3d.checkpoints import folder as folders
from mm3d.checkpoints.block_files import Block, write_blocks
from mm3d.checkpoints.index_file import (DROPOUT_STEP, NAME, RESERVED, ArrayInfo, Index,
                                         write_index)
from mm3d.checkpoints.stored_arrays import StoredArray, stored_arrays
from mm3d.checkpoints.together import on_each, on_root


def save(folder: str | Path, model: Any, optimizer: Any = None, step: int | None = None,
         keep: int = 3, **attributes: float | int | str) -> Path:
    """Save a checkpoint, complete or not at all.

    Every rank of ``model.comm`` must call it.  Each writes what it counts of the model to a file
    of its own; the index is written last, and the checkpoint gets its name when all of it is on
    the disk.  So a job that is killed at any moment leaves the checkpoints before.

    Parameters
    ----------
    folder : path
        The folder of all checkpoints of a training, which all ranks see; created if need be.
    model : Transformer, Pipeline, GPT or any other
        Has `trained` and `comm`, as for `mm3d.training.optimizers.Optimizer`.
    optimizer : Optimizer, optional
        Its moments and numbers are saved too.
    step : int, optional
        The step that the checkpoint is named after; by default the optimizer's.
    keep : int
        Checkpoints of the last so many steps are left, the others removed.
    **attributes
        Further numbers and texts, the same on every rank, which `restore` returns.

    Returns
    -------
    Path
        The checkpoint.

    Raises
    ------
    ValueError
        On every rank alike and before any communication, for a negative step, a `keep` below 1,
        and an attribute that is no number or text, or has a name that checkpoints use themselves.
    OSError
        On every rank alike and in one line, when something could not be written on any rank; the
        earlier checkpoints are as they were.
    """
    step = step if step is not None else getattr(optimizer, "steps", 0)
    if step < 0 or keep < 1:
        raise ValueError(f"a checkpoint needs step >= 0 and keep >= 1, not step={step} and "
                         f"keep={keep}")
    _check_attributes(attributes)
    folder, comm = Path(folder), model.comm
    arrays = stored_arrays(model, optimizer)
    problem = f"no checkpoint of step {step} was written in {folder}, earlier ones are unchanged"
    aside, place = on_root(comm, problem, lambda: folders.begin(folder, step))

    def clean() -> None:
        shutil.rmtree(aside, ignore_errors=True)

    own = [stored for stored in arrays if stored.counted and stored.size]
    blocks = on_each(comm, problem, lambda: write_blocks(
        aside / f"blocks-{comm.rank:05d}.h5", own) if own else [], clean)
    gathered = comm.gather((_infos(arrays), blocks))
    described = {} if optimizer is None else {
        "name": type(optimizer).__name__, **optimizer.numbers()}

    def complete() -> Path:
        try:
            index = _join(gathered, {"step": step, **_dropout_step(model), **attributes},
                          described)
            write_index(aside / NAME, index, f"written by {comm.size} ranks")
            folders.sync(aside / NAME)
            folders.finish(aside, place)
        except BaseException:
            clean()
            raise
        return place

    on_root(comm, problem, complete)
    on_root(comm, f"checkpoint {place} is written, but older ones could not be removed",
            lambda: folders.remove_old(folder, keep, place))
    return place


def _check_attributes(attributes: dict[str, Any]) -> None:
    """Raise ValueError unless an index can hold the attributes beside its own."""
    whole, numbers = (int, np.integer, np.bool_), (float, np.floating)
    for name, value in attributes.items():
        if name in RESERVED:
            raise ValueError(f"{name}={value!r}: checkpoints have an attribute {name} of their "
                             f"own, another name would do")
        if isinstance(value, whole) and -2 ** 63 <= value < 2 ** 64:
            continue
        if not isinstance(value, (str, *numbers)):
            raise ValueError(f"{name}={value!r}: a text, or a number of at most 64 bits would do")


def _dropout_step(model: Any) -> dict[str, int]:
    """Return the step that the model's next dropout masks are of, where it drops anything."""
    step = getattr(model, DROPOUT_STEP, None)
    return {} if step is None else {DROPOUT_STEP: step}


def _infos(arrays: list[StoredArray]) -> dict[str, ArrayInfo]:
    """Return what the index says of arrays, by path."""
    return {a.path: ArrayInfo(a.path, a.shape, a.public_shape, a.dtype.str) for a in arrays}


def _join(gathered: list[tuple[dict[str, ArrayInfo], list[Block]]], attributes: dict[str, Any],
          optimizer: dict[str, Any]) -> Index:
    """Return the index of what all ranks hold."""
    infos = {path: info for found, _ in gathered for path, info in found.items()}
    parts = sorted(infos, key=lambda path: path.startswith("optimizer/"))    # parameters first
    return Index({path: infos[path] for path in parts},
                 [block for _, blocks in gathered for block in blocks], attributes, optimizer)
