"""Compute the functions of `mm3d.model.functional`, which document them, on a GPU.

The kernels are in ``kernels.cu`` and ``row_kernels.cu``.  Attention consists of batched products
and of kernels for the softmax, over as many sequences and heads at a time as the memory for their
scores allows.
"""

import itertools
import math
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np

Array = Any
Part = tuple[slice, slice, slice]    # of the sequences, the heads and the queries

SOURCE_FILES = [Path(__file__).with_name(name) for name in ("kernels.cu", "row_kernels.cu")]
C_TYPES = {"float32": "float", "float64": "double", "float16": "half_t", "bfloat16": "bf16_t"}
KERNEL_NAMES = (
    "bias_gelu_forward", "bias_gelu_backward", "add_rows", "scale_rows", "sum_rows",
    "sum_products", "sum_parts", "norm_sums", "norm_squares", "norm_scale", "norm_forward",
    "norm_backward_sums", "norm_backward", "norm_backward_whole", "softmax_forward",
    "softmax_recompute", "softmax_backward")
TEMPLATE_INSTANCES = [f"{name}<{kind}>" for name in KERNEL_NAMES for kind in C_TYPES.values()]
COMPILER_OPTIONS = ("--std=c++17",)

THREADS_PER_BLOCK, THREADS_PER_WARP = 256, 32
MAX_BLOCKS = 4096            # of threads, in an elementwise kernel
MAX_SCORE_BYTES = 2 ** 28    # of attention scores that are in memory at a time


class GpuKernels:
    """Compute functions of `mm3d.model.functional` on the arrays of a GPU.

    Parameters
    ----------
    library : CupyBackend
        The backend that allocates arrays, multiplies matrices and compiles the kernels.

    Attributes
    ----------
    dtypes : tuple of dtype
        The types of arrays that the kernels take.
    """

    def __init__(self, library: Any) -> None:
        self.library = library
        self.dtypes = tuple(np.dtype(name) for name in C_TYPES if name != "bfloat16")
        self.dtypes += library.more_dtypes
        self._functions: dict[tuple[str, Any], Callable] = {}    # by name and type
        self._module: Any = None

    def _launch(self, name: str, like: Array, blocks: tuple[int, ...], *arguments: Any) -> None:
        """Launch the kernel `name` for the type of `like`; nothing if there are no blocks."""
        if 0 in blocks:
            return
        self.library.join_stream()
        function = self._functions.get((name, like.dtype))
        if function is None:
            function = self._look_up_kernel(name, like.dtype)
        function((*blocks, 1)[:2], (THREADS_PER_BLOCK,), arguments)

    def _launch_by_warps(self, name: str, like: Array, rows: int, *arrays: Array,
                         rest: tuple[np.generic, ...]) -> None:
        """Launch a kernel of which each warp computes a row."""
        blocks = -(-rows // (THREADS_PER_BLOCK // THREADS_PER_WARP))
        self._launch(name, like, (blocks,), *arrays, np.int64(rows), *rest)

    def _look_up_kernel(self, name: str, dtype: Any) -> Callable:
        """Look up the kernel `name` for a type, and keep it."""
        if self._module is None:
            self._module = self.library.compile_module(
                read_source(), COMPILER_OPTIONS, TEMPLATE_INSTANCES)
        found = self._module.get_function(f"{name}<{C_TYPES[str(dtype)]}>")
        return self._functions.setdefault((name, dtype), found)

    def _sum_type(self, a: Array) -> Any:
        """Return the type in which kernels compute and sum the elements of `a`."""
        return np.float64 if a.dtype == np.float64 else np.float32

    def _compute_into(self, out: Array, work: Callable[[Array], None]) -> Array:
        """Call `work` on `out`, or on a contiguous array that is copied to `out` afterwards."""
        if self.library.is_contiguous(out):
            work(out)
        else:
            contiguous = self.library.empty(out.shape, out.dtype)
            work(contiguous)
            out[...] = contiguous
        return out

    def bias_gelu_forward(self, x: Array, b: Array, out: Array) -> Array:
        return self._launch_with_rows("bias_gelu_forward", x, b, out)

    def bias_gelu_backward(self, dy: Array, x: Array, b: Array, out: Array,
                           keep_float32: bool = False) -> tuple[Array, Array]:
        dy, x, b = map(self.library.contiguous, (dy, x, b))
        (rows, cols), packs = _matrix_shape(dy), 16 // dy.dtype.itemsize
        parts = self._allocate_parts(dy)
        self._compute_into(out, lambda dx: self._launch(
            "bias_gelu_backward", dy, (-(-cols // (32 * packs)), parts.shape[0]), dy, x, b, dx,
            parts, np.int64(rows), np.int64(cols)))
        return out, self._sum_parts(parts, dy, keep_float32)

    def add_rows(self, a: Array, b: Array, out: Array) -> Array:
        return self._launch_with_rows("add_rows", a, b, out)

    def scale_rows(self, a: Array, b: Array, out: Array) -> Array:
        return self._launch_with_rows("scale_rows", a, b, out)

    def _launch_with_rows(self, name: str, a: Array, b: Array, out: Array) -> Array:
        """Launch a kernel that combines every row of `a` with the vector `b`."""
        rows, cols = _matrix_shape(a)
        across = -(-cols // (THREADS_PER_BLOCK * (16 // out.dtype.itemsize)))
        down = min(rows, max(1, MAX_BLOCKS // max(1, across)))
        a, b = self.library.contiguous(a), self.library.contiguous(b)
        return self._compute_into(out, lambda y: self._launch(
            name, y, (across, down), a, b, y, np.int64(rows), np.int64(cols)))

    def sum_rows(self, a: Array, keep_float32: bool = False) -> Array:
        return self._sum_columns("sum_rows", keep_float32, a)

    def sum_products(self, a: Array, b: Array, keep_float32: bool = False) -> Array:
        return self._sum_columns("sum_products", keep_float32, a, b)

    def _sum_columns(self, name: str, keep_float32: bool, *arrays: Array) -> Array:
        """Sum columns by a kernel over blocks of rows, then over the blocks."""
        a, (rows, cols) = arrays[0], _matrix_shape(arrays[0])
        parts, packs = self._allocate_parts(a), 16 // a.dtype.itemsize
        self._launch(name, a, (-(-cols // (32 * packs)), parts.shape[0]),
                     *map(self.library.contiguous, arrays), parts, np.int64(rows), np.int64(cols))
        return self._sum_parts(parts, a, keep_float32)

    def _allocate_parts(self, a: Array) -> Array:
        """Allocate (blocks of rows, columns) for the sums of columns over blocks of rows."""
        rows, cols = _matrix_shape(a)
        return self.library.empty((max(1, min(-(-rows // 64), 256)), cols), self._sum_type(a))

    def _sum_parts(self, parts: Array, like: Array, keep_float32: bool) -> Array:
        """Sum the parts over the blocks of rows, in the type of `like` unless `keep_float32`."""
        count, cols = parts.shape
        out = self.library.empty((cols,), parts.dtype if keep_float32 else like.dtype)
        self._launch("sum_parts", out, (-(-cols // THREADS_PER_BLOCK),), parts, out,
                     np.int32(count), np.int64(cols))
        return out

    def normalize_forward(self, x: Array, features: int, eps: float,
                          total: Callable[[Array], Array], out: Array) -> tuple[Array, Array]:
        x, (rows, cols), kind = self.library.contiguous(x), _matrix_shape(x), self._sum_type(x)
        rstd = self.library.empty((*x.shape[:-1], 1), kind)
        if cols == features > 1:    # whole rows: no other rank has a part
            return self._compute_into(out, lambda y: self._launch(
                "norm_forward", x, (rows,), x, y, rstd, kind(features), kind(eps),
                np.int64(cols))), rstd
        sums, squares = (self.library.empty(rstd.shape, kind) for _ in range(2))
        self._launch("norm_sums", x, (rows,), x, sums, np.int64(cols))
        sums = total(sums)
        self._launch("norm_squares", x, (rows,), x, sums, squares, kind(features), np.int64(cols))
        squares = total(squares)
        return self._compute_into(out, lambda y: self._launch(
            "norm_scale", x, (rows,), x, sums, squares, y, rstd, kind(features), kind(eps),
            np.int64(cols))), rstd

    def normalize_backward(self, dy: Array, xhat: Array, rstd: Array, features: int,
                           total: Callable[[Array], Array], out: Array) -> Array:
        dy, xhat = self.library.contiguous(dy), self.library.contiguous(xhat)
        (rows, cols), kind = _matrix_shape(dy), self._sum_type(dy)
        if cols == features > 1:
            return self._compute_into(out, lambda dx: self._launch(
                "norm_backward_whole", dy, (rows,), dy, xhat, rstd, dx, kind(features),
                np.int64(cols)))
        sums = self.library.empty((*rstd.shape[:-1], 2), kind)
        self._launch("norm_backward_sums", dy, (rows,), dy, xhat, sums, np.int64(cols))
        sums = total(sums)
        return self._compute_into(out, lambda dx: self._launch(
            "norm_backward", dy, (rows,), dy, xhat, rstd, sums, dx, kind(features),
            np.int64(cols)))

    def attention_forward(self, q: Array, k: Array, v: Array, first: int, causal: bool,
                          out: Array) -> tuple[Array, Array]:
        batch, queries, heads, d = q.shape
        positions, kind = k.shape[1], self._sum_type(q)
        lse = self.library.empty((batch, heads, queries), kind)
        narrow = [q.dtype] if q.dtype != kind else []    # else P overwrites the scores
        for part, (S, *P) in self._score_parts(q, positions, [kind, *narrow]):
            P = P[0] if P else S
            Q, y = _select_part(q, part), _select_part(out, part)
            K, V = _select_part(k, part[:2]), _select_part(v, part[:2])
            self.library.gemms(self._stack_heads(Q), _transposed(self._stack_heads(K)), S)
            self._launch_by_warps(
                "softmax_forward", q, S.shape[0] * S.shape[1], S, P, lse[part],
                rest=(np.int32(S.shape[1]), np.int32(positions), np.int32(first + part[2].start),
                      np.int32(causal), kind(1 / math.sqrt(d))))
            self._multiply_stacks(P, self._stack_heads(V), y)
        return out, lse

    def attention_backward(self, do: Array, q: Array, k: Array, v: Array, lse: Array, first: int,
                           causal: bool, dq: Array, dk: Array, dv: Array) -> None:
        queries, d = q.shape[1], q.shape[-1]
        if not queries:    # dk and dv are summed over the ranks, and no part below sets them
            dk[...], dv[...] = 0, 0
            return
        positions, kind = k.shape[1], self._sum_type(q)
        scale, sums = kind(1 / math.sqrt(d)), []
        for part, (S, P) in self._score_parts(q, positions, [kind, q.dtype]):
            Q, dO = (self._stack_heads(_select_part(a, part)) for a in (q, do))
            K, V = (self._stack_heads(_select_part(a, part[:2])) for a in (k, v))
            rows = S.shape[0] * S.shape[1]
            self.library.gemms(Q, _transposed(K), S)
            self._launch_by_warps(
                "softmax_recompute", q, rows, S, P, lse[part],
                rest=(np.int32(S.shape[1]), np.int32(positions), np.int32(first + part[2].start),
                      np.int32(causal), scale))
            dV = self._accumulate_product(sums, 0, _transposed(P), dO,
                                          _select_part(dv, part[:2]), part[2], queries)
            self.library.gemms(dO, _transposed(V), S)    # dP overwrites the scores
            self._launch_by_warps("softmax_backward", q, rows, P, S, P,
                                  rest=(np.int32(positions), scale))
            # dS has overwritten P.
            self._multiply_stacks(P, K, _select_part(dq, part))
            dK = self._accumulate_product(sums, 1, _transposed(P), Q,
                                          _select_part(dk, part[:2]), part[2], queries)
            sums = [dV, dK]

    def _score_parts(self, q: Array, positions: int,
                     kinds: list[Any]) -> Iterator[tuple[Part, list[Array]]]:
        """Iterate over parts of attention, with memory for their scores in each of `kinds`.

        The memory is (sequences x heads of the part, queries, positions), all kinds together at
        most `MAX_SCORE_BYTES`, and reused for every part.
        """
        batch, queries, heads, _ = q.shape
        size = positions * sum(np.dtype(kind).itemsize for kind in kinds)
        parts = divide_scores(batch, heads, queries, size)
        sequences, some, rows = _extents(parts[0]) if parts else (0, 0, 0)    # of the largest
        made = [self.library.empty((sequences * some, rows, positions), kind) for kind in kinds]
        for part in parts:
            sequences, some, rows = _extents(part)
            yield part, [a[:sequences * some, :rows, ...] for a in made]

    def _stack_heads(self, a: Array) -> Array:
        """View (sequences, heads, positions, d) as (sequences x heads, positions, d).

        It is a copy where the matrices do not have equal distances in memory.
        """
        stack = _as_stack(a)
        if stack is None:
            stack = _as_stack(self.library.contiguous(a))
        return stack

    def _multiply_stacks(self, a: Array, b: Array, out: Array) -> None:
        """Multiply stacks of matrices into `out`, (sequences, heads, positions, d)."""
        stack = _as_stack(out)
        if stack is not None:
            self.library.gemms(a, b, stack)
            return
        contiguous = self.library.empty(out.shape, out.dtype)
        self.library.gemms(a, b, _as_stack(contiguous))
        out[...] = contiguous

    def _accumulate_product(self, sums: list[Array], which: int, a: Array, b: Array, out: Array,
                            rows: slice, queries: int) -> Array | None:
        """Multiply stacks of matrices for some of the queries, and sum over all of them.

        `rows` are the queries of this part.  If they are all queries, the product goes to `out`.
        Else it is added to ``sums[which]``, the sum over the earlier queries, in the type of
        sums; after the last queries the sum is copied to `out`.  Returns the sum so far.
        """
        if rows == slice(0, queries):
            self._multiply_stacks(a, b, out)
            return None
        begun = rows.start > 0
        total = sums[which] if begun else self.library.empty(out.shape, self._sum_type(out))
        self.library.gemms(a, b, _as_stack(total), begun)
        if rows.stop == queries:
            out[...] = total.astype(out.dtype, copy=False)
        return total


def read_source() -> str:
    """Return the source of all kernels."""
    return "\n".join(path.read_text(encoding="utf-8") for path in SOURCE_FILES)


def divide_scores(batch: int, heads: int, queries: int, size: int) -> list[Part]:
    """Divide attention into parts whose scores take at most `MAX_SCORE_BYTES`, of similar size.

    A part is all heads of some sequences, or some heads of one sequence, or some queries of one
    head; at least one query.  The first part is the largest.

    Parameters
    ----------
    batch, heads, queries : int
        Number of sequences, of heads, and of queries in a sequence.
    size : int
        Bytes of the scores of one query.
    """
    fit = max(1, MAX_SCORE_BYTES // max(1, size))
    if fit >= queries:
        pairs = fit // max(1, queries)
        most = (pairs // heads, heads, queries) if pairs >= heads > 0 else (1, pairs, queries)
    else:
        most = (1, 1, fit)
    return list(itertools.product(*map(_even_slices, (batch, heads, queries), most)))


def _even_slices(total: int, most: int) -> list[slice]:
    """Divide a length into slices of at most `most`, as even as possible."""
    step = max(1, -(-total // max(1, -(-total // max(1, most)))))
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _extents(part: Part) -> tuple[int, ...]:
    """Return the lengths of the slices of a part."""
    return tuple(one.stop - one.start for one in part)


def _select_part(a: Array, part: tuple[slice, ...]) -> Array:
    """View a part of (batch, positions, heads, d) as (sequences, heads, positions, d).

    All positions are selected if the part has no third slice.
    """
    sequences, heads, rows = (*part, slice(None))[:3]
    return a[sequences, rows, heads, :].transpose(0, 2, 1, 3)


def _as_stack(a: Array) -> Array | None:
    """View (sequences, heads, positions, d) as one stack of matrices at equal distances.

    None if their distances in memory differ.
    """
    sequences, heads, rows, d = a.shape
    if sequences == 1:
        return a[0, ...]
    if heads == 1:
        return a[:, 0, ...]
    return a.reshape(sequences * heads, rows, d) if a.flags.c_contiguous else None


def _matrix_shape(a: Array) -> tuple[int, int]:
    """Return rows and columns of an array whose last dimension is a row."""
    return math.prod(a.shape[:-1]), a.shape[-1]


def _transposed(a: Array) -> Array:
    """View a stack of matrices with each of them transposed."""
    return a.transpose(0, 2, 1)
