"""Compute on a GPU the functions of `mm3d.model` that prefer a backend's kernels.

The kernels are in the files ``*.cu``; attention is in `cupy_attention`.
"""

import math
import weakref
from functools import partialmethod
from operator import is_not
from pathlib import Path
from typing import Any, Callable

import numpy as np

from mm3d.arrays.backend import Array
from mm3d.arrays.cupy_attention import THREADS_PER_BLOCK, THREADS_PER_WARP, GpuAttention

SOURCE_FILES = [Path(__file__).with_name(name)
                for name in ("kernels.cu", "row_kernels.cu", "training_kernels.cu")]
C_TYPES = {"float32": "float", "float64": "double", "float16": "half_t", "bfloat16": "bf16_t"}
KERNEL_NAMES = (
    "bias_gelu_forward", "bias_gelu_backward", "swiglu_forward", "swiglu_backward", "rotate",
    "add_rows", "scale_rows", "scale_add_rows", "add_arrays", "copy_rows", "sum_rows",
    "sum_products", "sum_rows_and_products", "norm_sums", "norm_squares", "norm_scale",
    "norm_forward", "norm_backward_sums", "norm_backward", "norm_backward_whole",
    "softmax_forward", "softmax_recompute", "softmax_backward", "softmax_statistics",
    "softmax_gradient", "adamw", "round_into")
TEMPLATE_INSTANCES = [f"{name}<{kind}>" for name in KERNEL_NAMES for kind in C_TYPES.values()]
COMPILER_OPTIONS = ("--std=c++17",)

MAX_BLOCKS = 4096            # of threads, in an elementwise kernel
SUM_BLOCKS = 528             # that sum columns: four at a time on each of an H100's 132 processors
MAX_PARTS = 128              # of a sum, which one block adds while others idle
MAX_THREADS = 1024           # of a block that computes a row
ADAMW_PACKS = 8              # of 16 bytes, that a thread changes


class GpuKernels(GpuAttention):
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

    max_across = 16384    # blocks beside each other that can sum columns

    def __init__(self, library: Any) -> None:
        self.library = library
        self.dtypes = tuple(np.dtype(name) for name in C_TYPES if name != "bfloat16")
        self.dtypes += library.more_dtypes
        self._functions: dict[tuple[str, Any], Callable] = {}    # by name and type
        self._adamw_plan: tuple = (None, [])    # the last one, as `adamw_of_all` keeps it
        self._module: Any = None

    def _launch(self, name: str, like: Array, blocks: tuple[int, ...], *arguments: Any,
                threads: int = THREADS_PER_BLOCK) -> None:
        """Launch the kernel `name` for the type of `like`; nothing if there are no blocks.

        CuPy passes integers of Python as 64 bits, sooner than it converts those of NumPy.
        """
        if 0 in blocks:
            return
        self.library.join_stream()
        function = (self._functions.get((name, like.dtype))
                    or self._look_up_kernel(name, like.dtype))
        function(blocks, (threads,), arguments)

    def _look_up_kernel(self, name: str, dtype: Any) -> Callable:
        """Look up the kernel `name` for a type, and keep it."""
        if self._module is None:
            self._module = self.library.compile_module(
                read_source(), COMPILER_OPTIONS, TEMPLATE_INSTANCES)
        found = self._module.get_function(f"{name}<{C_TYPES[str(dtype)]}>")
        # The function itself, of this rank's GPU: CuPy looks it up by device in each call.
        return self._functions.setdefault((name, dtype), found.kernel)

    def _sum_type(self, a: Array) -> Any:
        """Return the type in which kernels compute and sum the elements of `a`."""
        return np.float64 if a.dtype == np.float64 else np.float32

    def _compute_into(self, out: Array, work: Callable[[Array], None],
                      reads: bool = False) -> Array:
        """Call `work` on `out`, or on a contiguous array that is copied to `out` afterwards.

        That has the contents of `out` if `work` reads them.
        """
        if self.library.is_contiguous(out):
            work(out)
        else:
            contiguous = self.library.empty(out.shape, out.dtype)
            if reads:
                contiguous[...] = out
            work(contiguous)
            out[...] = contiguous
        return out

    def bias_gelu_forward(self, x: Array, b: Array, out: Array) -> Array:
        return self._launch_over_rows("bias_gelu_forward", out, x, b)

    def bias_gelu_backward(self, dy: Array, x: Array, b: Array, out: Array,
                           keep_float32: bool = False) -> tuple[Array, Array]:
        dy, x, b = map(self.library.contiguous, (dy, x, b))
        sums, blocks, rest = self._allocate_sums(dy, keep_float32)
        self._compute_into(out, lambda dx: self._launch(
            "bias_gelu_backward", dy, blocks, dy, x, b, dx, *rest))
        return out, sums

    def add_rows(self, a: Array, b: Array, out: Array) -> Array:
        return self._launch_over_rows("add_rows", out, a, b)

    def scale_rows(self, a: Array, b: Array, out: Array) -> Array:
        return self._launch_over_rows("scale_rows", out, a, b)

    def scale_add_rows(self, a: Array, b: Array, c: Array, out: Array) -> Array:
        return self._launch_over_rows("scale_add_rows", out, a, b, c)

    def _launch_over_rows(self, name: str, out: Array, *given: Array,
                          like: Array | None = None) -> Array:
        """Launch a kernel of rows as those of `like`, by default of `out`, with what is given."""
        rows, cols = _matrix_shape(out if like is None else like)
        across = -(-cols // (THREADS_PER_BLOCK * (16 // out.itemsize)))
        down = min(rows, max(1, MAX_BLOCKS // max(1, across)))
        given = tuple(map(self.library.contiguous, given))
        return self._compute_into(out, lambda y: self._launch(
            name, y, (across, down), *given, y, rows, cols))

    def swiglu_forward(self, x: Array, out: Array) -> Array:
        return self._launch_over_rows("swiglu_forward", out, x)

    def swiglu_backward(self, dy: Array, x: Array, out: Array) -> Array:
        return self._launch_over_rows("swiglu_backward", out, dy, x, like=dy)

    def rotate(self, x: Array, cos: Array, sin: Array, rotated: int, out: Array) -> Array:
        (_, positions, n, features), half, x = x.shape, cos.shape[1], self.library.contiguous(x)
        return self._compute_into(out, lambda y: self._launch(
            "rotate", y, (min(-(-count_blocks(y) // 2), 2 ** 20),), x, cos, sin, y, x.size // 2,
            *map(np.int32, (positions, n, rotated, features // (2 * half), half))))

    def softmax_statistics(self, logits: Array, sums: bool) -> Array:
        rows, cols = logits.shape
        out = self.library.empty((rows, 4), self._sum_type(logits))
        self._compute_into(logits, lambda x: self._launch(
            "softmax_statistics", x, (rows,), x, out, int(sums), cols,
            threads=row_threads(x)), reads=True)
        return out

    def softmax_gradient(self, exponentials: Array, scale: Array, shift: Array | None,
                         out: Array) -> Array:
        if out is not exponentials:
            out[...] = exponentials
        rows, cols = out.shape
        numbers = map(self.library.contiguous, (scale, scale if shift is None else shift))
        return self._compute_into(out, lambda x: self._launch(
            "softmax_gradient", x, (rows,), x, *numbers, int(shift is not None), cols,
            threads=row_threads(x)), reads=True)

    def adamw_of_all(self, parameters: list[tuple[Array, ...]], decay: list[bool],
                     numbers: tuple[float, ...]) -> tuple[set[int], set[int]]:
        """Change parameters by AdamW, all that have values of one type in one launch.

        Parameters
        ----------
        parameters : list of tuple of Array
            Of each the master, its gradient, both moments, and the array of its shape into which
            the master is rounded, or None.
        decay : list of bool
            Which of them decay.
        numbers : tuple of float
            See `mm3d.arrays.compiled.CompiledKernels.adamw`.

        Returns
        -------
        tuple of set of int
            The numbers of those that are changed, and of those that are rounded, too.  What has
            gaps, or masters of 16 bits, is left as it was.
        """
        given = [a for one in parameters for a in one]
        before, *found = self._adamw_plan
        # Looking at each array takes longer than the launch, and the device waits meanwhile.
        if before != decay or any(map(is_not, given, [ref() for ref in found[0]])):
            refs = [(lambda: None) if a is None else weakref.ref(a) for a in given]
            found = refs, *self._plan_adamw(parameters, decay)
            self._adamw_plan = (list(decay), *found)
        _, launches, changed, rounded = found
        for like, blocks, table in launches:
            self._launch("adamw", like, (blocks,), table, len(table), ADAMW_PACKS,
                         *map(self._sum_type(like), numbers))
        return changed, rounded

    def _plan_adamw(self, parameters: list[tuple[Array, ...]],
                    decay: list[bool]) -> tuple[list[tuple], set[int], set[int]]:
        """Return launches, each an array of its type, blocks and a table; and both results."""
        changed, rounded, point = set(), set(), self.library.pointer
        tables: dict[Any, list[tuple[int, ...]]] = {}
        for n, (*arrays, value) in enumerate(parameters):
            w = arrays[0]
            if w.itemsize < 4 or not all(a.dtype == w.dtype and a.flags.c_contiguous
                                         for a in arrays):
                continue
            changed.add(n)
            dtype, there = w.dtype, 0
            if value is not None and (value.flags.c_contiguous
                                      and w.dtype == self._sum_type(value)):
                rounded.add(n)
                dtype, there = value.dtype, point(value)
            if w.size:
                tables.setdefault(dtype, []).append(
                    (*map(point, arrays), there, w.size, 0, decay[n]))
        launches = []
        for dtype, rows in tables.items():
            like, table = np.empty(0, dtype), np.array(rows, np.uint64)
            width = 16 // np.dtype(self._sum_type(like)).itemsize
            each = THREADS_PER_BLOCK * ADAMW_PACKS * width
            last = np.cumsum((table[:, 5] + each - 1) // each)
            table[1:, 6] = last[:-1]    # the first block of each
            launches.append((like, int(last[-1]), self.library.asarray(table)))
        return launches, changed, rounded

    def round_into(self, a: Array, out: Array) -> Array:
        if a.dtype != self._sum_type(out) or not (a.flags.c_contiguous
                                                  and out.flags.c_contiguous):
            out[...] = a.astype(out.dtype, copy=False)
        else:
            self._launch("round_into", out, (count_blocks(out),), a, out, out.size)
        return out

    def add_to(self, a: Array, b: Array) -> Array:
        if (a.dtype != b.dtype or a.shape != b.shape
                or not (a.flags.c_contiguous and b.flags.c_contiguous)):
            a += b
            return a
        self._launch("add_arrays", a, (count_blocks(a),), a, b, a, a.size)
        return a

    def copy_rows(self, a: Array, out: Array) -> Array:
        """Copy (n, m, rows, d) into `out`, from any strides to any; return `out`.

        CuPy's own copy of arrays with gaps is several times slower.
        """
        size = a.dtype.itemsize
        if a.strides[3] != size or out.strides[3] != size or a.size >= 2 ** 31:
            out[...] = a
            return out
        self._launch("copy_rows", a, (min(count_blocks(a), 2 ** 20),), a, out,
                     *map(np.int32, (a.size, *a.shape[1:])),
                     *(step // size for b in (a, out) for step in b.strides[:3]))
        return out

    def sum_rows(self, a: Array, keep_float32: bool = False) -> Array:
        return self._sum_columns("sum_rows", keep_float32, a)

    def sum_products(self, a: Array, b: Array, keep_float32: bool = False) -> Array:
        return self._sum_columns("sum_products", keep_float32, a, b)

    def sum_rows_and_products(self, a: Array, b: Array,
                              keep_float32: bool = False) -> tuple[Array, Array]:
        sums = self._sum_columns("sum_rows_and_products", keep_float32, a, b, count=2)
        return sums[0, :], sums[1, :]

    def _sum_columns(self, name: str, keep_float32: bool, *arrays: Array, count: int = 1) -> Array:
        """Sum columns by a kernel over blocks of rows, the last of which sums over the blocks."""
        sums, blocks, rest = self._allocate_sums(arrays[0], keep_float32, count)
        self._launch(name, arrays[0], blocks, *map(self.library.contiguous, arrays), *rest)
        return sums

    def _allocate_sums(self, a: Array, keep_float32: bool, count: int = 1
                       ) -> tuple[Array, tuple[int, int], tuple[Any, ...]]:
        """Allocate `count` sums of columns like those of `a`, in its type unless `keep_float32`.

        Return them with the numbers of blocks of threads, and for the kernel room for the sums of
        several blocks of rows, the sums in one of two places, and the rows and columns of `a`.
        """
        (rows, cols), kind = _matrix_shape(a), self._sum_type(a)
        across = -(-cols // (32 * (16 // a.itemsize)))
        below = SUM_BLOCKS // max(1, across) if across <= self.max_across else 1
        down = max(1, min(-(-rows // 64), MAX_PARTS, below))
        shape = (cols,) if count == 1 else (count, cols)
        parts = self.library.empty((down, *shape), kind) if down > 1 else 0
        sums = self.library.empty(shape, kind if keep_float32 else a.dtype)
        places = (0, sums) if keep_float32 else (sums, 0)
        return sums, (across, down), (parts, *places, rows, cols)

    def _normalize(self, x: Array, features: int, eps: float, total: Callable[[Array], Array],
                   out: Array, centred: bool) -> tuple[Array, Array]:
        x, (rows, cols), kind = self.library.contiguous(x), _matrix_shape(x), self._sum_type(x)
        rstd = self.library.empty((*x.shape[:-1], 1), kind)
        if cols == features > centred:    # whole rows: no other rank has a part
            return self._compute_into(out, lambda y: self._launch(
                "norm_forward", x, (rows,), x, y, rstd, kind(features), kind(eps),
                np.int32(centred), cols, threads=row_threads(x))), rstd
        sums, squares = 0, self.library.empty(rstd.shape, kind)
        if centred:
            sums = self.library.empty(rstd.shape, kind)
            self._launch("norm_sums", x, (rows,), x, sums, cols)
            sums = total(sums)
        self._launch("norm_squares", x, (rows,), x, sums, squares, kind(features), cols)
        squares = total(squares)
        return self._compute_into(out, lambda y: self._launch(
            "norm_scale", x, (rows,), x, sums, squares, y, rstd, kind(features), kind(eps),
            cols)), rstd

    def _normalize_backward(self, dy: Array, xhat: Array, rstd: Array, features: int,
                            total: Callable[[Array], Array], out: Array, centred: bool) -> Array:
        dy, xhat = self.library.contiguous(dy), self.library.contiguous(xhat)
        (rows, cols), kind = _matrix_shape(dy), self._sum_type(dy)
        rest = kind(features), np.int32(centred), cols
        if cols == features > centred:
            return self._compute_into(out, lambda dx: self._launch(
                "norm_backward_whole", dy, (rows,), dy, xhat, rstd, dx, *rest,
                threads=row_threads(dy)))
        sums = self.library.empty((*rstd.shape[:-1], 1 + centred), kind)
        self._launch("norm_backward_sums", dy, (rows,), dy, xhat, sums, *rest[1:])
        sums = total(sums)
        return self._compute_into(out, lambda dx: self._launch(
            "norm_backward", dy, (rows,), dy, xhat, rstd, sums, dx, *rest))

    normalize_forward = partialmethod(_normalize, centred=True)
    normalize_backward = partialmethod(_normalize_backward, centred=True)
    rms_forward = partialmethod(_normalize, centred=False)
    rms_backward = partialmethod(_normalize_backward, centred=False)


def read_source() -> str:
    """Return the source of all kernels."""
    return "\n".join(path.read_text(encoding="utf-8") for path in SOURCE_FILES)


def row_threads(a: Array) -> int:
    """Return with how many threads a block computes a row: each has two packs of 16 bytes."""
    packs = a.shape[-1] * a.itemsize // 16
    return min(MAX_THREADS, THREADS_PER_WARP * max(1, -(-packs // (2 * THREADS_PER_WARP))))


def count_blocks(a: Array) -> int:
    """Return how many blocks compute all elements, a pack of 16 bytes in each thread."""
    return -(-a.size // (THREADS_PER_BLOCK * (16 // a.itemsize)))


def _matrix_shape(a: Array) -> tuple[int, int]:
    """Return rows and columns of an array whose last dimension is a row."""
    return math.prod(a.shape[:-1]), a.shape[-1]
