"""Divide layers among stages, and the sequences of a batch among micro-batches; check tokens."""

import itertools
from typing import Any

import numpy as np

from mm3d.arrays.blocks import block_lengths, block_starts
from mm3d.arrays.host_arrays import masked_array
from mm3d.model.sizes import ModelSizes
from mm3d.training.schedules import Schedule, check


def divide_layers(schedule: Schedule, ranks: int, sizes: ModelSizes,
                  microbatches: int | None = None, data: int = 1,
                  batch: str = "a batch") -> list[range]:
    """Return the layers of each stage of a schedule, after checking that all fit together.

    `ranks` is what it should have: the stages of a mesh; `sizes` are of the whole model and batch,
    which `data` replicas share; `microbatches`, if given, is how many the schedule should have;
    errors call the batch `batch`.  Raises ValueError when the schedule is wrong, or does not fit.
    """
    check(schedule)
    if schedule.ranks != ranks:
        raise ValueError(f"a schedule of {schedule.ranks} ranks cannot be executed by {ranks} "
                         f"stages: it needs as many")
    if microbatches not in (None, schedule.microbatches):
        raise ValueError(f"a schedule of {schedule.microbatches} micro-batches: {microbatches} "
                         f"were asked for")
    sizes.check()
    if sizes.layers < schedule.stage_count:
        raise ValueError(f"{sizes.layers} layers cannot be divided among {schedule.stage_count} "
                         f"stages: at least one layer for each is needed")
    check_rows(sizes.batch, data, schedule.microbatches, batch)
    lengths = block_lengths(sizes.layers, schedule.stage_count)
    starts = itertools.accumulate(lengths, initial=0)
    return [range(start, start + length) for start, length in zip(starts, lengths)]


def divide_rows(batch: int, data: int, microbatches: int,
                together: bool = False) -> list[list[slice]]:
    """Return the sequences of each replica's micro-batches, as `check_rows` allows them.

    The micro-batches of a replica are equal.  Where the replicas do not divide the sequences of a
    micro-batch, the first ones have one sequence more in each.  A replica's sequences are
    neighbours in the batch; with `together` the sequences of a micro-batch of all replicas are, so
    that a micro-batch does not depend on the number of replicas.
    """
    size = check_rows(batch, data, microbatches)
    lengths, found = block_lengths(size, data), []
    for start, length in zip(block_starts(lengths), lengths):
        firsts = [micro * size + start if together else microbatches * start + micro * length
                  for micro in range(microbatches)]
        found.append([slice(first, first + length) for first in firsts])
    return found


def check_rows(batch: int, data: int, microbatches: int, called: str = "a batch") -> int:
    """Return the sequences of a micro-batch, of all replicas.

    Raises ValueError when the micro-batches do not divide the batch, which errors call `called`,
    or have less than one sequence for each replica.
    """
    size, rest = divmod(batch, microbatches)
    if rest or size < data:
        near = sorted({max(data, size), max(data, size + 1)})
        each = f" of at least {data} sequences, one for each replica" * (data > 1)
        raise ValueError(f"{called} of {batch} sequences cannot be divided into {microbatches} "
                         f"equal micro-batches{each}: "
                         f"{' or '.join(str(n * microbatches) for n in near)} would do")
    return size


def check_batch(tokens: Any, targets: Any, shape: tuple[int, int], vocab: int,
                ignored: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Return tokens and targets as arrays, and the number of targets that count.

    Raises ValueError as in `check_tokens`, and when all targets are `ignored`.
    """
    tokens = check_tokens("tokens", tokens, shape, vocab)
    targets = check_tokens("targets", targets, shape, vocab, ignored)
    count = int(np.count_nonzero(targets != ignored))
    if not count:
        raise ValueError(f"all targets are {ignored}, which is ignored: the loss of nothing is "
                         f"not defined")
    return tokens, targets, count


def check_tokens(name: str, a: Any, shape: tuple[int, int], vocab: int,
                 ignored: int | None = None) -> np.ndarray:
    """Return the tokens `a` as an array, after checking their shape, type and range.

    Masked targets are ignored ones.  Raises ValueError when they are not whole numbers of that
    shape, below `vocab`, or `ignored`; for masked elements where there is no `ignored`.
    """
    a = masked_array(name, a)
    mask = np.ma.getmask(a)
    a = np.asarray(a)
    if a.shape != shape or a.dtype.kind not in "iu":
        raise ValueError(f"{name}: {a.shape} of {a.dtype}, should be whole numbers, "
                         f"(batch, seq) = {shape}")
    if mask.any() and ignored is None:
        sequence, position = (int(n[0]) for n in np.nonzero(mask))
        raise ValueError(f"{name}[{sequence}, {position}] is masked: 0 to {vocab - 1} would do; "
                         f"targets alone may be masked")
    wrong = (a < 0) | (a >= vocab)
    if ignored is not None:
        wrong &= (a != ignored) & ~mask
    if wrong.any():
        sequence, position = (int(n[0]) for n in np.nonzero(wrong))
        more = "" if ignored is None else f", or {ignored} to be ignored"
        raise ValueError(f"{name}[{sequence}, {position}] = {a[sequence, position]} is out of "
                         f"range: 0 to {vocab - 1} would do{more}")
    a = a.astype(np.int64, copy=False)
    return np.where(mask, ignored, a) if mask.any() else a
