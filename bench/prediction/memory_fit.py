"""Decide whether a model fits the memory of a rank, and which recomputation makes it fit."""

import re
import sys
from functools import cache

import numpy as np

from bench.cases.variants import Variant
from bench.errors import UsageError
from mm3d import describe
from mm3d.grid.shape import GridShape
from mm3d.model import cost, recomputation
from mm3d.model.recomputation import POLICIES
from mm3d.schemes import lookup
from mm3d.tracing import dry_run

GridSizes = tuple[int, ...] | GridShape    # the sizes of a scheme's directions

UNITS = {"": 1, "B": 1, **{f"{prefix}{ending}": base ** power
                           for ending, base in (("B", 1000), ("iB", 1024))
                           for power, prefix in enumerate("KMGT", 1)}}
NEAR = 1.1    # closed forms are no more than this factor above dry runs
SURE = 4    # where they leave so many times their bytes free, no dry run is needed


def size(text: str) -> int:
    """Read bytes from text such as ``16 GB`` (16 times 1000^3) or ``40 GiB`` (40 times 1024^3).

    Raises
    ------
    UsageError
        When it is no size.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?i?B|)", text.strip())
    if not found or found[2] not in UNITS or not float(found[1]):
        raise UsageError(f"{text!r} is no size of memory: give it as 16 GB (of 1000^3 bytes) or "
                         "40 GiB (of 1024^3)")
    return int(float(found[1]) * UNITS[found[2]])


@cache
def _peak(scheme: str, grid: GridShape, dtype: str, recompute: str,
          sizes: tuple[tuple[str, int], ...], how: Variant, block: int) -> int:
    return dry_run.extended(scheme, grid.ranks, grid, options=how.options(scheme),
                            dtype=dtype, block=block,
                            causal=how.causal, recompute=recompute, **dict(sizes)).peak


def peak(scheme: str, grid: GridSizes, dtype: str, recompute: str,
         sizes: dict[str, int], how: Variant = Variant(), block: int = sys.maxsize) -> int:
    """Predict the peak bytes of rank 0, which has the most, by a dry run of the model's code.

    Of `how` this takes what is kept and overlaps, and whether attention looks backward only.
    Elementwise work handles `block` elements at a time; by default all at once, as on a GPU.
    """
    shape = lookup(scheme).grid_shape(grid)
    return _peak(scheme, shape, dtype, recompute, tuple(sizes.items()), how, block)


def estimate(scheme: str, grid: GridSizes, dtype: str, recompute: str,
             sizes: dict[str, int], keep: str = "none") -> float:
    """Estimate the peak bytes of rank 0 by the closed form and 6 %, without a dry run.

    At the paper's sizes that is up to 6 % above `peak`.  Small models need more than it, more
    than 3 times as much where a rank has few features: blocks that do not divide weigh more
    there.  The closed form is of what divides: where heads do not, the rank with one more has as
    much more of everything, at most.
    """
    shape = lookup(scheme).grid_shape(grid)
    parts, heads = max(shape.sizes), sizes["heads"]
    closed = cost.peak_words(scheme, shape, describe(sizes, recompute=recompute), keep=keep)
    return 1.06 * closed * np.dtype(dtype).itemsize * -(-heads // parts) * parts / heads


def policy(scheme: str, grid: GridSizes, dtype: str, sizes: dict[str, int],
           limit: float, how: Variant = Variant()) -> tuple[str | None, int]:
    """Find the policy that computes least again and fits into `limit` bytes, and its peak.

    None, and the least peak, where none fits.  Policies that are far from fitting by the closed
    forms are not run dry.
    """
    shape = lookup(scheme).grid_shape(grid)
    closed = {name: np.dtype(dtype).itemsize * cost.peak_words(
        scheme, shape, describe(sizes, recompute=name), keep=how.keep)
        for name in policies(how.keep)}
    for name, words in closed.items():
        if words <= NEAR * limit:
            found = peak(scheme, grid, dtype, name, sizes, how)
            if found <= limit:
                return name, found
    return None, peak(scheme, grid, dtype, min(closed, key=closed.get), sizes, how)


def policies(keep: str = "none") -> list[str]:
    """List the policies that go with `keep`: "selective" keeps nothing that products gather."""
    able = {name: keep == "none" or not recomputation.policy(name).selective for name in POLICIES}
    return [name for name in POLICIES if able[name]]


def verdict(scheme: str, grid: GridSizes, dtype: str, recompute: str,
            sizes: dict[str, int], limit: int, how: Variant = Variant()) -> tuple[bool, str]:
    """Decide whether `recompute` fits into `limit` bytes a rank; a line says so, or what does."""
    needed = peak(scheme, grid, dtype, recompute, sizes, how)
    line = f"recompute {recompute} needs {gib(needed)} a rank by a dry run, of {gib(limit)}"
    if needed <= limit:
        return True, f"{line}: it fits"
    name, least = policy(scheme, grid, dtype, sizes, limit, how)
    if name is None:
        return False, f"{line}, and no policy fits: the least is {gib(least)}; take more ranks"
    return False, f"{line}: it does not fit, but --recompute {name} does, with {gib(least)}"


def gib(count: float) -> str:
    """Format bytes as GiB."""
    return f"{count / 2 ** 30:.3g} GiB"
