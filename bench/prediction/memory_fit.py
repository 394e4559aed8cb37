"""Decide whether a model fits the memory of a rank, and choose a recomputation that fits."""

import re
import sys
from dataclasses import replace
from functools import cache

from bench.cases.variants import Variant, itemsize
from bench.errors import UsageError
from mm3d.grid.shape import GridShape
from mm3d.model import recomputation
from mm3d.model.recomputation import POLICIES
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run

GridSizes = tuple[int, ...] | GridShape    # the sizes of a scheme's directions

UNITS = {"": 1, "B": 1, **{f"{prefix}{ending}": base ** power
                           for ending, base in (("B", 1000), ("iB", 1024))
                           for power, prefix in enumerate("KMGT", 1)}}


def parse_size(text: str) -> int:
    """Read bytes from text such as ``16 GB`` (16 times 1000^3) or ``40 GiB`` (40 times 1024^3).

    Raises UsageError when the text is no size.
    """
    found = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?)\s*([KMGT]?i?B|)", text.strip())
    bare = found and not found[2] and float(found[1]) < 1e6    # its unit was forgotten
    if not found or found[2] not in UNITS or not float(found[1]) or bare:
        raise UsageError(f"{text!r} is no size of memory: give it as 16 GB (of 1000^3 bytes) or "
                         "40 GiB (of 1024^3)")
    return int(float(found[1]) * UNITS[found[2]])


@cache
def predict_peak(scheme: str, grid: GridSizes, stack: Stack, how: Variant = Variant(),
                 block: int = sys.maxsize) -> int:
    """Predict the peak bytes of rank 0, which has the most, by a dry run of the model.

    Its experts are assumed to get equally many tokens.  Of `how` its `keep` and `overlap` are
    used.  Elementwise work handles `block` elements at a time; by default whole arrays, as on a
    GPU.
    """
    shape = find_scheme(scheme).grid_shape(grid)
    return dry_run.extrapolate_step(scheme, shape.ranks, shape, options=how.options(scheme),
                                    block=block, **stack.fields()).peak


def choose_policy(scheme: str, grid: GridSizes, stack: Stack, limit: float,
                  how: Variant = Variant()) -> tuple[str | None, int]:
    """Choose the policy with the least recomputation whose peak is at most `limit` bytes.

    Returns the policy and its peak bytes; None and the least peak if none fits.
    """
    peaks = []
    for name in list_policies(how.keep):
        peaks.append(predict_peak(scheme, grid, replace(stack, recompute=name), how))
        if peaks[-1] <= limit:
            return name, peaks[-1]
    return None, min(peaks)


def list_policies(keep: str = "none") -> list[str]:
    """List the policies that go with `keep`; "selective" keeps no gathered operand."""
    return [name for name in POLICIES
            if keep == "none" or not recomputation.parse_policy(name).selective]


def judge_fit(scheme: str, grid: GridSizes, stack: Stack, limit: int,
              how: Variant = Variant()) -> tuple[bool, str]:
    """Decide whether a model fits into `limit` bytes a rank.

    Returns whether it fits, and a line that says so or names a policy that does.
    """
    needed = predict_peak(scheme, grid, stack, how)
    line = (f"recompute {stack.recompute} needs {format_gib(needed)} a rank by a dry run, of "
            f"{format_gib(limit)}")
    if needed <= limit:
        return True, f"{line}: it fits without an optimizer"
    name, least = choose_policy(scheme, grid, stack, limit, how)
    if name is None:
        return False, (f"{line}, and no policy fits: the least is {format_gib(least)}; take more "
                       f"ranks")
    return False, f"{line}: it does not fit, but --recompute {name} does, with {format_gib(least)}"


def state_bytes(zero: int, shards: int, value: int = 2, gradient: int = 2,
                master: int = 4, moments: int = 8) -> float:
    """Return the bytes per parameter of a rank's state, without activations.

    By default numbers are those of figure 1 of ZeRO (Rajbhandari et al., 2020): values and
    gradients of 16 bits, masters and both moments of Adam in float32.  Without separate masters,
    `master` is 0.
    """
    divided = [1 / shards if zero >= stage else 1 for stage in (3, 2, 1)]
    return value * divided[0] + gradient * divided[1] + (master + moments) * divided[2]


def state_by_kind(dtype: str, parameters: float, zero: int = 0,
                  shards: int = 1) -> dict[str, float]:
    """Return the bytes of a rank's values, gradients, masters and moments in training by AdamW.

    Values in 16 bits have masters in float32, and gradients as wide.  `parameters` are those of a
    rank, undivided among replicas, of which `shards` divide a copy of the model by ZeRO.
    """
    size = itemsize(dtype)
    wide = max(size, 4)
    kinds = {"values": (size, 0, 0, 0), "gradients": (0, wide, 0, 0),
             "masters": (0, 0, 4 * (size == 2), 0), "moments": (0, 0, 0, 2 * wide)}
    return {name: parameters * state_bytes(zero, shards, *of) for name, of in kinds.items()}


def format_gib(count: float) -> str:
    """Format bytes as GiB."""
    return f"{count / 2 ** 30:.3g} GiB"
