"""Restore a model and its optimizer from a checkpoint, whatever wrote it."""

import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable

import numpy as np

from mm3d.arrays.plain_numbers import check_whole
from mm3d.checkpoints import folder as folders
from mm3d.checkpoints.block_files import (OPTIMIZER_PREFIX, Block, StoredArray, known_facts,
                                          read_part, stored_arrays)
from mm3d.checkpoints.index_file import DROPOUT_STEP, Index, read_index
from mm3d.checkpoints.together import on_each, on_root
from mm3d.grid.agreement import same_arguments
from mm3d.model.architecture import PLAIN
from mm3d.model.transformer_layers import architecture_facts
from mm3d.model.parameters import comm_of


@dataclass(frozen=True)
class Checkpoint:
    """Describe a restored checkpoint: its folder, its step, and the attributes saved with it."""

    path: Path
    step: int
    attributes: dict[str, Any]


def restore(folder: str | Path, model: Any, optimizer: Any = None,
            step: int | None = None) -> Checkpoint:
    """Restore the newest checkpoint of a folder, to the bit and on any mesh.

    Every rank of ``model.comm`` must call it.  A rank reads the pieces of rows that its own blocks
    lie in, and compares them with their checksums.  The model changes after all ranks have read
    all pieces, so host memory holds a copy of this rank's blocks.

    Parameters
    ----------
    folder : path
        As for `mm3d.save`.
    model : Transformer, Pipeline, GPT or any other
        The same model, divided in any way.
    optimizer : Optimizer, optional
        Gets the moments, the number of steps, the learning rate, and the state of its loss
        scaling; without one only the parameters are read.
    step : int, optional
        Step of the checkpoint; by default the highest.

    Returns
    -------
    Checkpoint
        Its step, and the attributes that were given to `save`.

    Raises
    ------
    FileNotFoundError
        On every rank alike, when there is no such checkpoint.
    ValueError
        On every rank alike, when it is of another model, also of one with equal shapes, or of
        another kind of optimizer, and where ranks have different optimizers or options of them.
    OSError
        On every rank alike, when a part is missing or damaged anywhere.  Nothing has changed in
        any of these cases.

    Warns
    -----
    UserWarning
        On rank 0, about differences that change the training alone, and about unknown facts.
    """
    folder, comm = Path(folder), comm_of(model, "restore")
    with same_arguments(comm, "restore") as given:
        step = step if step is None else check_whole("step", step, 0)
        given |= {"folder": str(folder), "step": step,
                  "optimizer": optimizer and type(optimizer).__name__}
        given |= {name: value for facts in known_facts(model, optimizer)
                  for name, value in facts.items()}
        arrays = stored_arrays(model, optimizer)
    path, index, read, new, said = _read_all(folder, step, model, optimizer, arrays)
    for stored, one in read:
        if stored.array.size:
            stored.backend.copy_from_host(one, stored.array)
    for name in new:
        for array in optimizer.state[name]:
            array[...] = 0
    model.refresh()
    if optimizer is not None:
        optimizer.set_numbers(index.optimizer)
    if getattr(model, DROPOUT_STEP, None) is not None and DROPOUT_STEP in index.attributes:
        setattr(model, DROPOUT_STEP, index.attributes[DROPOUT_STEP])
    said += [f"{name} was not saved, and begins with zeros" for name in new]
    if said and comm.rank == 0:
        warnings.warn(f"checkpoint {path}: {'; '.join(said)}", stacklevel=2)
    attributes = {name: value for name, value in index.attributes.items()
                  if name not in ("step", DROPOUT_STEP)}
    return Checkpoint(path, index.attributes["step"], attributes)


def _read_all(folder: Path, step: int | None, model: Any, optimizer: Any,
              arrays: list[StoredArray]) -> tuple[
                  Path, Index, list[tuple[StoredArray, np.ndarray]], list[str], list[str]]:
    """Find a checkpoint, compare it with the model, and read this rank's blocks.

    Returns its path and index; its arrays, each with this rank's block; the optimizer's moments
    that it does not have; and the lines of `_compare_facts`.
    """
    comm = model.comm
    while True:
        path, problem = _find(folder, comm, step)
        try:
            index = on_root(comm, problem, lambda: read_index(path))
            new = [name for name in getattr(optimizer, "state", ())
                   if not any(path.startswith(_paths_of([name])) for path in index.arrays)]
            held = [a for a in arrays if not a.path.startswith(_paths_of(new))]
            _check(path, comm, index, held, optimizer)
            said = _compare_facts(path, index, model, optimizer)
            blocks = index.blocks_by_path()
            values = on_each(comm, problem, lambda: [
                _read(path, stored, blocks[stored.path]) for stored in held])
            return path, index, list(zip(held, values)), new, said
        except OSError:
            # Removed by a job that has saved a newer one.
            if on_root(comm, problem, lambda: os.path.lexists(path)):
                raise


def _find(folder: Path, comm: Any, step: int | None) -> tuple[Path, str]:
    """Return the checkpoint of a step, or of the highest one; and how errors of it begin."""
    found = on_root(comm, f"{folder} cannot be read", lambda: folders.checkpoints(folder))
    wanted = [p for p in found if step is None or folders.step_of(p) == step]
    if not wanted:
        there = ", ".join(str(folders.step_of(p)) for p in found)
        raise FileNotFoundError(f"no checkpoint{'' if step is None else f' of step {step}'} in "
                                f"{folder}: {f'steps {there} are there' if there else 'none yet'}")
    problem = f"checkpoint {wanted[-1]} cannot be read"
    others = [folders.step_of(p) for p in found if p != wanted[-1]]
    return wanted[-1], problem + (f", step={others[-1]} is there too" if others else "")


def _paths_of(moments: Iterable[str]) -> tuple[str, ...]:
    """Return how the paths of the arrays of some moments begin."""
    return tuple(f"optimizer/{name}/" for name in moments)


def _check(path: Path, comm: Any, index: Index, arrays: list[StoredArray],
           optimizer: Any) -> None:
    """Raise ValueError on all ranks unless the checkpoint is of this model and optimizer."""
    name = type(optimizer).__name__
    if optimizer is not None and index.optimizer.get("name") != name:
        raise ValueError(f"checkpoint {path} holds the optimizer "
                         f"{index.optimizer.get('name', 'none')}, not {name}: leave the optimizer "
                         f"out, or create the other one")
    wrong = next(filter(None, (_difference(index, a) for a in arrays)), None)
    every = comm.allgather((wrong, {a.path for a in arrays}))
    known = set().union(*(paths for _, paths in every))
    # Moments of an optimizer of the same kind, which this one does without, are no other model.
    kept = "parameters/", *_paths_of(getattr(optimizer, "state", ()))
    lines = [line for line, _ in every if line] + [
        f"{p} is not in the model" for p in index.arrays if p.startswith(kept) and p not in known]
    if lines:
        raise ValueError(f"checkpoint {path} is of another model: {lines[0]}")


def _difference(index: Index, stored: StoredArray) -> str | None:
    """Return how an array differs from the one in the checkpoint; None if it does not."""
    info = index.arrays.get(stored.path)
    if info is None:
        return f"{stored.path} is missing"
    if info.shape != stored.shape:
        return f"{stored.path} has the shape {info.public_shape}, not {stored.public_shape}"
    if info.dtype != stored.dtype.str:
        return f"{stored.path} is in {np.dtype(info.dtype)}, not {stored.dtype}"
    return None


def _compare_facts(path: Path, index: Index, model: Any, optimizer: Any) -> list[str]:
    """Compare a model and its optimizer with the facts in an index.

    Raises ValueError for a model of another function.  Returns a line for each fact that changes
    the training alone, or that the checkpoint or the model does not state.
    """
    function, training = known_facts(model, optimizer)
    stated = dict(index.model)
    if "epsilon" in stated:    # of layers of this library: earlier ones were those of 2019
        stated = architecture_facts(PLAIN) | stated
    other = [f"{name} is {stated[name]!r} there, {value!r} here"
             for name, value in function.items()
             if name in stated and stated[name] != value]
    if other:
        raise ValueError(f"checkpoint {path} is of another model: {', '.join(other)}")
    there = {name: value for name, value in index.training.items()
             if optimizer is not None or not name.startswith(OPTIMIZER_PREFIX)}
    said = [f"{name} was {there[name]!r}, and is {value!r}" for name, value in training.items()
            if name in there and there[name] != value]
    for one, other, who in ((stated | there, function | training, "the model"),
                            (function | training, stated | there, "the checkpoint")):
        if unknown := [name for name in one if name not in other]:
            said.append(f"{who} does not say {', '.join(unknown)}: whether these are the same "
                        f"cannot be told")
    return said


def _read(path: Path, stored: StoredArray, blocks: list[Block]) -> np.ndarray:
    """Read this rank's block of an array from all blocks that it touches."""
    out = np.empty([s.stop - s.start for s in stored.place], stored.dtype)
    found = sum(read_part(path, block, stored.place, out) for block in blocks) if out.size else 0
    if found != out.size:
        raise OSError(f"blocks of {stored.path} are missing")
    return out
