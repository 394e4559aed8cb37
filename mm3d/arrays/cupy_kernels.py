"""The GPU's versions of the functions of `mm3d.model.functional`, which document them.

They launch what ``kernels.cu`` holds.  Attention is made of batched products and of kernels for
the softmax, over as many sequences and heads at a time as the scores have memory for.
"""

import itertools
import math
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np

Array = Any
Part = tuple[slice, slice, slice]    # of the sequences, the heads and the queries

SOURCE = Path(__file__).with_name("kernels.cu")
TYPES = {"float32": "float", "float64": "double", "float16": "half_t", "bfloat16": "bf16_t"}
NAMES = ("bias_gelu_forward", "bias_gelu_backward", "add_rows", "scale_rows", "sum_rows",
         "sum_products", "sum_parts", "norm_sums", "norm_squares", "norm_scale", "norm_forward",
         "norm_backward_sums", "norm_backward", "softmax_forward", "softmax_again",
         "softmax_backward")
EXPRESSIONS = [f"{name}<{kind}>" for name in NAMES for kind in TYPES.values()]
OPTIONS = ("--std=c++17",)

THREADS = 256
BLOCKS = 4096            # of an elementwise kernel, at most
SCORES = 2 ** 28         # bytes of attention scores held at a time, at most


class GpuKernels:
    """Functions of `mm3d.model.functional` for the arrays of a GPU.

    Parameters
    ----------
    library : CupyBackend
        Makes the arrays and the products, and compiles.

    Attributes
    ----------
    dtypes : tuple of dtype
        The arrays that these are for.
    """

    def __init__(self, library: Any) -> None:
        self.library = library
        self.dtypes = tuple(np.dtype(name) for name in TYPES if name != "bfloat16")
        self.dtypes += library.more_dtypes
        self._functions: dict[tuple[str, Any], Callable] = {}    # by name and type
        self._module: Any = None

    def _launch(self, name: str, like: Array, blocks: tuple[int, ...], *arguments: Any) -> None:
        """Run the kernel `name` for the type of `like`; nothing where there is no work."""
        if 0 in blocks:
            return
        function = self._functions.get((name, like.dtype))
        if function is None:
            function = self._function(name, like.dtype)
        function((*blocks, 1)[:2], (THREADS,), arguments)

    def _function(self, name: str, dtype: Any) -> Callable:
        """The kernel `name` for a type, looked up once."""
        if self._module is None:
            self._module = self.library.compiled(SOURCE.read_text(), OPTIONS, EXPRESSIONS)
        found = self._module.get_function(f"{name}<{TYPES[str(dtype)]}>")
        return self._functions.setdefault((name, dtype), found)

    def _sum_type(self, a: Array) -> Any:
        """The type of sums, of which a kernel's numbers are."""
        return np.float64 if a.dtype == np.float64 else np.float32

    def _into(self, out: Array, work: Callable[[Array], None]) -> Array:
        """`work` on `out`, or on an array whose elements lie together and are copied into it."""
        if self.library.is_contiguous(out):
            work(out)
        else:
            together = self.library.empty(out.shape, out.dtype)
            work(together)
            out[...] = together
        return out

    def bias_gelu_forward(self, x: Array, b: Array, out: Array) -> Array:
        return self._with_rows("bias_gelu_forward", x, b, out)

    def bias_gelu_backward(self, dy: Array, x: Array, b: Array, out: Array,
                           keep_float32: bool = False) -> tuple[Array, Array]:
        dy, x, b = map(self.library.contiguous, (dy, x, b))
        (rows, cols), packs = _matrix(dy), 16 // dy.dtype.itemsize
        parts = self._parts(dy)
        self._into(out, lambda dx: self._launch(
            "bias_gelu_backward", dy, (-(-cols // (32 * packs)), parts.shape[0]), dy, x, b, dx,
            parts, np.int64(rows), np.int64(cols)))
        return out, self._summed(parts, dy, keep_float32)

    def add_rows(self, a: Array, b: Array, out: Array) -> Array:
        return self._with_rows("add_rows", a, b, out)

    def scale_rows(self, a: Array, b: Array, out: Array) -> Array:
        return self._with_rows("scale_rows", a, b, out)

    def _with_rows(self, name: str, a: Array, b: Array, out: Array) -> Array:
        rows, cols = _matrix(a)
        across = -(-cols // (THREADS * (16 // out.dtype.itemsize)))
        down = min(rows, max(1, BLOCKS // max(1, across)))
        a, b = self.library.contiguous(a), self.library.contiguous(b)
        return self._into(out, lambda y: self._launch(name, y, (across, down), a, b, y,
                                                      np.int64(rows), np.int64(cols)))

    def sum_rows(self, a: Array, keep_float32: bool = False) -> Array:
        return self._columns("sum_rows", keep_float32, a)

    def sum_products(self, a: Array, b: Array, keep_float32: bool = False) -> Array:
        return self._columns("sum_products", keep_float32, a, b)

    def _columns(self, name: str, keep_float32: bool, *arrays: Array) -> Array:
        a, (rows, cols) = arrays[0], _matrix(arrays[0])
        parts = self._parts(a)
        self._launch(name, a, (-(-cols // 32), parts.shape[0]),
                     *map(self.library.contiguous, arrays), parts, np.int64(rows), np.int64(cols))
        return self._summed(parts, a, keep_float32)

    def _parts(self, a: Array) -> Array:
        """Memory for the sums of the columns of `a` over some of its rows each."""
        rows, cols = _matrix(a)
        return self.library.empty((max(1, min(-(-rows // 64), 256)), cols), self._sum_type(a))

    def _summed(self, parts: Array, like: Array, keep_float32: bool) -> Array:
        """The sum of the parts, in the type of `like` unless `keep_float32`."""
        count, cols = parts.shape
        out = self.library.empty((cols,), parts.dtype if keep_float32 else like.dtype)
        self._launch("sum_parts", out, (-(-cols // THREADS),), parts, out, np.int32(count),
                     np.int64(cols))
        return out

    def normalize_forward(self, x: Array, features: int, eps: float,
                          total: Callable[[Array], Array], out: Array) -> tuple[Array, Array]:
        x, (rows, cols), kind = self.library.contiguous(x), _matrix(x), self._sum_type(x)
        rstd = self.library.empty((*x.shape[:-1], 1), kind)
        if cols == features > 1:    # whole rows: no other rank has any of them
            return self._into(out, lambda y: self._launch(
                "norm_forward", x, (rows,), x, y, rstd, kind(features), kind(eps),
                np.int64(cols))), rstd
        sums, squares = (self.library.empty(rstd.shape, kind) for _ in range(2))
        self._launch("norm_sums", x, (rows,), x, sums, np.int64(cols))
        sums = total(sums)
        self._launch("norm_squares", x, (rows,), x, sums, squares, kind(features), np.int64(cols))
        squares = total(squares)
        return self._into(out, lambda y: self._launch(
            "norm_scale", x, (rows,), x, sums, squares, y, rstd, kind(features), kind(eps),
            np.int64(cols))), rstd

    def normalize_backward(self, dy: Array, xhat: Array, rstd: Array, features: int,
                           total: Callable[[Array], Array], out: Array) -> Array:
        dy, xhat = self.library.contiguous(dy), self.library.contiguous(xhat)
        (rows, cols), kind = _matrix(dy), self._sum_type(dy)
        sums = self.library.empty((*rstd.shape[:-1], 2), kind)
        self._launch("norm_backward_sums", dy, (rows,), dy, xhat, sums, np.int64(cols))
        sums = total(sums)
        return self._into(out, lambda dx: self._launch(
            "norm_backward", dy, (rows,), dy, xhat, rstd, sums, dx, kind(features),
            np.int64(cols)))

    def attention_forward(self, q: Array, k: Array, v: Array, first: int, causal: bool,
                          out: Array) -> tuple[Array, Array]:
        batch, queries, heads, d = q.shape
        positions, kind = k.shape[1], self._sum_type(q)
        lse = self.library.empty((batch, heads, queries), kind)
        narrow = [q.dtype] if q.dtype != kind else []    # else P takes the place of its scores
        for part, (S, *P) in self._parts_of_scores(q, positions, [kind, *narrow]):
            P = P[0] if P else S
            Q, y = _rows(q, part), _rows(out, part)
            K, V = _rows(k, part[:2]), _rows(v, part[:2])
            self.library.gemms(self._pairs(Q), _turned(self._pairs(K)), S)
            self._launch("softmax_forward", q, (S.shape[0] * S.shape[1],), S, P, lse[part],
                         np.int32(S.shape[1]), np.int32(positions),
                         np.int32(first + part[2].start), np.int32(causal),
                         kind(1 / math.sqrt(d)))
            self._multiply(P, self._pairs(V), y)
        return out, lse

    def attention_backward(self, do: Array, q: Array, k: Array, v: Array, lse: Array, first: int,
                           causal: bool, dq: Array, dk: Array, dv: Array) -> None:
        queries, d = q.shape[1], q.shape[-1]
        if not queries:    # no part fills these, which are added to those of other ranks
            dk[...], dv[...] = 0, 0
            return
        positions, kind = k.shape[1], self._sum_type(q)
        scale, sums = kind(1 / math.sqrt(d)), []
        for part, (S, P) in self._parts_of_scores(q, positions, [kind, q.dtype]):
            Q, dO = self._pairs(_rows(q, part)), self._pairs(_rows(do, part))
            K, V = (self._pairs(_rows(a, part[:2])) for a in (k, v))
            rows = S.shape[0] * S.shape[1]
            self.library.gemms(Q, _turned(K), S)
            self._launch("softmax_again", q, (rows,), S, P, lse[part], np.int32(S.shape[1]),
                         np.int32(positions), np.int32(first + part[2].start), np.int32(causal),
                         scale)
            dV = self._sum(sums, 0, _turned(P), dO, _rows(dv, part[:2]), part[2], queries)
            self.library.gemms(dO, _turned(V), S)    # dP, where the scores were
            # dS takes the place of P, which is needed no more.
            self._launch("softmax_backward", q, (rows,), P, S, P, np.int32(positions), scale)
            self._multiply(P, K, _rows(dq, part))
            dK = self._sum(sums, 1, _turned(P), Q, _rows(dk, part[:2]), part[2], queries)
            sums = [dV, dK]

    def _parts_of_scores(self, q: Array, positions: int,
                         kinds: list[Any]) -> Iterator[tuple[Part, list[Array]]]:
        """Sequences, heads and queries, and memory for their scores in these types, of `SCORES`
        bytes at most: (pairs of a sequence and a head, queries, positions)."""
        batch, queries, heads, _ = q.shape
        size = positions * sum(np.dtype(kind).itemsize for kind in kinds)
        parts = parts_of_scores(batch, heads, queries, size)
        sequences, some, rows = _extents(parts[0]) if parts else (0, 0, 0)    # of the largest
        made = [self.library.empty((sequences * some, rows, positions), kind) for kind in kinds]
        for part in parts:
            sequences, some, rows = _extents(part)
            yield part, [a[:sequences * some, :rows, ...] for a in made]

    def _pairs(self, a: Array) -> Array:
        """(sequences, heads, positions, d) as (sequences x heads, positions, d): where they lie
        if one distance leads from each to the next, else a copy."""
        there = _evenly_apart(a)
        if there is None:
            there = _evenly_apart(self.library.contiguous(a))
        return there

    def _multiply(self, a: Array, b: Array, out: Array) -> None:
        """The product of pairs, into (sequences, heads, positions, d)."""
        there = _evenly_apart(out)
        if there is not None:
            self.library.gemms(a, b, there)
            return
        together = self.library.empty(out.shape, out.dtype)
        self.library.gemms(a, b, _evenly_apart(together))
        out[...] = together

    def _sum(self, sums: list[Array], which: int, a: Array, b: Array, out: Array, rows: slice,
             queries: int) -> Array | None:
        """The product of pairs over all queries into `out`; over `rows` of them it is added to
        what those before gave, in the type of sums, which goes into `out` with the last."""
        if rows == slice(0, queries):
            self._multiply(a, b, out)
            return None
        begun = rows.start > 0
        total = sums[which] if begun else self.library.empty(out.shape, self._sum_type(out))
        self.library.gemms(a, b, _evenly_apart(total), begun)
        if rows.stop == queries:
            out[...] = total.astype(out.dtype, copy=False)
        return total


def parts_of_scores(batch: int, heads: int, queries: int, size: int) -> list[Part]:
    """Parts of attention whose scores take `SCORES` bytes at most, all of nearly one size.

    A part is all heads of some sequences, or some heads of one, or some queries of one head; at
    least one query.  None is larger than the first.

    Parameters
    ----------
    batch, heads, queries : int
        How many there are.
    size : int
        Bytes of the scores of one query.
    """
    fit = max(1, SCORES // max(1, size))
    if fit >= queries:
        pairs = fit // max(1, queries)
        most = (pairs // heads, heads, queries) if pairs >= heads > 0 else (1, pairs, queries)
    else:
        most = (1, 1, fit)
    return list(itertools.product(*map(_even_parts, (batch, heads, queries), most)))


def _even_parts(total: int, most: int) -> list[slice]:
    step = max(1, -(-total // max(1, -(-total // max(1, most)))))
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _extents(part: Part) -> tuple[int, ...]:
    return tuple(one.stop - one.start for one in part)


def _rows(a: Array, part: tuple[slice, ...]) -> Array:
    """Of (batch, positions, heads, d) the part, all positions where it names none, as (sequences,
    heads, positions, d)."""
    sequences, heads, rows = (*part, slice(None))[:3]
    return a[sequences, rows, heads, :].transpose(0, 2, 1, 3)


def _evenly_apart(a: Array) -> Array | None:
    """The matrices of (sequences, heads, positions, d), where they lie, as one stack of them; None
    where no single distance leads from each to the next."""
    sequences, heads, rows, d = a.shape
    if sequences == 1:
        return a[0, ...]
    if heads == 1:
        return a[:, 0, ...]
    return a.reshape(sequences * heads, rows, d) if a.flags.c_contiguous else None


def _matrix(a: Array) -> tuple[int, int]:
    """Rows and columns of an array whose last dimension is a row."""
    return math.prod(a.shape[:-1]), a.shape[-1]


def _turned(a: Array) -> Array:
    return a.transpose(0, 2, 1)
