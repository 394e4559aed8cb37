"""Save a model and its optimizer: each rank its own blocks, then one index."""

import warnings
from pathlib import Path
from typing import Any

from mm3d.arrays.plain_numbers import check_whole
from mm3d.checkpoints import folder as folders
from mm3d.checkpoints.block_files import (OPTIMIZER_PREFIX, StoredArray, known_facts,
                                          stored_arrays, write_blocks)
from mm3d.checkpoints.index_file import (DROPOUT_STEP, RESERVED, ArrayInfo, Index, index_bytes,
                                         storable_attributes)
from mm3d.checkpoints.together import on_each, on_root
from mm3d.checkpoints.writer import Writer
from mm3d.grid.agreement import same_arguments
from mm3d.model.parameters import comm_of


def save(folder: str | Path, model: Any, optimizer: Any = None, step: int | None = None,
         keep: int = 3, **attributes: float | int | str) -> Path:
    """Save a checkpoint, complete or not at all.

    Every rank of ``model.comm`` must call it.  Each writes its blocks, once among equal copies, to
    a file of its own; the index is written last, and the checkpoint gets its name when all of it
    is on the disk.  So a job that is killed at any moment leaves the earlier checkpoints.

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
        Number of the newest checkpoints that stay; older ones are removed.
    **attributes
        Further numbers and texts, the same on every rank, which `restore` returns.

    Returns
    -------
    Path
        The checkpoint.

    Raises
    ------
    ValueError
        On every rank alike, before anything is written, for a negative step, a `keep` below 1,
        an attribute that would not come back: no number or text, or with a name that checkpoints
        use themselves; and where ranks were given different ones, or have another optimizer or
        step of dropout.
    OSError
        On every rank alike and in one line, when something could not be written on any rank; the
        earlier checkpoints are as they were.

    Warns
    -----
    UserWarning
        On rank 0, of what could not be removed, and of another job that saves there.
    """
    folder, comm = Path(folder), comm_of(model, "save")
    with same_arguments(comm, "save") as given:
        step = check_whole("step", getattr(optimizer, "steps", 0) if step is None else step, 0)
        keep = check_whole("keep", keep)
        if taken := [name for name in attributes if name in RESERVED]:
            raise ValueError(f"{taken[0]}={attributes[taken[0]]!r}: checkpoints have an attribute "
                             f"{taken[0]} of their own, another name would do")
        attributes = storable_attributes(attributes)
        described = {} if optimizer is None else storable_attributes({
            "name": type(optimizer).__name__, **optimizer.numbers()})
        facts = [*map(storable_attributes, known_facts(model, optimizer))]
        counts = {"step": step}
        if (masks := getattr(model, DROPOUT_STEP, None)) is not None:
            counts[DROPOUT_STEP] = check_whole(DROPOUT_STEP, masks, 0)
        groups = (counts | attributes, described, *facts)
        given |= {"folder": str(folder), "keep": keep} | counts | {
            kind + name: value for kind, found in zip(
                ("attribute ", OPTIMIZER_PREFIX, "", ""), (attributes, *groups[1:]))
            for name, value in found.items()}
        arrays = stored_arrays(model, optimizer)
    writer = Writer(folder, step)    # which rank 0 alone uses
    try:
        with writer:
            place = _write(writer, comm, arrays, groups)
    finally:
        for line in writer.said:
            warnings.warn(line, stacklevel=2)
    on_root(comm, f"checkpoint {place} is written, but may not outlast a loss of power",
            lambda: folders.sync(folder))
    if comm.rank == 0:
        for line in folders.remove_old(folder, keep, place):
            warnings.warn(line, stacklevel=2)
    comm.Barrier()    # then what is to be removed is gone on all ranks
    return place


def _write(writer: Writer, comm: Any, arrays: list[StoredArray],
           groups: tuple[dict[str, Any], ...]) -> Path:
    """Write each rank's blocks, then the index with the groups of attributes."""
    problem = (f"no checkpoint of step {writer.step} was written in {writer.folder}, earlier ones "
               f"are unchanged")
    own = [stored for stored in arrays if stored.counted and stored.array.size]
    aside = on_root(comm, problem, writer.begin)
    blocks = on_each(comm, problem, lambda: write_blocks(
        aside / f"blocks-{comm.rank:05d}.h5", own) if own else [])
    infos = {a.path: ArrayInfo(a.path, a.shape, a.public_shape, a.dtype.str) for a in arrays}
    gathered = comm.gather((infos, blocks))

    def complete() -> Path:
        known = {path: info for found, _ in gathered for path, info in found.items()}
        paths = sorted(known, key=lambda path: path.startswith("optimizer/"))    # parameters first
        index = Index({path: known[path] for path in paths},
                      [block for _, blocks in gathered for block in blocks], *groups)
        return writer.complete(index_bytes(index, f"written by {comm.size} ranks"))
    return on_root(comm, problem, complete)
