"""Read the parts of a run's forward and backward times from its file."""

import itertools
import math
from typing import Iterable

import numpy as np

from bench.instruments import timing
from bench.records.measurements import Variable
from bench.records.run_file import Run
from mm3d.grid.axis import COLLECTIVES
from mm3d.tracing.events import PHASES
from mm3d.transport.choice import in_place

LABELS = {"gemm": "matrix products", "elementwise": "elementwise", "waiting": "waiting",
          "other": "other"}


def part_names(directions: Iterable[str]) -> tuple[str, ...]:
    """Name the parts of a step, in the order in which a figure may stack them.

    The collectives along a direction of the grid are one part, with the direction's name.
    """
    return ("gemm", *directions, "elementwise", "waiting", "other")


def label(part: str) -> str:
    """Return the title of one of the `part_names`."""
    return LABELS.get(part, f"collectives along {part}")


def parts(run: Run) -> dict[str, dict[str, float]] | None:
    """Read seconds of each of the `part_names` by phase, of a step of the slowest rank.

    Means over the traced repetitions and over ranks.  What a rank waits at the end of a phase for
    the slowest is "waiting", so the parts of a phase add up to the traced repetitions' mean time,
    which `overhead` compares with that of the others.

    Parameters
    ----------
    run : Run
        A run; None is returned where it was not traced.
    """
    seconds = _seconds(run)
    if seconds is None:
        return None
    names = run.groups["parts"].scales["part"]
    own = seconds.sum(axis=-1)                              # (repetition, phase, rank)
    late = own.max(axis=-1, keepdims=True) - own
    mean, late = seconds.mean(axis=(0, 2)), late.mean(axis=(0, 2))
    found = {}
    for p, phase in enumerate(PHASES):
        shares = dict.fromkeys(part_names(run.directions), 0.0)
        for name, value in zip(names, mean[p].tolist()):
            shares[name if name in shares else name.rpartition(" ")[2]] += value
        shares["waiting"] += float(late[p])
        found[phase] = shares
    return found


def overhead(run: Run) -> dict[str, float] | None:
    """Divide the median time of traced repetitions by that of the others, by phase."""
    seconds = _seconds(run)
    if seconds is None:
        return None
    own = seconds.sum(axis=-1)
    return {phase: timing.typical(own[:, p]) / timing.typical(run.samples[phase])
            for p, phase in enumerate(PHASES)}


def bandwidth(run: Run) -> dict[str, float] | None:
    """Compute by direction the bytes a second of a rank in collectives that copy.

    Bytes as `mm3d.grid.axis.Traffic` counts them, of both phases and all ranks, over the mean time
    of traced repetitions; waiting for others is not in it.  What is gathered or broadcast in
    shared memory is read where it lies: neither its bytes nor its time count.  Directions where
    nothing else moves are left out.
    """
    seconds = _seconds(run)
    if seconds is None:
        return None
    names = np.array(run.groups["parts"].scales["part"])
    found = {}
    for a, axis in enumerate(run.directions):
        copying = [kind not in placed(run, axis) for kind in COLLECTIVES]
        moved = run.traffic["bytes"][:, :, a, copying].sum()
        kinds = itertools.compress(COLLECTIVES, copying)
        inside = np.isin(names, [f"{kind} {axis}" for kind in kinds])
        taken = seconds[..., inside].sum(axis=(1, 2, 3)).mean()
        if moved:
            found[axis] = float(moved / taken)
    return found


def placed(run: Run, axis: str) -> frozenset[str]:
    """List the collectives along a direction whose results were read in place."""
    transports = str(run.configuration.get("transport", "")).split()
    if "shared" in transports and (len(transports) == 1 or axis in run.configuration.get(
            "within_nodes", "")):
        transports = ["shared"]
    return in_place(" ".join(transports))


def variable(run: Run, group: str, name: str) -> Variable | None:
    """Return a variable of one of the run's groups, if it has it."""
    return run.groups[group].variables.get(name) if group in run.groups else None


def scalar(run: Run, group: str, name: str) -> float:
    """Return a number that was recorded of the whole run; NaN where it was not."""
    found = variable(run, group, name)
    return math.nan if found is None else float(found.values)


def peak(run: Run, name: str) -> float:
    """Return a rate of the group ``machine``; NaN where it was not recorded.

    NaN too for a rate of memory that may have been the caches': where the arrays were less than
    twice as large as these, or, in files of before, nothing says how large they were.
    """
    if name.startswith("memory"):
        arrays, caches = (scalar(run, "machine", which)
                          for which in ("memory_arrays", "last_level_caches"))
        if math.isnan(arrays) or arrays < 2 * caches:
            return math.nan
    return scalar(run, "machine", name)


def _seconds(run: Run) -> np.ndarray | None:
    """Of the traced repetitions, (repetition, phase, rank, part)."""
    found = variable(run, "parts", "seconds")
    return None if found is None else found.values
