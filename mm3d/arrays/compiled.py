"""Compile the bodies of `mm3d.arrays.numpy_kernels` with Numba: a block in one pass or two.

Each function is compiled for float32 and float64 when this file is imported, or read from Numba's
cache.  Elements are rounded as the operations are written, with no fast mathematics: they have the
same bits wherever they lie.  Sums along a row may be added in another order than written, which
depends on the length of the row alone.  A dry run counts the passes of NumPy, which are more, and
the same memory, to the byte.
"""

import math
from typing import Any, Callable

import numpy as np
from numba import float32, float64, njit, void
from numba.extending import overload

from mm3d.arrays.elementwise import GELU_CUBIC, GELU_SCALE
from mm3d.arrays.numpy_kernels import MAX_EXPONENT, Array, Kernels

CUBIC, LINEAR, SLOPE = -2 * GELU_SCALE * GELU_CUBIC, -2 * GELU_SCALE, 6 * GELU_SCALE * GELU_CUBIC
LOG2_E = 1 / math.log(2)
# The logarithm of 2 in two terms: an exponent times the first is exact.
HIGH_32, HIGH_64 = 355 / 512, round(math.log(2) * 2 ** 32) / 2 ** 32
LOW_32, LOW_64 = (math.log(2) - high + 2.319046813846e-17 for high in (HIGH_32, HIGH_64))
ROUND_32, ROUND_64 = 1.5 * 2 ** 23, 1.5 * 2 ** 52    # a number plus it ends in an integer
C2, C3, C4, C5, C6, C7, C8, C9, C10, C11, C12, C13 = (1 / math.factorial(n)
                                                      for n in range(2, 14))


EXACT = {"error_model": "numpy", "fastmath": False}
# What a function calls becomes a part of it.  Else a process that compiles links the copy that it
# compiled alone, and one that reads the cache another: sums would be added in two orders.  It is
# compiled as the function is, unless it says otherwise.
INLINED = {**EXACT, "forceinline": True}
inner = njit(**INLINED)
summing = njit(**INLINED | {"fastmath": {"reassoc", "nsz"}})    # terms in any order


def compiled(kinds: str) -> Callable:
    """Return a decorator that compiles a function for float32 and float64, of these arguments.

    They are vectors (v), matrices (m) and stacks of them (s), all contiguous; matrices with gaps
    (g); and numbers (n).
    """
    def signature(real: Any) -> Any:
        types = {"v": real[::1], "m": real[:, ::1], "s": real[:, :, ::1], "g": real[:, :],
                 "n": float64}
        return void(*(types[one] for one in kinds))
    return njit([signature(float32), signature(float64)], cache=True, **EXACT)


def exp(x: float) -> float:
    """Return the exponential of x, from -inf to `MAX_EXPONENT`; 0 where it would be subnormal.

    It is 2^n exp(r) with the next integer n to x / log 2, and a Taylor series in the rest r.
    """
    return (_exp_32 if x.itemsize == 4 else _exp_64)(x)


@overload(exp, jit_options=INLINED)
def _exp_of(x):
    return _exp_32 if x.bitwidth == 32 else _exp_64


def _exp_32(x):
    whole = x * np.float32(LOG2_E) + np.float32(ROUND_32)
    n = whole - np.float32(ROUND_32)
    r = x - n * np.float32(HIGH_32) - n * np.float32(LOW_32)
    y = np.float32(C6) + np.float32(C7) * r
    y = np.float32(C5) + y * r
    y = np.float32(C4) + y * r
    y = np.float32(C3) + y * r
    y = np.float32(C2) + y * r
    y = np.float32(1) + (r + r * r * y)
    power = np.int32((np.float32(whole).view(np.int32) + np.int32(127)) << np.int32(23)).view(
        np.float32)
    return np.float32(0) if x < np.float32(-87.33) else y * power


def _exp_64(x):
    whole = x * LOG2_E + ROUND_64
    n = whole - ROUND_64
    r = x - n * HIGH_64 - n * LOW_64
    y = C12 + C13 * r
    y = C11 + y * r
    y = C10 + y * r
    y = C9 + y * r
    y = C8 + y * r
    y = C7 + y * r
    y = C6 + y * r
    y = C5 + y * r
    y = C4 + y * r
    y = C3 + y * r
    y = C2 + y * r
    y = 1.0 + (r + r * r * y)
    power = np.int64((np.float64(whole).view(np.int64) + 1023) << 52).view(np.float64)
    return 0.0 if x < -708.0 else y * power


def sortable(x: float) -> int:
    """Return an integer for a number, in the same order; processors find the largest faster."""
    return (_sortable_32 if x.itemsize == 4 else _sortable_64)(x)


def number_of(key: int) -> float:
    """Return the number that `sortable` returned `key` for."""
    return (_number_32 if key.itemsize == 4 else _number_64)(key)


@overload(sortable, jit_options=INLINED)
def _sortable_of(x):
    return _sortable_32 if x.bitwidth == 32 else _sortable_64


@overload(number_of, jit_options=INLINED)
def _number_of(key):
    return _number_32 if key.bitwidth == 32 else _number_64


def _sortable_32(x):
    bits = np.float32(x).view(np.int32)
    return np.int32(bits ^ ((bits >> np.int32(31)) & np.int32(0x7fffffff)))


def _sortable_64(x):
    bits = np.float64(x).view(np.int64)
    return np.int64(bits ^ ((bits >> 63) & 0x7fffffffffffffff))


def _number_32(key):
    return np.int32(key ^ ((key >> np.int32(31)) & np.int32(0x7fffffff))).view(np.float32)


def _number_64(key):
    return np.int64(key ^ ((key >> 63) & 0x7fffffffffffffff)).view(np.float64)


@inner
def gelu_exponential(u, square, real):
    """Return exp(-2z), see `mm3d.arrays.numpy_kernels.Kernels`; NaN of NaN."""
    z = (square * real(CUBIC) + real(LINEAR)) * u
    return exp(real(MAX_EXPONENT) if z > real(MAX_EXPONENT) else z)


@compiled("mvm")
def gelu_forward(x, b, y):
    """Put GELU of x + b, by tanh, into y; b is a row."""
    real = x.dtype.type
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            u = x[i, j] + b[j]
            y[i, j] = u / (real(1) + gelu_exponential(u, u * u, real))


@compiled("mmvm")
def gelu_backward(dy, x, b, dx):
    """Put the gradient of x of `gelu_forward` into dx."""
    real = x.dtype.type
    for i in range(x.shape[0]):
        for j in range(x.shape[1]):
            u = x[i, j] + b[j]
            square = u * u
            s = real(1) / (real(1) + gelu_exponential(u, square, real))
            slope = (square * real(SLOPE) - real(LINEAR)) * u * (real(1) - s)
            dx[i, j] = (slope + real(1)) * s * dy[i, j]


@summing
def sum_products_row(a, b):
    """Return the sum of the products of two rows, in any order."""
    total = a.dtype.type(0)
    for j in range(a.shape[0]):
        total += a[j] * b[j]
    return total


@compiled("mmgg")
def normalize_backward(d, xhat, rstd, means):
    """Put (d - means[:, 1] xhat - means[:, 0]) rstd in place of d, for each row."""
    for i in range(d.shape[0]):
        r, first, second = rstd[i, 0], means[i, 0], means[i, 1]
        for j in range(d.shape[1]):
            d[i, j] = (d[i, j] - xhat[i, j] * second - first) * r


@inner
def largest_of_row(a):
    """Return the largest number, found among integers in the same order; NaN is the largest."""
    top = sortable(a[0])
    for j in range(a.shape[0]):
        top = max(top, sortable(a[j]))
    return number_of(top)


@summing
def exponentials_of_row(a, top):
    """Put exp(a - top) in place of a; return the sum."""
    total = a.dtype.type(0)
    for j in range(a.shape[0]):
        e = exp(a[j] - top)
        a[j] = e
        total += e
    return total


@compiled("sgg")
def exponentials(a, top, total):
    """Put exp(a - top) in place of a, with the maximum and the sum of each row into the others."""
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            top[i, j] = largest_of_row(a[i, j])
            total[i, j] = exponentials_of_row(a[i, j], top[i, j])


@compiled("ss")
def softmax_backward(p, ds):
    """Put (ds - sum(p ds)) p in place of ds, for each row of probabilities p."""
    for i in range(p.shape[0]):
        for j in range(p.shape[1]):
            total = sum_products_row(p[i, j], ds[i, j])
            for k in range(p.shape[2]):
                ds[i, j, k] = (ds[i, j, k] - total) * p[i, j, k]


@compiled("vvvvnnnnnnn")
def adamw(w, g, m, v, g_factor, m_factor, square_factor, v_factor, eps, rate, w_factor):
    """Update moments m and v by the gradient g, and w by them, in one pass, as NumPy rounds."""
    real = w.dtype.type
    for i in range(w.shape[0]):
        s = g[i] * real(g_factor)
        a = m[i] * real(m_factor) + s
        q = v[i] * real(v_factor) + s * s * real(square_factor)
        m[i] = a
        v[i] = q
        w[i] = w[i] * real(w_factor) - a / (np.sqrt(q) + real(eps)) * real(rate)


class CompiledKernels(Kernels):
    """Compute the blocks of `Kernels` with the functions above; those with gaps by NumPy."""

    def _gelu(self, x: Array, b: Array, y: Array, u: Array, limits: Array) -> None:
        if are_whole(x, b, y):
            gelu_forward(x, b, y)
        else:
            super()._gelu(x, b, y, u, limits)

    def _gelu_gradient(self, *block: Array) -> None:
        if are_whole(*block[:4]):
            gelu_backward(*block[:4])
        else:
            super()._gelu_gradient(*block)

    def _normal_gradient(self, *block: Array) -> None:
        dy, xhat, rstd, means, dx, _ = block
        if are_whole(dy, xhat, dx):
            np.copyto(dx, dy)    # in place: of two arrays, dx may be dy, nothing is vectorized
            normalize_backward(dx, xhat, rstd, means)
        else:
            super()._normal_gradient(*block)

    def _exponentials(self, a: Array, top: Array, total: Array, ones: Array) -> None:
        if not are_whole(a):
            super()._exponentials(a, top, total, ones)
        elif len(a.shape) == 2:
            exponentials(a[None, :, :], top[None, :], total[None, :])
        else:
            exponentials(a, top, total)

    def _softmax_gradient(self, P: Array, dS: Array, total: Array) -> None:
        softmax_backward(P, dS)

    def adamw(self, arrays: tuple[Array, ...], numbers: tuple[float, ...]) -> bool:
        """Change a parameter by AdamW; return whether the arrays have no gaps, as they must.

        The arrays are the parameter, its gradient and both moments.  The numbers are those of
        `mm3d.training.optimizers.AdamW`: the factors of the gradient, the first moment, the
        gradient's square and the second moment, eps, the rate, and the factor of the parameter:
        weight decay.
        """
        whole = are_whole(*arrays)
        if whole:
            adamw(*(np.reshape(a, -1) for a in arrays), *numbers)
        return whole


def are_whole(*arrays: Array) -> bool:
    """Return whether arrays have no gaps, may be written, and are of no class of their own."""
    return all(type(a) is np.ndarray and a.flags.carray for a in arrays)
