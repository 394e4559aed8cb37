"""Recognise what makes a tensor differ from the exact one: factors, places, and parts of sums.

A pattern is named only if it explains the tensor: little enough is left of the error, see
`bench.experiments.dump.verdicts.Judged.left`.
"""

from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Iterator

import numpy as np

from bench.errors import UsageError
from bench.experiments.dump.envelopes import Distance
from bench.experiments.dump.tensor_files import number_type

RANK_COUNTS = range(2, 17)    # of ranks that are tried


@dataclass(frozen=True)
class Region:
    """State where a tensor is wrong: from `first` to before `end` of a dimension of `count`."""

    dim: int
    first: int
    end: int
    count: int

    def of(self, a: np.ndarray) -> np.ndarray:
        """Return this region of a tensor."""
        return a[(slice(None),) * self.dim + (slice(self.first, self.end),)]

    @property
    def is_shard(self) -> bool:
        """Return whether it is one of a few equal blocks."""
        size = self.end - self.first
        return not (self.count % size or self.first % size) and self.count // size in RANK_COUNTS

    def __str__(self) -> str:
        size = self.end - self.first
        shard = f", block {self.first // size} of {self.count // size}" if self.is_shard else ""
        return f"{self.first} to {self.end - 1} of {self.count} in dimension {self.dim}{shard}"


def factor_of(a: np.ndarray, exact: np.ndarray, left: Distance) -> float | None:
    """Return c where `a` is c times the exact tensor, other than 1; None where it is not."""
    c = coefficients([exact], a, left)
    return None if c is None or c[0] == 1 else float(c[0])


def coefficients(terms: list[np.ndarray], a: np.ndarray, left: Distance) -> np.ndarray | None:
    """Return the coefficients of a sum of terms that explains a tensor; None if none does.

    Simple numbers, see `simple`, are taken for those that are near, if they explain it.
    """
    c = fit(terms, a)
    for some in () if c is None else (simple(c), c):
        if explained(a, np.tensordot(some, terms, 1), left, np.abs(some).max()):
            return some
    return None


def simple(c: Any) -> np.ndarray:
    """Return the nearest of 0, 1, the numbers of ranks that are tried, and their inverses."""
    some = np.array([0.0, 1.0, *RANK_COUNTS, *(1 / n for n in RANK_COUNTS)])
    return some[np.abs(np.subtract.outer(c, some)).argmin(-1)]


def fit(terms: list[np.ndarray], a: np.ndarray) -> np.ndarray | None:
    """Return the coefficients of the sum of terms that is nearest to `a`; None if undefined."""
    columns = np.stack([np.float64(term).ravel() for term in terms], 1)
    if not np.isfinite(a).all() or not columns.any(0).all():
        return None
    found, _, rank, _ = np.linalg.lstsq(columns, np.float64(a).ravel(), rcond=1e-10)
    return found if rank == len(terms) else None


def explained(a: np.ndarray, other: np.ndarray, left: Distance, grown: float = 1.0) -> bool:
    """Return whether `a` is another tensor but for an error that may be left.

    `grown` is by how much the tensor, and so its error, is larger than the exact one.
    """
    return Distance.between(a, other).over(left.times(max(1.0, abs(grown)))) <= 1


def moved_blocks(a: np.ndarray, exact: np.ndarray, left: Distance) -> str | None:
    """Return in which order blocks of the exact tensor are in `a`, if in another than its own."""
    for dim, n in ((dim, n) for n in (2, 4, 8) for dim in range(a.ndim)):
        if a.shape[dim] % n or not a.any():
            continue
        blocks = np.split(exact, n, dim)
        found = [next((number for number, other in enumerate(blocks) if explained(
            own, other, left)), None) for own in np.split(a, n, dim)]
        if None not in found and found != [*range(n)]:
            return (f"of {n} blocks in dimension {dim} it has {', '.join(map(str, found))} one "
                    f"after another: shards are in another order")
    return None


def narrower(a: np.ndarray) -> str | None:
    """Return the type of 16 bits that has all of a tensor's numbers, which are not few."""
    for name in ("bfloat16", "float16"):
        try:
            dtype = number_type(name)
        except UsageError:    # nothing here has that type, so it cannot be recognised
            continue
        if np.count_nonzero(a) > 8 and np.array_equal(a.astype(dtype).astype(np.float64), a):
            return name
    return None


def say_number(c: float) -> str:
    """Return a factor as a whole number or fraction, where it is near a simple one."""
    near = Fraction(float(c)).limit_denominator(64)
    if abs(float(near) - c) < 2e-3 * max(abs(c), 1e-3) and (
            near.denominator <= 16 or near.numerator <= 2):
        return str(near)
    return f"{c:.4g}"


def wrong_shard(a: np.ndarray, exact: np.ndarray, envelope: Distance) -> Region | None:
    """Return the smallest block of an equal division that has all errors; None if none has."""
    found = wrong_region(a, exact, envelope)
    return found if found is not None and found.is_shard else None


def wrong_region(a: np.ndarray, exact: np.ndarray, envelope: Distance) -> Region | None:
    """Return the smallest range of one dimension that has all errors; None for the whole."""
    gap = np.abs(np.float64(a) - exact)
    wrong = ~(gap <= envelope.largest)
    if not wrong.any():    # many small errors
        wrong = gap > envelope.whole / np.sqrt(gap.size)
    regions = []
    for dim, count in enumerate(a.shape):
        at = np.flatnonzero(wrong.any(axis=tuple(other for other in range(a.ndim)
                                                 if other != dim)))
        if len(at) and at[-1] + 1 - at[0] < count:
            regions.append(_rounded(Region(dim, int(at[0]), int(at[-1]) + 1, count)))
    regions = [one for one in regions if one.end - one.first < one.count]
    return min(regions, key=lambda one: (one.end - one.first) / one.count, default=None)


def _rounded(region: Region) -> Region:
    """Return the block of an equal division that has a region, if one has little more."""
    for parts in reversed(RANK_COUNTS):
        size, rest = divmod(region.count, parts)
        if rest or not size:
            continue
        first = region.first // size * size
        if region.end <= first + size and 4 * (region.end - region.first) >= 3 * size:
            return Region(region.dim, first, first + size, region.count)
    return region


def packed_documents(tokens: np.ndarray, wrong: np.ndarray,
                     counted: np.ndarray) -> tuple[int, np.ndarray] | None:
    """Return the token between packed documents, and the number of each position's document.

    A document ends or begins with that token wherever it is, and `wrong`, (batch, seq), first
    holds in each sequence where its second document begins, but for those that are not `counted`.
    None where there is no such token, or all of these documents begin at one position, as where a
    shard begins, or where nothing sees a token that all sequences begin with.
    """
    some, at = wrong.any(1), wrong.argmax(1)
    if not some.any() or wrong[:, 0].any():
        return None
    for before in (1, 0):
        near = tokens[some, at[some] - before]
        begins = np.roll(tokens == near[0], before, 1)
        begins[:, 0] = False
        seen = begins & counted
        if seen.any(0).sum() > 1 and np.array_equal(seen.any(1), some) and np.array_equal(
                seen.argmax(1), at):
            return int(near[0]), begins.cumsum(1)
    return None


def divisions(count: int, said: int | None) -> Iterator[int]:
    """Yield numbers of ranks among which `count` may be divided; the one that was said first."""
    if said and 1 < said <= count:
        yield said
    for n in RANK_COUNTS:
        if n != said and n <= count and count % n == 0:
            yield n
