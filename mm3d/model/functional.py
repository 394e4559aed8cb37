"""Compute forward and backward of all operations other than linear layers, on one rank's arrays.

The functions are pairs ``x_forward`` and ``x_backward`` without state: all that backward needs is
in its signature.  They write their results into `out`, an array that the caller provides.  They
work in blocks of rows or heads, so that intermediate values need little memory and stay in cache.

This is the readable implementation, for any array library; a backend may replace a function by a
faster kernel of the same name.  It uses only the array API standard, and no operation promotes
types: float32 in, float32 throughout.  Operands of 16 bits are converted to float32, since squares
and attention scores of ordinary activations exceed the range of float16; only results are rounded
back.
"""

import functools
import math
from typing import Any, Callable

from mm3d.arrays.backend import Array, accumulation_dtype, backend_of, namespace
from mm3d.arrays.elementwise import GELU_CUBIC, GELU_SCALE, by_head, head_blocks, row_blocks


def prefer_backend_kernel(readable: Callable) -> Callable:
    """Replace `readable` by the backend's kernel of the same name in calls that have one.

    The backend of the first argument decides: its kernels are the functions of
    `mm3d.arrays.backend.Backend.kernels`, for the dtypes that these list.  In a dry run they have
    a context `calling`, which notes the call.  The readable function remains as ``__wrapped__``.
    """
    name = readable.__name__

    @functools.wraps(readable)
    def chosen(a: Array, *rest, **more):
        kernels = backend_of(a).kernels
        fast = getattr(kernels, name, None) if kernels and a.dtype in kernels.dtypes else None
        if calling := getattr(kernels, "calling", None):
            with calling(name, (a, *rest), more):
                return (fast or readable)(a, *rest, **more)
        return (fast or readable)(a, *rest, **more)
    return chosen


@prefer_backend_kernel
def add_rows(a: Array, b: Array, out: Array) -> Array:
    """Compute a + b, the vector b added to every row of `a`.

    `a` is (..., local features), b (local features,); `out` may be `a`.
    """
    for u, y in row_blocks(backend_of(a), a, out):
        y[...] = u + b
    return out


@prefer_backend_kernel
def scale_rows(a: Array, b: Array, out: Array) -> Array:
    """Compute a * b, every row of `a` multiplied by the vector b; parameters as in `add_rows`."""
    for u, y in row_blocks(backend_of(a), a, out):
        y[...] = u * b
    return out


@prefer_backend_kernel
def scale_add_rows(a: Array, b: Array, c: Array, out: Array) -> Array:
    """Compute a * b + c, both vectors with every row of `a`; parameters as in `add_rows`."""
    return add_rows(scale_rows(a, b, out), c, out)


@prefer_backend_kernel
def sum_rows(a: Array, keep_float32: bool = False) -> Array:
    """Sum all rows of `a`, (..., local features), with at least float32 precision.

    The result, (local features,), is of the dtype of `a`; or with `keep_float32` of the type in
    which it was computed, float32 or wider.
    """
    return _sum_terms(keep_float32, lambda u: u, a)


@prefer_backend_kernel
def sum_products(a: Array, b: Array, keep_float32: bool = False) -> Array:
    """Sum a * b over all rows; shapes and dtypes as in `sum_rows`."""
    return _sum_terms(keep_float32, lambda u, v: u * v, a, b)


@prefer_backend_kernel
def sum_rows_and_products(a: Array, b: Array, keep_float32: bool = False) -> tuple[Array, Array]:
    """Sum a, and a * b, over all rows; shapes and dtypes as in `sum_rows`."""
    return sum_rows(a, keep_float32), sum_products(a, b, keep_float32)


def upcast(a: Array) -> Array:
    """Convert `a` to the type of computation: float32 for 16 bits, otherwise its own."""
    return namespace(a).astype(a, accumulation_dtype(a), copy=False)


def _sum_terms(keep_float32: bool, term: Callable[..., Array], *arrays: Array) -> Array:
    """Sum term(*rows) over all rows of `arrays`, block by block."""
    like = arrays[0]
    xp, library, dtype = namespace(like), backend_of(like), accumulation_dtype(like)
    total = library.empty(like.shape[-1:], dtype)
    total[...] = 0
    for rows in row_blocks(library, *arrays):
        total += xp.sum(term(*map(upcast, rows)), axis=0, dtype=dtype)
    return total if keep_float32 else xp.astype(total, like.dtype, copy=False)


def gelu_forward(x: Array, out: Array) -> Array:
    """Compute GELU in its tanh form, x/2 (1 + tanh(sqrt(2/pi) (x + 0.044715 x^3))).

    x has any shape, `out` the same and its own dtype.  Source: Hendrycks and Gimpel, arXiv
    1606.08415.
    """
    library, xp = backend_of(x), namespace(x)
    for u, y in row_blocks(library, x, out):
        u = upcast(u)
        t = xp.tanh(u * (GELU_SCALE + GELU_SCALE * GELU_CUBIC * (u * u)))
        t += 1
        t *= u
        y[...] = xp.astype(t * 0.5, y.dtype, copy=False)
    return out


def gelu_backward(dy: Array, x: Array, out: Array) -> Array:
    """Compute dx = dy GELU'(x) in `out`, from the input x of `gelu_forward`."""
    library, xp = backend_of(x), namespace(x)
    for g, u, dx in row_blocks(library, dy, x, out):
        u = upcast(u)
        square = u * u
        t = xp.tanh(u * (GELU_SCALE + GELU_SCALE * GELU_CUBIC * square))
        slope = GELU_SCALE / 2 + (1.5 * GELU_SCALE * GELU_CUBIC) * square
        slope *= u
        slope *= 1 - t * t
        slope += 0.5 * (1 + t)
        dx[...] = xp.astype(upcast(g) * slope, dx.dtype, copy=False)
    return out


@prefer_backend_kernel
def bias_gelu_forward(x: Array, b: Array, out: Array) -> Array:
    """Compute GELU(x + b), the vector b added to every row of x; parameters as in `add_rows`."""
    for u, y in row_blocks(backend_of(x), x, out):
        gelu_forward(upcast(u) + upcast(b), y)
    return out


@prefer_backend_kernel
def bias_gelu_backward(dy: Array, x: Array, b: Array, out: Array,
                       keep_float32: bool = False) -> tuple[Array, Array]:
    """Compute dx = dy GELU'(x + b) in `out`, and db, the sum of dx over all rows.

    `keep_float32` as in `sum_rows`.
    """
    for g, u, dx in row_blocks(backend_of(x), dy, x, out):
        gelu_backward(g, upcast(u) + upcast(b), dx)
    return out, sum_rows(out, keep_float32)


def sum_row(xp: Any, a: Array) -> Array:
    """Sum over the last dimension, with at least float32 precision; keep that dimension."""
    return xp.sum(a, axis=-1, dtype=accumulation_dtype(a), keepdims=True)


@prefer_backend_kernel
def normalize_forward(x: Array, features: int, eps: float, total: Callable[[Array], Array],
                      out: Array) -> tuple[Array, Array]:
    """Normalize rows, (x - mean) / sqrt(variance + eps): layer normalization without affine part.

    The variance is computed in a second pass, from deviations from the mean, so that a large mean
    causes no cancellation.  Source: Ba, Kiros and Hinton, arXiv 1607.06450.

    x is (..., local features); `features` is their global number; ``total(sums)`` sums an array of
    row sums over the ranks that share the rows.  Returns `out`, which receives the normalized
    rows, and 1 / sqrt(variance + eps) as (..., 1) in float32 at least.
    """
    library, xp = backend_of(x), namespace(x)
    mean = total(sum_row(xp, x)) / features
    squares = library.empty(mean.shape, mean.dtype)
    for u, m, s in row_blocks(library, x, mean, squares):
        centred = upcast(u) - m
        s[...] = sum_row(xp, centred * centred)
    rstd = 1 / xp.sqrt(total(squares) / features + eps)
    for u, m, y, r in row_blocks(library, x, mean, out, rstd):
        y[...] = xp.astype((upcast(u) - m) * r, y.dtype, copy=False)
    return out, rstd


@prefer_backend_kernel
def normalize_backward(dy: Array, xhat: Array, rstd: Array, features: int,
                       total: Callable[[Array], Array], out: Array) -> Array:
    """Compute dx = rstd (dy - mean(dy) - xhat mean(dy xhat)) in `out`, for `normalize_forward`.

    `total` sums both means over the ranks in one call.
    """
    library, xp = backend_of(dy), namespace(dy)
    sums = library.empty(rstd.shape[:-1] + (2,), rstd.dtype)
    for g, h, s in row_blocks(library, dy, xhat, sums):
        g, h = upcast(g), upcast(h)
        s[:, 0:1] = sum_row(xp, g)
        s[:, 1:2] = sum_row(xp, g * h)
    means = total(sums) / features
    for g, h, r, m, dx in row_blocks(library, dy, xhat, rstd, means, out):
        g, h = upcast(g), upcast(h)
        dx[...] = xp.astype((g - m[:, 0:1] - h * m[:, 1:2]) * r, dx.dtype, copy=False)
    return out


@prefer_backend_kernel
def attention_forward(q: Array, k: Array, v: Array, first: int, causal: bool,
                      out: Array) -> tuple[Array, Array]:
    """Compute softmax(Q K^T / sqrt(d)) V for each sequence and head.

    Only a few heads of one sequence are computed at a time, so that the scores of all heads are
    never stored at once.  Source: Vaswani et al., arXiv 1706.03762.

    q and `out`, which receives the result, are (batch, queries, heads, d), local: the sequences,
    positions and heads of this rank; k and v are (batch, positions, heads, d), all positions of
    these sequences.  `first` is the position of the first query in its sequence; with `causal` a
    query attends only to its own position and those before it.  Returns `out`, and the logarithm
    of each row's sum of exponentials, (batch, heads, queries), in float32 at least.
    """
    return attend(q, k, v, causal_mask(q, k, first) if causal else None, out)


def attend(q: Array, k: Array, v: Array, mask: Array | None, out: Array) -> tuple[Array, Array]:
    """Compute attention with a mask, which is added to the scores of all sequences and heads."""
    library, xp = backend_of(q), namespace(q)
    batch, queries, heads, _ = q.shape
    lse = library.empty((batch, heads, queries), accumulation_dtype(q))
    for b, some in head_blocks(library, q, k):
        Q, K, V = (upcast(by_head(xp, a[b, :, some, :])) for a in (q, k, v))
        S = _scores(xp, Q, K, mask)
        top = xp.max(S, axis=-1, keepdims=True)
        S -= top
        P = xp.exp(S)
        total = xp.sum(P, axis=-1, keepdims=True)
        PV = xp.matmul(P, V)
        PV /= total
        _store_heads(out, b, some, PV)
        lse[b, some, :] = (top + xp.log(total))[:, :, 0]
    return out, lse


@prefer_backend_kernel
def attention_backward(do: Array, q: Array, k: Array, v: Array, lse: Array, first: int,
                       causal: bool, dq: Array, dk: Array, dv: Array) -> None:
    """Compute dq, dk and dv of `attention_forward` in the arrays of these names.

    The probabilities P are recomputed from `lse`.  Then dV = P^T dO, dP = dO V^T,
    dS = P (dP - rowsum(P dP)) / sqrt(d), dQ = dS K and dK = dS^T Q.  dk and dv, of the shape of k,
    are gradients at all positions, from the queries of this rank.
    """
    attend_backward(do, (q, k, v), lse, causal_mask(q, k, first) if causal else None,
                    (dq, dk, dv))


def attend_backward(do: Array, qkv: tuple[Array, Array, Array], lse: Array, mask: Array | None,
                    gradients: tuple[Array, Array, Array], sums: Array | None = None) -> None:
    """Compute the gradients of `attend`.

    Where these keys are a part of those that `lse` is of, `sums` are the sums of P dP over all of
    them, (batch, heads, queries).
    """
    (q, k, v), (dq, dk, dv) = qkv, gradients
    library, xp = backend_of(q), namespace(q)
    scale = 1 / math.sqrt(q.shape[-1])
    for b, some in head_blocks(library, q, k):
        Q, K, V, dO = (upcast(by_head(xp, a[b, :, some, :])) for a in (q, k, v, do))
        P = _scores(xp, Q, K, mask)
        P -= lse[b, some, :][:, :, None]
        P = xp.exp(P)
        dP = xp.matmul(dO, xp.matrix_transpose(V))
        _store_heads(dv, b, some, xp.matmul(xp.matrix_transpose(P), dO))
        dP -= (xp.sum(P * dP, axis=-1, keepdims=True) if sums is None else
               sums[b, some, :][:, :, None])
        dP *= P
        dP *= scale
        _store_heads(dq, b, some, xp.matmul(dP, K))
        _store_heads(dk, b, some, xp.matmul(xp.matrix_transpose(dP), Q))


def _store_heads(a: Array, b: int, some: slice, heads: Array) -> None:
    """Store `heads`, (heads, positions, d), as heads `some` of sequence b of `a`.

    `a` is (batch, positions, heads, d).
    """
    xp = namespace(a)
    a[b, :, some, :] = xp.astype(xp.permute_dims(heads, (1, 0, 2)), a.dtype, copy=False)


def causal_mask(q: Array, k: Array, first: int) -> Array:
    """Return the causal mask (queries, positions): -inf at later positions, 0 elsewhere."""
    queries, positions, library = q.shape[1], k.shape[1], backend_of(q)
    later = library.arange(0, positions)[None, :] > library.arange(first, first + queries)[:, None]
    zero = 0 * library.xp.astype(later, accumulation_dtype(q))
    return library.xp.where(later, zero - math.inf, zero)


def _scores(xp: Any, Q: Array, K: Array, mask: Array | None) -> Array:
    """Compute Q K^T / sqrt(d), plus the mask."""
    S = xp.matmul(Q, xp.matrix_transpose(K))
    S *= 1 / math.sqrt(Q.shape[-1])
    if mask is not None:
        S += mask
    return S
