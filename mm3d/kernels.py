"""The GPU's versions of the functions of `mm3d.functional`, which document them.

They launch what ``kernels.cu`` holds.  Attention is made of batched products, some heads of one
sequence at a time, and of kernels for the softmax.
"""

import math
from pathlib import Path
from typing import Any, Callable, Iterator

import numpy as np

Array = Any

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
SCORES = 2 ** 28         # bytes of attention scores held at a time


class GpuKernels:
    """Functions of `mm3d.functional` for the arrays of a GPU.

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
        self._module: Any = None

    def _launch(self, name: str, like: Array, blocks: tuple[int, ...], *arguments: Any) -> None:
        """Run the kernel `name` for the type of `like`; nothing where there is no work."""
        if 0 in blocks:
            return
        if self._module is None:
            self._module = self.library.compiled(SOURCE.read_text(), OPTIONS, EXPRESSIONS)
        function = self._module.get_function(f"{name}<{TYPES[str(like.dtype)]}>")
        function((*blocks, 1)[:2], (THREADS,), arguments)

    def _wide(self, a: Array) -> Any:
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
                           wide: bool = False) -> tuple[Array, Array]:
        dy, x, b = map(self.library.contiguous, (dy, x, b))
        (rows, cols), packs = _matrix(dy), 16 // dy.dtype.itemsize
        parts = self._parts(dy)
        self._into(out, lambda dx: self._launch(
            "bias_gelu_backward", dy, (-(-cols // (32 * packs)), parts.shape[0]), dy, x, b, dx,
            parts, np.int64(rows), np.int64(cols)))
        return out, self._summed(parts, dy, wide)

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

    def sum_rows(self, a: Array, wide: bool = False) -> Array:
        return self._columns("sum_rows", wide, a)

    def sum_products(self, a: Array, b: Array, wide: bool = False) -> Array:
        return self._columns("sum_products", wide, a, b)

    def _columns(self, name: str, wide: bool, *arrays: Array) -> Array:
        a, (rows, cols) = arrays[0], _matrix(arrays[0])
        parts = self._parts(a)
        self._launch(name, a, (-(-cols // 32), parts.shape[0]),
                     *map(self.library.contiguous, arrays), parts, np.int64(rows), np.int64(cols))
        return self._summed(parts, a, wide)

    def _parts(self, a: Array) -> Array:
        """Memory for the sums of the columns of `a` over some of its rows each."""
        rows, cols = _matrix(a)
        return self.library.empty((max(1, min(-(-rows // 64), 256)), cols), self._wide(a))

    def _summed(self, parts: Array, like: Array, wide: bool) -> Array:
        """The sum of the parts, in the type of `like` unless it is `wide`."""
        count, cols = parts.shape
        out = self.library.empty((cols,), parts.dtype if wide else like.dtype)
        self._launch("sum_parts", out, (-(-cols // THREADS),), parts, out, np.int32(count),
                     np.int64(cols))
        return out

    def normalize_forward(self, x: Array, features: int, eps: float,
                          total: Callable[[Array], Array], out: Array) -> tuple[Array, Array]:
        x, (rows, cols), wide = self.library.contiguous(x), _matrix(x), self._wide(x)
        rstd = self.library.empty((*x.shape[:-1], 1), wide)
        if cols == features > 1:    # whole rows: no other rank has any of them
            return self._into(out, lambda y: self._launch(
                "norm_forward", x, (rows,), x, y, rstd, wide(features), wide(eps),
                np.int64(cols))), rstd
        sums, squares = (self.library.empty(rstd.shape, wide) for _ in range(2))
        self._launch("norm_sums", x, (rows,), x, sums, np.int64(cols))
        sums = total(sums)
        self._launch("norm_squares", x, (rows,), x, sums, squares, wide(features), np.int64(cols))
        squares = total(squares)
        return self._into(out, lambda y: self._launch(
            "norm_scale", x, (rows,), x, sums, squares, y, rstd, wide(features), wide(eps),
            np.int64(cols))), rstd

    def normalize_backward(self, dy: Array, xhat: Array, rstd: Array, features: int,
                           total: Callable[[Array], Array], out: Array) -> Array:
        dy, xhat = self.library.contiguous(dy), self.library.contiguous(xhat)
        (rows, cols), wide = _matrix(dy), self._wide(dy)
        sums = self.library.empty((*rstd.shape[:-1], 2), wide)
        self._launch("norm_backward_sums", dy, (rows,), dy, xhat, sums, np.int64(cols))
        sums = total(sums)
        return self._into(out, lambda dx: self._launch(
            "norm_backward", dy, (rows,), dy, xhat, rstd, sums, dx, wide(features),
            np.int64(cols)))

    def attention_forward(self, q: Array, k: Array, v: Array, first: int, causal: bool,
                          out: Array) -> tuple[Array, Array]:
        batch, queries, heads, d = q.shape
        positions, wide = k.shape[1], self._wide(q)
        lse = self.library.empty((batch, heads, queries), wide)
        for b, some, (S, P) in self._some_heads(q, k, 1):
            Q, K, V, y = (_by_head(a, b, some) for a in (q, k, v, out))
            self.library.gemms(Q, _turned(K), S)
            self._launch("softmax_forward", q, (S.shape[0] * queries,), S, P, lse[b, some, :],
                         np.int32(queries), np.int32(positions), np.int32(first),
                         np.int32(causal), wide(1 / math.sqrt(d)))
            self.library.gemms(P, V, y)
        return out, lse

    def attention_backward(self, do: Array, q: Array, k: Array, v: Array, lse: Array, first: int,
                           causal: bool, dq: Array, dk: Array, dv: Array) -> None:
        queries, d = q.shape[1], q.shape[-1]
        positions, wide = k.shape[1], self._wide(q)
        scale = wide(1 / math.sqrt(d))
        for b, some, (S, P, dS) in self._some_heads(q, k, 2):
            Q, K, V, dO, dQ, dK, dV = (_by_head(a, b, some) for a in (q, k, v, do, dq, dk, dv))
            rows = S.shape[0] * queries
            self.library.gemms(Q, _turned(K), S)
            self._launch("softmax_again", q, (rows,), S, P, lse[b, some, :], np.int32(queries),
                         np.int32(positions), np.int32(first), np.int32(causal), scale)
            self.library.gemms(_turned(P), dO, dV)
            self.library.gemms(dO, _turned(V), S)    # dP, where the scores were
            self._launch("softmax_backward", q, (rows,), P, S, dS, np.int32(positions), scale)
            self.library.gemms(dS, K, dQ)
            self.library.gemms(_turned(dS), Q, dK)

    def _some_heads(self, q: Array, k: Array,
                    more: int) -> Iterator[tuple[int, slice, list[Array]]]:
        """A sequence, some of its heads, and memory for their scores: in the type of sums, and
        `more` in that of `q`."""
        batch, queries, heads, _ = q.shape
        wide, one = self._wide(q), queries * k.shape[1]
        step = max(1, min(heads, SCORES // max(1, one * np.dtype(wide).itemsize)))
        made = [self.library.empty((step, queries, k.shape[1]), kind)
                for kind in (wide, *[q.dtype] * more)]
        for b in range(batch):
            for start in range(0, heads, step):
                some = slice(start, min(start + step, heads))
                yield b, some, [a[:some.stop - start, ...] for a in made]


def _matrix(a: Array) -> tuple[int, int]:
    """Rows and columns of an array whose last dimension is a row."""
    return math.prod(a.shape[:-1]), a.shape[-1]


def _by_head(a: Array, b: int, some: slice) -> Array:
    """(batch, positions, heads, d) of one sequence as (heads, positions, d), where it lies."""
    return a[b, :, some, :].transpose(1, 0, 2)


def _turned(a: Array) -> Array:
    return a.transpose(0, 2, 1)
