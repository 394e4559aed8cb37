"""Read the parts of a run's forward and backward times from its file."""

import itertools
import math
from typing import Iterable

import numpy as np

from bench.records import model_run
from bench.records.model_run import Run
from mm3d.grid.axis import COLLECTIVES
from mm3d.tracing.events import PHASES
from mm3d.transport.nodes import in_place_collectives

LABELS = {"gemm": "matrix products", "elementwise": "elementwise", "waiting": "waiting",
          "other": "other"}


def stacked_parts(directions: Iterable[str]) -> tuple[str, ...]:
    """Name the parts of a step as figures stack them; a direction stands for its collectives."""
    return ("gemm", *directions, "elementwise", "waiting", "other")


def part_title(part: str) -> str:
    """Return the title of one of the `stacked_parts`."""
    return LABELS.get(part, f"collectives along {part}")


def mean_parts(run: Run) -> dict[str, dict[str, float]] | None:
    """Compute mean seconds of each of the `stacked_parts` in a step, by phase; None if untraced.

    Means are over traced repetitions and ranks.  A rank's wait for the slowest at the end of a
    phase is "waiting", so the parts of a phase add up to the mean time of traced repetitions;
    `tracing_overhead` compares traced repetitions with the others.
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
        shares = dict.fromkeys(stacked_parts(run.directions), 0.0)
        for name, value in zip(names, mean[p].tolist()):
            shares[name if name in shares else name.rpartition(" ")[2]] += value
        shares["waiting"] += float(late[p])
        found[phase] = shares
    return found


def tracing_overhead(run: Run) -> dict[str, float] | None:
    """Divide the median time of traced repetitions by that of the others, for each phase."""
    seconds = _seconds(run)
    if seconds is None:
        return None
    own = seconds.sum(axis=-1)
    return {phase: model_run.typical(own[:, p]) / model_run.typical(run.times[phase])
            for p, phase in enumerate(PHASES)}


def collective_bandwidth(run: Run) -> dict[str, float] | None:
    """Compute the bytes a second of a rank in collectives that copy, by direction.

    The bytes are those of `mm3d.grid.axis.Traffic` in both phases on all ranks, the time is the
    mean of traced repetitions without waiting.  Collectives in shared memory whose result is read
    in place are left out, with their bytes and their time, and so are directions with no others.
    """
    seconds = _seconds(run)
    if seconds is None:
        return None
    names = np.array(run.groups["parts"].scales["part"])
    found = {}
    for a, axis in enumerate(run.directions):
        copying = [kind not in in_place_kinds(run, axis) for kind in COLLECTIVES]
        moved = run.traffic["bytes"][:, :, a, copying].sum()
        kinds = itertools.compress(COLLECTIVES, copying)
        inside = np.isin(names, [f"{kind} {axis}" for kind in kinds])
        taken = seconds[..., inside].sum(axis=(1, 2, 3)).mean()
        if moved and taken:
            found[axis] = float(moved / taken)
    return found


def in_place_kinds(run: Run, axis: str) -> frozenset[str]:
    """List the collectives along a direction whose results were read in place."""
    transports = str(run.configuration.get("transport", "")).split()
    if "shared" in transports and (len(transports) == 1 or axis in run.configuration.get(
            "within_nodes", "")):
        transports = ["shared"]
    return in_place_collectives(" ".join(transports))


def machine_rate(run: Run, name: str) -> float:
    """Return a rate of the group ``machine``; NaN if it was not recorded.

    A rate of memory is NaN, as it may be that of the caches, where the arrays were less than twice
    as large as these, or the arrays' size was not recorded (older files).
    """
    if name.startswith("memory"):
        arrays, caches = (run.most("machine", which)
                          for which in ("memory_arrays", "last_level_caches"))
        if math.isnan(arrays) or arrays < 2 * caches:
            return math.nan
    return run.most("machine", name)


def _seconds(run: Run) -> np.ndarray | None:
    """Return undilated seconds of traced repetitions, (repetition, phase, rank, part)."""
    found = run.of_group("parts", "seconds")
    return None if found is None else found / run.dilation
