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


def _exponential(real: type, integer: type, least: float, terms: int, high: float) -> Callable:
    """Return the function `exp` of one type; `high` is log 2, exact times an integer."""
    digits, bias = integer(np.finfo(real).nmant), integer(np.finfo(real).maxexp - 1)
    high, low = real(high), real(math.log(2) - high + 2.319046813846e-17)
    log2_e, to_integer = real(1 / math.log(2)), real(1.5 * 2.0 ** digits)
    first, *others = (real(1 / math.factorial(n)) for n in range(terms, 1, -1))
    least, zero, one, others = real(least), real(0), real(1), tuple(others)

    def exp_of(x):
        whole = x * log2_e + to_integer    # a number that ends in an integer
        n = whole - to_integer
        r = x - n * high - n * low
        y = first
        for c in others:
            y = c + y * r
        y = one + (r + r * r * y)
        power = integer((real(whole).view(integer) + bias) << digits).view(real)
        return zero if x < least else y * power
    return exp_of


def _in_order(real: type, integer: type) -> tuple[Callable, Callable]:
    """Return the functions `sortable` and `number_of` of one type."""
    last, rest = integer(8 * real().itemsize - 1), np.iinfo(integer).max

    def key_of(x):
        bits = real(x).view(integer)
        return integer(bits ^ ((bits >> last) & integer(rest)))

    def number(key):
        return integer(key ^ ((key >> last) & integer(rest))).view(real)
    return key_of, number


# By the bytes of a number.
EXPONENTIALS = {4: _exponential(np.float32, np.int32, -87.33, 7, 355 / 512),
                8: _exponential(np.float64, np.int64, -708.0, 13,
                                round(math.log(2) * 2 ** 32) / 2 ** 32)}
IN_ORDER = {4: _in_order(np.float32, np.int32), 8: _in_order(np.float64, np.int64)}


def exp(x: float) -> float:
    """Return the exponential of x, from -inf to `MAX_EXPONENT`; 0 where it would be subnormal.

    It is 2^n exp(r) with the next integer n to x / log 2, and a Taylor series in the rest r.
    """
    return EXPONENTIALS[x.itemsize](x)


def sortable(x: float) -> int:
    """Return an integer for a number, in the same order; processors find the largest faster."""
    return IN_ORDER[x.itemsize][0](x)


def number_of(key: int) -> float:
    """Return the number that `sortable` returned `key` for."""
    return IN_ORDER[key.itemsize][1](key)


overload(exp, jit_options=INLINED)(lambda x: EXPONENTIALS[x.bitwidth // 8])
overload(sortable, jit_options=INLINED)(lambda x: IN_ORDER[x.bitwidth // 8][0])
overload(number_of, jit_options=INLINED)(lambda key: IN_ORDER[key.bitwidth // 8][1])


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
