"""Forward and backward of everything that is no linear layer, on the arrays of one rank.

Pairs ``x_forward`` and ``x_backward`` without state: what backward needs is in its signature.
Results go into the array `out`, which the caller provides; work is done in blocks, whose
intermediate values take little memory and stay in cache.  These are the pairs to read, for any
array library; a backend may bring a faster `kernel` of the same name.  Only functions of the
array API standard are used, and no operation promotes: float32 in, float32 throughout.  Types of
16 bits are computed with in float32, since squares and scores of ordinary activations are beyond
the range of float16, and only results are rounded to them.
"""

import functools
import math
from typing import Callable

from mm3d.arrays.backend import Array, accumulation_dtype, backend_of, namespace
from mm3d.arrays.blocks import GELU_CUBIC, GELU_SCALE, by_head, head_blocks, row_blocks


def kernel(readable: Callable) -> Callable:
    """`readable`, or the backend's own function of that name where it has one for the dtype.

    The backend is that of the first argument, and its functions are those of
    `mm3d.arrays.backend.Backend.kernels`.  The readable one remains as ``__wrapped__``.
    """
    name = readable.__name__

    @functools.wraps(readable)
    def chosen(a: Array, *rest, **more):
        found = backend_of(a).kernels
        fast = getattr(found, name, None) if found and a.dtype in found.dtypes else None
        return (fast or readable)(a, *rest, **more)
    return chosen


@kernel
def add_rows(a: Array, b: Array, out: Array) -> Array:
    """a + b, every row of `a` plus the vector b; `out` may be `a`."""
    for u, y in row_blocks(backend_of(a), a, out):
        y[...] = u + b
    return out


@kernel
def scale_rows(a: Array, b: Array, out: Array) -> Array:
    """a * b, every row of `a` times the vector b; `out` may be `a`."""
    for u, y in row_blocks(backend_of(a), a, out):
        y[...] = u * b
    return out


@kernel
def sum_rows(a: Array, keep_float32: bool = False) -> Array:
    """Sum all rows of `a` in float32 at least, and round to the dtype of `a`.

    With `keep_float32` the sum is not rounded.
    """
    return _total(keep_float32, lambda u: u, a)


@kernel
def sum_products(a: Array, b: Array, keep_float32: bool = False) -> Array:
    """The sum over all rows of a * b, as `sum_rows`."""
    return _total(keep_float32, lambda u, v: u * v, a, b)


def _upcast(a: Array) -> Array:
    """`a` in the type that is computed with: itself, but float32 for types of 16 bits."""
    return namespace(a).astype(a, accumulation_dtype(a), copy=False)


def _total(keep_float32: bool, term: Callable[..., Array], *arrays: Array) -> Array:
    like = arrays[0]
    xp, library, dtype = namespace(like), backend_of(like), accumulation_dtype(like)
    total = library.empty(like.shape[-1:], dtype)
    total[...] = 0
    for rows in row_blocks(library, *arrays):
        total += xp.sum(term(*map(_upcast, rows)), axis=0, dtype=dtype)
    return total if keep_float32 else xp.astype(total, like.dtype, copy=False)


def gelu_forward(x: Array, out: Array) -> Array:
    """GELU in its tanh form, x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).

    Hendrycks and Gimpel, arXiv 1606.08415.
    """
    library, xp = backend_of(x), namespace(x)
    for u, y in row_blocks(library, x, out):
        u = _upcast(u)
        t = xp.tanh(u * (GELU_SCALE + GELU_SCALE * GELU_CUBIC * (u * u)))
        t += 1
        t *= u
        y[...] = xp.astype(t * 0.5, y.dtype, copy=False)
    return out


def gelu_backward(dy: Array, x: Array, out: Array) -> Array:
    """dx of `gelu_forward`, from its input x."""
    library, xp = backend_of(x), namespace(x)
    for g, u, dx in row_blocks(library, dy, x, out):
        u = _upcast(u)
        square = u * u
        t = xp.tanh(u * (GELU_SCALE + GELU_SCALE * GELU_CUBIC * square))
        slope = GELU_SCALE / 2 + (1.5 * GELU_SCALE * GELU_CUBIC) * square
        slope *= u
        slope *= 1 - t * t
        slope += 0.5 * (1 + t)
        dx[...] = xp.astype(_upcast(g) * slope, dx.dtype, copy=False)
    return out


@kernel
def bias_gelu_forward(x: Array, b: Array, out: Array) -> Array:
    """GELU of x + b, every row of `x` plus the vector b: `gelu_forward` after `add_rows`."""
    for u, y in row_blocks(backend_of(x), x, out):
        gelu_forward(_upcast(u) + _upcast(b), y)
    return out


@kernel
def bias_gelu_backward(dy: Array, x: Array, b: Array, out: Array,
                       keep_float32: bool = False) -> tuple[Array, Array]:
    """dx and db of `bias_gelu_forward`: `gelu_backward` at x + b, and its `sum_rows`."""
    for g, u, dx in row_blocks(backend_of(x), dy, x, out):
        gelu_backward(g, _upcast(u) + _upcast(b), dx)
    return out, sum_rows(out, keep_float32)


def _sums(xp, a: Array) -> Array:
    """Sums over the last dimension, in float32 at least."""
    return xp.sum(a, axis=-1, dtype=accumulation_dtype(a), keepdims=True)


@kernel
def normalize_forward(x: Array, features: int, eps: float, total: Callable[[Array], Array],
                      out: Array) -> tuple[Array, Array]:
    """Layer normalization without its affine part, (x - mean) / sqrt(variance + eps).

    Two passes, first the mean, then the squares of what is left, so that a large mean does not
    cancel.  Ba, Kiros and Hinton, arXiv 1607.06450.

    Parameters
    ----------
    x : Array
        (..., local features).
    features : int
        Their global number.
    eps : float
        Added to the variance.
    total : callable
        Sums an array of row sums over the ranks that hold the rest of the features.
    out : Array
        Receives the normalized rows.

    Returns
    -------
    xhat, rstd : Array
        `out`, and 1 / sqrt(variance + eps) as (..., 1).
    """
    library, xp = backend_of(x), namespace(x)
    mean = total(_sums(xp, x)) / features
    squares = library.empty(mean.shape, mean.dtype)
    for u, m, s in row_blocks(library, x, mean, squares):
        centred = _upcast(u) - m
        s[...] = _sums(xp, centred * centred)
    rstd = 1 / xp.sqrt(total(squares) / features + eps)
    for u, m, y, r in row_blocks(library, x, mean, out, rstd):
        y[...] = xp.astype((_upcast(u) - m) * r, y.dtype, copy=False)
    return out, rstd


@kernel
def normalize_backward(dy: Array, xhat: Array, rstd: Array, features: int,
                       total: Callable[[Array], Array], out: Array) -> Array:
    """dx of `normalize_forward`, rstd (dy - mean(dy) - xhat mean(dy xhat)).

    The two means are summed over the ranks in one go.
    """
    library, xp = backend_of(dy), namespace(dy)
    sums = library.empty(rstd.shape[:-1] + (2,), rstd.dtype)
    for g, h, s in row_blocks(library, dy, xhat, sums):
        g, h = _upcast(g), _upcast(h)
        s[:, 0:1] = _sums(xp, g)
        s[:, 1:2] = _sums(xp, g * h)
    means = total(sums) / features
    for g, h, r, m, dx in row_blocks(library, dy, xhat, rstd, means, out):
        g, h = _upcast(g), _upcast(h)
        dx[...] = xp.astype((g - m[:, 0:1] - h * m[:, 1:2]) * r, dx.dtype, copy=False)
    return out


@kernel
def attention_forward(q: Array, k: Array, v: Array, first: int, causal: bool,
                      out: Array) -> tuple[Array, Array]:
    """softmax(Q K^T / sqrt(d)) V for each sequence and head.

    Vaswani et al., arXiv 1706.03762.  Some heads of one sequence at a time, so that the scores
    of all of them are never held at once.

    Parameters
    ----------
    q : Array
        (batch, queries, heads, d): the positions of this rank.
    k, v : Array
        (batch, positions, heads, d): all positions of the sequence.
    first : int
        The position of the first query, for the mask.
    causal : bool
        Whether a position sees only itself and those before it.
    out : Array
        As q; receives the result.

    Returns
    -------
    out, lse : Array
        The result, and the logarithm of each row's sum of exponentials, (batch, heads, queries).
    """
    library, xp = backend_of(q), namespace(q)
    batch, queries, heads, d = q.shape
    dtype = accumulation_dtype(q)
    lse = library.empty((batch, heads, queries), dtype)
    mask = _mask(q, k, first, dtype) if causal else None
    for b, some in head_blocks(library, q, k):
        Q, K, V = (_upcast(by_head(xp, a[b, :, some, :])) for a in (q, k, v))
        S = _scores(xp, Q, K, mask)
        top = xp.max(S, axis=-1, keepdims=True)
        S -= top
        P = xp.exp(S)
        total = xp.sum(P, axis=-1, keepdims=True)
        PV = xp.matmul(P, V)
        PV /= total
        _put(out, b, some, PV)
        lse[b, some, :] = (top + xp.log(total))[:, :, 0]
    return out, lse


@kernel
def attention_backward(do: Array, q: Array, k: Array, v: Array, lse: Array, first: int,
                       causal: bool, dq: Array, dk: Array, dv: Array) -> None:
    """Fill dq, dk and dv; the probabilities are computed again from `lse`.

    With P the probabilities: dV = P^T dO, dP = dO V^T, dS = P (dP - rowsum(P dP)) / sqrt(d),
    dQ = dS K and dK = dS^T Q.
    """
    library, xp = backend_of(q), namespace(q)
    scale = 1 / math.sqrt(q.shape[-1])
    mask = _mask(q, k, first, lse.dtype) if causal else None
    for b, some in head_blocks(library, q, k):
        Q, K, V, dO = (_upcast(by_head(xp, a[b, :, some, :])) for a in (q, k, v, do))
        P = _scores(xp, Q, K, mask)
        P -= lse[b, some, :][:, :, None]
        P = xp.exp(P)
        dP = xp.matmul(dO, xp.matrix_transpose(V))
        _put(dv, b, some, xp.matmul(xp.matrix_transpose(P), dO))
        dP -= xp.sum(P * dP, axis=-1, keepdims=True)
        dP *= P
        dP *= scale
        _put(dq, b, some, xp.matmul(dP, K))
        _put(dk, b, some, xp.matmul(xp.matrix_transpose(dP), Q))


def _put(a: Array, b: int, some: slice, by_heads: Array) -> None:
    """Put (heads, positions, d) where it belongs in (batch, positions, heads, d)."""
    xp = namespace(a)
    a[b, :, some, :] = xp.astype(xp.permute_dims(by_heads, (1, 0, 2)), a.dtype, copy=False)


def _mask(q: Array, k: Array, first: int, dtype) -> Array:
    """0 where a query may look and -inf beyond its own position."""
    queries, positions, library = q.shape[1], k.shape[1], backend_of(q)
    later = library.arange(0, positions)[None, :] > library.arange(first, first + queries)[:, None]
    zero = library.empty((queries, positions), dtype)
    zero[...] = 0
    return library.xp.where(later, zero - math.inf, zero)


def _scores(xp, Q: Array, K: Array, mask: Array | None) -> Array:
    """Q K^T / sqrt(d), plus the mask."""
    S = xp.matmul(Q, xp.matrix_transpose(K))
    S *= 1 / math.sqrt(Q.shape[-1])
    if mask is not None:
        S += mask
    return S
