"""Compute the norm of a divided gradient with the same bits on every grid.

Floating-point sums depend on their order, hence on how arrays are divided.  Here each square is
rounded to a whole multiple of one unit, 2^-47 of the (largest magnitude)^2 rounded up to a power
of 4.  Sums of integers have no rounding, so their order does not matter, nor who holds which
element (pre-rounding: Demmel and Nguyen, Parallel reproducible summation, IEEE Trans. Comput.
64(7), 2015).  Where that may be too coarse, which all ranks find alike from the sum, what was left
of each square is rounded to multiples of 2^-85 and summed as well.
"""

import math
from types import MappingProxyType
from typing import Any, Iterable, Mapping

import numpy as np
from mpi4py import MPI

from mm3d.arrays.backend import Array, backend_of
from mm3d.arrays.elementwise import pieces
from mm3d.grid.agreement import compare

BITS, MORE_BITS = 47, 38       # of the unit, and of the second one relative to the first
# Added to a number below 1 (below 2^-BITS), such a sum's last bit is the unit.
FIRST = 1.5 * 2.0 ** (52 - BITS)
SECOND = 1.5 * 2.0 ** (52 - BITS - MORE_BITS)
ROW = 1 << 15                  # elements whose rounded squares add up to less than 2^63 units
PIECE = 1 << 24                # elements on a device, whose pieces are as large as they can be
LIMBS, LIMB_BITS = 5, 32       # of an integer that is summed over the ranks
TOLERANCE = {4: 2.0 ** -30, 8: 2.0 ** -53}    # of the sum, by the bytes of an element


def largest_magnitude(arrays: Iterable[Array], comm: MPI.Intracomm,
                      call: str = "largest_magnitude",
                      given: Mapping[str, Any] = MappingProxyType({})) -> float:
    """Return the largest magnitude over the arrays of all ranks; infinity for any NaN too.

    Every rank of `comm` must call it; the exchange compares the call and what is `given`.  Raises
    ValueError on every rank alike, when they differ.
    """
    largest = 0.0
    for a in arrays:
        library = backend_of(a)
        for (piece,) in pieces(library, a):
            top = float(library.xp.max(piece)), -float(library.xp.min(piece))
            largest = max(largest, *top) if all(x < math.inf for x in top) else math.inf
    return compare(comm, call, given, largest=largest)


def reproducible_norm(arrays: list[Array], comm: MPI.Intracomm,
                      largest: float | None = None) -> float:
    """Compute the root of the sum of all squares of the arrays of all ranks.

    The result has the same bits however the elements, each on one rank only, are divided into
    arrays and over ranks, which all call this.  Beside the rounding of each square and of the
    result to float64, its relative error is below 2^-31, and typically far below; for float64,
    below n 2^-86 with n elements.  It is infinity where any element is infinite or NaN, or the
    norm is beyond float64.  `largest` is the result of `largest_magnitude`, which is computed if
    not given.
    """
    if largest is None:
        largest = largest_magnitude(arrays, comm)
    if largest in (0, math.inf):
        return largest
    exponent = max(math.frexp(largest)[1], -1000)     # 2^1000 is a number, 2^1074 is not
    scale = math.ldexp(1, -exponent)
    elements = sum(a.size for a in arrays)
    total, elements, wide = _sum_integers(
        comm, sum(_sum_squares(a, scale, again=False) for a in arrays), elements,
        sum(a.dtype.itemsize > 4 for a in arrays))
    if elements > 2 * TOLERANCE[8 if wide else 4] * total:
        (more,) = _sum_integers(comm, sum(_sum_squares(a, scale, again=True) for a in arrays))
        return _scaled_root((total << MORE_BITS + 1) + (more << 1),
                            exponent - (BITS + MORE_BITS + 1) // 2)
    return _scaled_root(total << 1, exponent - (BITS + 1) // 2)


def _scaled_root(square: int, exponent: int) -> float:
    """Return sqrt(square) 2^exponent; infinity where that is too large a number."""
    try:
        return math.ldexp(math.sqrt(square), exponent)
    except OverflowError:
        return math.inf


def _sum_integers(comm: MPI.Intracomm, *numbers: int) -> list[int]:
    """Sum each of some integers of any size, also negative ones, over the ranks."""
    mask = (1 << LIMB_BITS) - 1
    limbs = np.array([[number >> LIMB_BITS * k & mask for k in range(LIMBS - 1)]
                      + [number >> LIMB_BITS * (LIMBS - 1)] for number in numbers], np.int64)
    comm.Allreduce(MPI.IN_PLACE, limbs)
    return [sum(int(limb) << LIMB_BITS * k for k, limb in enumerate(row)) for row in limbs]


def _sum_squares(a: Array, scale: float, again: bool) -> int:
    """Sum the rounded squares of scaled elements, which are below 1, in units.

    With `again` sum what is left by the rounding to the first unit, in second units.
    """
    library, total = backend_of(a), 0
    xp, block = library.xp, min(library.block, PIECE)
    square, rounded = (library.empty((min(block, a.size),), xp.float64) for _ in range(2))
    for (piece,) in pieces(library, a, block=block):
        s, r = square[:piece.size], rounded[:piece.size]
        xp.multiply(piece, scale, out=xp.reshape(s, piece.shape), dtype=xp.float64)
        xp.multiply(s, s, out=s)
        if again:
            xp.add(s, FIRST, out=r)
            xp.subtract(r, FIRST, out=r)
            xp.subtract(s, r, out=s)
        offset = SECOND if again else FIRST
        xp.add(s, offset, out=s)
        total += _sum_units(library, s, offset)
    return total


def _sum_units(library: Any, a: Array, offset: float) -> int:
    """Sum a - offset, in units of the last bit of `offset`, which all elements of `a` have too.

    The bits of such numbers, read as integers, count these units.  Sums may wrap around.
    """
    xp, bits = library.xp, int(np.float64(offset).view(np.int64))
    units, whole = a.view(xp.int64), a.size // ROW * ROW
    sums = []
    if whole:
        rows = xp.sum(xp.reshape(units[:whole], (-1, ROW)), axis=1)
        sums = [(total, ROW) for total in library.to_host(rows).tolist()]
    if whole < a.size:
        sums.append((int(xp.sum(units[whole:])), a.size - whole))
    return sum((total - size * bits + (1 << 63)) % (1 << 64) - (1 << 63) for total, size in sums)
