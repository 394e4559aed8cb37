"""Provide arrays with a shape and a dtype but no contents: the array library of dry runs.

They behave like NumPy's in shape, dtype, strides and errors, as far as the model uses them.  Their
elementwise operations are counted in a `Trace`, and so is the memory that they would take.
"""

import sys
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Callable, Iterable, Iterator

import numpy as np

from mm3d.arrays.backend import Backend, device_kernels
from mm3d.arrays.numpy_kernels import Kernels
from mm3d.arrays.pool import DryPool, Pool
from mm3d.tracing.events import Call, MemoryPass
from mm3d.tracing.trace import Trace


class DryArray:
    """Stand in for an array by its shape and dtype, without contents.

    It wraps a NumPy array of that shape over memory that does not exist and is never read, so that
    NumPy's rules give the shape and the strides of every slice and transpose.
    """

    __array_ufunc__ = None    # NumPy leaves operations with these arrays to them
    __slots__ = ("_backend", "_shell")

    def __init__(self, backend: "DryBackend", shell: np.ndarray) -> None:
        self._backend, self._shell = backend, shell

    shape = property(attrgetter("_shell.shape"))
    dtype = property(attrgetter("_shell.dtype"))
    ndim = property(attrgetter("_shell.ndim"))
    size = property(attrgetter("_shell.size"))
    nbytes = property(attrgetter("_shell.nbytes"))
    itemsize = property(attrgetter("_shell.itemsize"))
    flags = property(attrgetter("_shell.flags"))
    strides = property(attrgetter("_shell.strides"))
    T = property(lambda self: DryArray(self._backend, self._shell.T))
    mT = property(lambda self: DryArray(self._backend, self._shell.mT))

    def __repr__(self) -> str:
        return f"DryArray({self.shape}, {self.dtype})"

    def __len__(self) -> int:
        return len(self._shell)

    def __bool__(self) -> bool:
        raise TypeError("an array without contents is neither true nor false")

    def __getitem__(self, index: Any) -> "DryArray":
        return DryArray(self._backend, self._shell[index])

    def __neg__(self) -> "DryArray":
        return self._backend.elementwise("neg", self)

    def __setitem__(self, index: Any, value: Any) -> None:
        self._backend.write_into("copy", self[index], value)

    def reshape(self, *shape: int) -> "DryArray":
        return self._backend.xp.reshape(self, shape)

    def transpose(self, *axes: int) -> "DryArray":
        return self._backend.xp.permute_dims(self, axes)

    def astype(self, dtype: Any, copy: bool = True) -> "DryArray":
        return self._backend.xp.astype(self, dtype, copy=copy)


def _add_operators(name: str, dtype: Any = None) -> None:
    """Give arrays a binary operator whose result is a new array, of `dtype` if that is given."""
    def operate(self, other):
        return self._backend.elementwise(name, self, other, dtype=dtype)

    def operate_in_place(self, other):
        return self._backend.write_into(name, self, self, other)
    setattr(DryArray, f"__{name}__", operate)
    if dtype is None:
        setattr(DryArray, f"__r{name}__", operate)
        setattr(DryArray, f"__i{name}__", operate_in_place)


for _name in ("add", "sub", "mul", "truediv"):
    _add_operators(_name)
for _name in ("gt", "lt", "ge", "le", "eq", "ne", "and"):
    _add_operators(_name, np.bool_)


class DryNamespace:
    """Provide the functions of the array library that the model calls."""

    float16, float32, float64, int64 = np.float16, np.float32, np.float64, np.int64

    def __init__(self, backend: "DryBackend") -> None:
        self._backend = backend
        for name in ("tanh", "exp", "log", "log1p", "abs", "sqrt", "add", "subtract", "multiply",
                     "divide", "minimum"):
            setattr(self, name, self._elementwise(name))

    def _elementwise(self, name: str) -> Callable:
        def operate(*operands, out=None):
            if out is None:
                return self._backend.elementwise(name, *operands)
            return self._backend.write_into(name, out, *operands)
        return operate

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DryArray:
        return self._backend.scratch_array(shape, dtype)

    def copyto(self, a: DryArray, value: Any, where: DryArray) -> None:
        self._backend.write_into("copy", a, value, where)

    def where(self, condition: DryArray, a: DryArray, b: DryArray) -> DryArray:
        kinds = [getattr(one, "dtype", one) for one in (a, b)]
        return self._backend.elementwise("where", condition, a, b, dtype=np.result_type(*kinds))

    def astype(self, a: DryArray, dtype: Any, copy: bool = True) -> DryArray:
        if not copy and a.dtype == dtype:
            return a
        return self._backend.elementwise("astype", a, dtype=dtype)

    def sum(self, a: DryArray, axis: int, dtype: Any = None, keepdims: bool = False,
            out: DryArray | None = None) -> DryArray:
        axis %= a.ndim
        kept = (1,) if keepdims else ()
        shape = a.shape[:axis] + kept + a.shape[axis + 1:]
        return self._backend.reduction("sum", out, shape, dtype or a.dtype, a)

    def take(self, a: DryArray, places: DryArray) -> DryArray:
        return self._backend.result("take", places.shape, a.dtype, a, places)

    def max(self, a: DryArray, axis: int, keepdims: bool = False,
            out: DryArray | None = None) -> DryArray:
        return self.sum(a, axis, keepdims=keepdims, out=out)

    min = max

    def vecdot(self, a: DryArray, b: DryArray, out: DryArray | None = None) -> DryArray:
        shape = np.broadcast_shapes(a.shape, b.shape)[:-1]
        return self._backend.reduction("vecdot", out, shape, a.dtype, a, b)

    def einsum(self, subscripts: str, *operands: DryArray, out: DryArray) -> DryArray:
        lengths = {c: n for dims, a in zip(subscripts.split("->")[0].split(","), operands)
                   for c, n in zip(dims, a.shape, strict=True)}
        shape = tuple(lengths[c] for c in subscripts.partition("->")[2])
        return self._backend.reduction("einsum", out, shape, out.dtype, *operands)

    def matmul(self, a: DryArray, b: DryArray, out: DryArray | None = None) -> DryArray:
        lead = np.broadcast_shapes(a.shape[:-2], b.shape[:-2])
        (m, n), k = a.shape[-2:], b.shape[-1]
        if b.shape[-2] != n:
            raise ValueError(f"matmul of {a.shape} and {b.shape}: {n} is not {b.shape[-2]}")
        if out is not None and out.shape != (*lead, m, k):
            raise ValueError(f"matmul of {a.shape} and {b.shape} does not fit {out.shape}")
        if out is not None:
            return out
        return self._backend.scratch_array((*lead, m, k), np.result_type(a.dtype, b.dtype))

    def reshape(self, a: DryArray, shape: tuple[int, ...]) -> DryArray:
        try:
            return DryArray(self._backend, a._shell.reshape(shape, copy=False))
        except ValueError:    # NumPy has to copy here, too
            return self._backend.result("copy", np.broadcast_to(0, a.shape).reshape(shape).shape,
                                        a.dtype, a)

    def permute_dims(self, a: DryArray, axes: tuple[int, ...]) -> DryArray:
        return DryArray(self._backend, np.transpose(a._shell, axes))

    def matrix_transpose(self, a: DryArray) -> DryArray:
        return a.mT


class DryBackend(Backend):
    """Provide arrays without contents.

    The backend is not registered, so that nobody can choose it by name for a measurement.  Its
    `trace` counts events and memory.
    """

    name = "dry"
    owns_types = has_contents = False

    def __init__(self) -> None:
        self.xp, self.kernels = DryNamespace(self), Kernels(self)
        self.kernels.calling = self._calling    # functions with kernels tell it
        self.reset()

    def reset(self, block: int = sys.maxsize) -> None:
        """Start a new trace and new pools; elementwise work is in blocks of `block` elements."""
        self.block, self.trace, self._within = block, Trace(), ""
        self.pool = DryPool(Pool.granularity, self._record_memory)
        self.scratch = DryPool(1, self._record_memory)
        self._registers = DryPool(1, lambda: None)    # where a GPU's kernels keep what they need
        self._in_kernel = False

    def _record_memory(self) -> None:
        """Count the bytes in use in the peaks of the trace."""
        trace, own, others = self.trace, self.pool.in_use, self.scratch.in_use
        in_use, held = own + others, self.pool.reserved + others
        if in_use > trace.peak:    # a run takes ten thousands of arrays: a call here is felt
            trace.peak, trace.activations = in_use, self.saved
        if held > trace.held:
            trace.held = held
        if own > trace.pool_peak:
            trace.pool_peak = own

    @property
    def saved(self) -> int:
        """Bytes in use of the arrays that `count_saved` was given."""
        return self.pool.saved + self.scratch.saved

    def count_saved(self, arrays: Iterable[DryArray]) -> None:
        """Count arrays as saved for backward until they are gone."""
        for a in arrays:
            for pool in (self.pool, self.scratch):
                pool.count_saved(a._shell)

    @contextmanager
    def _calling(self, name: str, given: tuple, named: dict[str, Any]) -> Iterator[None]:
        """Count a call, unless it is a part of another, and its passes as within it."""
        if self._within:
            yield
            return

        def told(value: Any) -> Any:
            if isinstance(value, DryArray):
                return value.shape, str(value.dtype)
            return "sum" if callable(value) else value    # over ranks
        self._within = name
        # On a processor functions of 16 bits have no kernels, and blocks.
        self._in_kernel = (self.block == sys.maxsize and given[0].dtype not in self.kernels.dtypes
                           and hasattr(device_kernels(), name))
        self.trace.count_event(Call(name, tuple(map(told, given)), tuple(
            (key, told(value)) for key, value in named.items())))
        try:
            yield
        finally:
            self._within, self._in_kernel = "", False

    def _count_pass(self, operation: str, size: int) -> None:
        self.trace.count_event(MemoryPass(operation, size, self._within))

    def alike(self, count: int) -> Iterator[int]:
        """Yield the first two pieces; the second, which reuses memory, stands for the rest."""
        yield from range(min(count, 1))
        if count > 1:
            before = self.trace.times
            self.trace.times *= count - 1
            try:
                yield 1
            finally:
                self.trace.times = before

    def owns(self, a: Any) -> bool:
        return isinstance(a, DryArray) and a._backend is self

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DryArray:
        return DryArray(self, super().empty(shape, dtype))

    def scratch_array(self, shape: tuple[int, ...], dtype: Any) -> DryArray:
        """Allocate an intermediate array of the library, outside of the model's pool."""
        pool = self._registers if self._in_kernel else self.scratch
        return DryArray(self, pool.take(tuple(shape), np.dtype(dtype)))

    def arange(self, start: int, stop: int) -> DryArray:
        return self.scratch_array((stop - start,), np.int64)

    def asarray(self, host: np.ndarray) -> DryArray:
        return self.empty(host.shape, host.dtype)

    def from_host(self, shape: tuple[int, ...], dtype: Any, make: Callable) -> DryArray:
        return self.empty(shape, dtype)    # nothing is drawn

    def mpi_buffer(self, a: DryArray) -> DryArray:
        return a

    def to_host(self, a: DryArray) -> np.ndarray:
        raise TypeError("an array of a dry run has no contents to bring to the host")

    def take_rows(self, a: DryArray, rows: np.ndarray, out: DryArray) -> DryArray:
        self._count_pass("take", 2 * out.nbytes + rows.nbytes)
        return out

    def put_rows(self, a: DryArray, rows: np.ndarray, values: DryArray) -> None:
        self._count_pass("put", 2 * values.nbytes + rows.nbytes)

    def gemm(self, a: DryArray, b: DryArray, out: DryArray, progress: Any = None) -> DryArray:
        if a.dtype.itemsize == 2 and self.block < sys.maxsize:    # see `Backend.gemm`
            [self.scratch_array(one.shape, np.float32) for one in (a, b, out)]
        return out

    def result(self, operation: str, shape: tuple[int, ...], dtype: Any, *read: Any) -> DryArray:
        """Count an operation that reads the arrays among `read`, and return its new result."""
        out = self.scratch_array(shape, dtype)
        self._count_pass(operation, out.nbytes + _sum_bytes(read))
        return out

    def reduction(self, operation: str, out: DryArray | None, shape: tuple[int, ...], dtype: Any,
                  *read: DryArray) -> DryArray:
        """Count a reduction to `shape`, and return its result, in `out` if that is given."""
        if out is None:
            return self.result(operation, shape, dtype, *read)
        if out.shape != shape:
            raise ValueError(f"{operation}: a result of {shape} does not fit {out.shape}")
        self._count_pass(operation, out.nbytes + _sum_bytes(read))
        return out

    def elementwise(self, operation: str, *operands: Any, dtype: Any = None) -> DryArray:
        """Count an operation on arrays and numbers, and return its result after broadcasting."""
        arrays = self._arrays(operands)
        if dtype is None:
            dtype = np.result_type(*[getattr(a, "dtype", a) for a in operands])
        return self.result(operation, _broadcast({a.shape for a in arrays}), dtype, *arrays)

    def write_into(self, operation: str, out: DryArray, *operands: Any) -> DryArray:
        """Count an operation whose result goes to `out`; the operands must fit its shape."""
        for a in self._arrays(operands):
            if a.shape != out.shape and np.broadcast_shapes(a.shape, out.shape) != out.shape:
                raise ValueError(f"{operation}: an array of {a.shape} does not fit {out.shape}")
        self._count_pass(operation, out.nbytes + _sum_bytes(operands))
        return out

    def _arrays(self, operands: tuple) -> list[DryArray]:
        """Return the arrays among the operands; TypeError if one is neither array nor number."""
        found = []
        for a in operands:
            if type(a) is DryArray and a._backend is self:
                found.append(a)
            elif not isinstance(a, (DryArray, int, float, np.number)):
                raise TypeError(f"{type(a).__name__} and an array without contents")
        return found


def _broadcast(shapes: set[tuple[int, ...]]) -> tuple[int, ...]:
    """Return the shape that arrays have after broadcasting; most have the same one."""
    return next(iter(shapes)) if len(shapes) == 1 else np.broadcast_shapes(*shapes)


def _sum_bytes(operands: tuple) -> int:
    """Sum the bytes of the arrays among the operands."""
    return sum([a.nbytes for a in operands if isinstance(a, DryArray)])
