"""Define the interface of a backend, on NumPy's arrays, and find the backend of an array.

A `Backend` makes, copies and multiplies arrays, and counts their memory.  The code above it calls
functions of the arrays' own namespace (`namespace`), so that no algorithm names a library.  The
library is chosen once, when a grid is made (``--backend`` of the benchmarks, ``MM3D_BACKEND``),
never in the middle of a computation.

Each library has a file, such as ``numpy_backend.py``, with a `pool` that lends memory to arrays,
and faster `kernels` of model functions.  Neither changes what is computed.
"""

import os
import time
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any, Callable, Iterable

import numpy as np

Array = Any    # an array of the library that the backend wraps
Progress = Callable[[], None] | None    # lets collectives make progress during a product
DTYPES = ("float64", "float32", "float16")    # of models, that every library has
# While collectives are in flight, a product is computed in at most MAX_PANELS panels of rows.
# They have a multiple of PANEL_ROWS: BLAS rounds differently in blocks of fewer than 12 or 24.
MAX_PANELS, PANEL_ROWS = 8, 96


class Backend:
    """Provide NumPy's arrays in host memory; backends of other libraries override what differs."""

    name = "numpy"    # the value of ``--backend``
    xp: ModuleType = np    # the array library
    pool: Any    # lends the memory of the arrays, and counts it
    # The library's own versions of functions of `mm3d.model.functional`, under the same names, for
    # arrays of the types in its `dtypes`; other arrays use the readable functions.
    kernels: Any = None
    block = 32768    # elements of elementwise work at a time, as many as stay in cache, or all
    # Called between blocks of elementwise work, so that collectives in flight make progress.
    between_blocks: Progress = None
    has_contents = True    # whether elements of arrays have values; in dry runs they have none
    owns_types = True    # whether it owns all arrays of a type, if it owns one
    host_buffers = True    # whether MPI may read and write the arrays in place
    has_device = False    # whether the arrays are in a device's memory; a node may have several
    nccl: Any = None    # CuPy's binding of NCCL, where arrays are on a device and it is installed
    recording = False    # whether a step is being recorded, see `graph`

    def owns(self, a: Array) -> bool:
        """Return whether `a` is an array of this library, with all of its rules."""
        # Kernels would lose a mask, and a matrix multiplies where an array does elementwise.
        return type(a) is np.ndarray or (
            isinstance(a, np.ndarray) and not isinstance(a, (np.ma.MaskedArray, np.matrix)))

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate an uninitialised array; its memory is reused when its last view is gone."""
        return self.pool.take(tuple(shape), np.dtype(dtype))

    def arange(self, start: int, stop: int) -> Array:
        """Return the integers from `start` up to but not including `stop`."""
        return self.xp.arange(start, stop)

    def asarray(self, host: np.ndarray) -> Array:
        """Copy a NumPy array to this library's memory."""
        a = self.empty(host.shape, host.dtype)
        a[...] = host
        return a

    def from_host(self, shape: tuple[int, ...], dtype: Any,
                  make: Callable[[], np.ndarray]) -> Array:
        """Convert what `make` returns, of `shape`, to `dtype`; a dry run does not call it."""
        return self.asarray(make().astype(dtype, copy=False))

    def to_host(self, a: Array) -> np.ndarray:
        """Return `a` as a NumPy array; arrays reach the host in no other way."""
        return np.asarray(a)

    def is_contiguous(self, a: Array) -> bool:
        """Return whether the elements of `a` lie in C order without gaps."""
        return a.flags.c_contiguous

    def contiguous(self, a: Array) -> Array:
        """Return `a` itself if it is contiguous, otherwise a contiguous copy."""
        if not self.is_contiguous(a):
            gaps, a = a, self.empty(a.shape, a.dtype)
            a[...] = gaps
        return a

    def gemm(self, a: Array, b: Array, out: Array, progress: Progress = None) -> Array:
        """Multiply (m, k) by (k, n), of one dtype, into `out`, (m, n), and return it.

        Numbers of 16 bits are summed in float32.
        `progress` is called after each panel of rows, so that collectives in flight make progress.
        """
        if a.dtype.itemsize == 2:
            out[...] = np.matmul(a.astype(np.float32), b.astype(np.float32))
            return out
        if progress is None:
            return np.matmul(a, b, out=out)
        step = max(1, -(-a.shape[0] // (MAX_PANELS * PANEL_ROWS))) * PANEL_ROWS
        for start in range(0, a.shape[0], step):
            np.matmul(a[start:start + step], b, out=out[start:start + step])
            progress()
        return out

    def add_to(self, a: Array, b: Array) -> Array:
        """Compute a += b, of one shape; return `a`."""
        a += b
        return a

    def take_rows(self, a: Array, rows: np.ndarray, out: Array) -> Array:
        """Copy the rows of `a` with these numbers, integers of the host, to `out`; return it.

        Both are matrices of one dtype; a number may come several times.
        """
        return np.take(a, rows, axis=0, out=out, mode="clip")    # others copy to a buffer first

    def put_rows(self, a: Array, rows: np.ndarray, values: Array) -> None:
        """Copy `values` to the rows of `a` with these numbers, all different."""
        a[rows] = values

    def alike(self, count: int) -> Iterable[int]:
        """Return the numbers of `count` equal pieces of work; a dry run does only two of them."""
        return range(count)

    @property
    def more_dtypes(self) -> tuple[Any, ...]:
        """Floating-point types beside float16, float32 and float64, which every library has.

        That is bfloat16 if the package ml_dtypes is installed, which NumPy and CuPy take it from.
        """
        try:
            import ml_dtypes
        except ImportError:
            return ()
        return (np.dtype(ml_dtypes.bfloat16),)

    def memory(self) -> dict[str, int]:
        """Return the bytes of array memory: ``in_use``, ``peak`` and ``reserved``."""
        return {name: getattr(self.pool, name) for name in ("in_use", "peak", "reserved")}

    def reset_peak(self) -> None:
        """Set the peak of `memory` to the bytes in use now."""
        self.pool.reset_peak()

    def release_idle_memory(self) -> None:
        """Return the memory that no array uses to the system."""
        self.pool.clear()

    # What MPI sends and receives: the arrays in place, or copies in host memory.

    def mpi_buffer(self, a: Array) -> Array:
        """View `a` as a type that MPI can move."""
        narrow = a.dtype.itemsize == 2 and a.dtype.name == "bfloat16"    # a name takes time
        return a.view(np.uint16) if narrow else a

    def host_copy(self, a: Array) -> np.ndarray:
        """Copy `a` to host memory, with elements of a type that MPI moves (see `mpi_buffer`)."""
        return np.ascontiguousarray(self.to_host(a))

    def host_buffer(self, a: Array) -> np.ndarray:
        """Allocate host memory of the shape of `a`, in which MPI receives its elements."""
        return np.empty(tuple(a.shape), host_dtype(a))

    def copy_from_host(self, host: np.ndarray, a: Array) -> None:
        """Copy `host`, from `host_copy` or `host_buffer`, into `a`."""
        a[...] = self.asarray(host)

    # Devices: NumPy has none, so there is nothing to do here.

    def choose_device(self, number: int, counted: float) -> None:
        """Use the device of the rank that has this `number` on its node, if there are devices.

        `counted` is the number of ranks of its communicator, infinite for the world.  After a
        choice among more ranks, one among fewer is ignored.  Raises ValueError when there are
        arrays on another device.
        """

    def device_location(self) -> tuple[str, str] | None:
        """Return the node and the device of the arrays; None without a device."""
        return None

    def describe_device(self) -> dict[str, str | int]:
        """Return the properties of the device for the record of a run; {} without a device."""
        return {}

    def synchronize(self) -> None:
        """Wait until the device has done all its work (nothing to wait for here)."""

    def begin_range(self, name: str) -> None:
        """Begin a range called `name` in the device's profiler (there is none here)."""

    def end_range(self) -> None:
        """End the range that was begun last."""

    def record_mark(self) -> Any:
        """Record a mark in the order of the device's work, for `seconds_between`."""
        return time.perf_counter()

    def seconds_between(self, start: Any, end: Any) -> float:
        """Return the seconds between two marks, after the device has reached the second."""
        return end - start

    def graph(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """Record the device's work of `step`; return a callable that launches it as one graph.

        Raises ValueError when the library cannot record graphs.
        """
        raise ValueError(f"backend {self.name!r} cannot record a step as a graph: choose 'cupy'")


_factories: dict[str, Callable[[], Backend]] = {
    "numpy": lambda: import_module("mm3d.arrays.numpy_backend").NumpyBackend()}
_backends: dict[str, Backend] = {}
_owners: dict[type, Backend] = {}    # of types of arrays, as far as they were asked for


def register(name: str, factory: Callable[[], Backend]) -> None:
    """Add the array library `name`; `factory` is called when it is first chosen."""
    _factories[name] = factory


def get(name: str | Backend | None = None) -> Backend:
    """Return a backend, made when it is first chosen, by default by ``MM3D_BACKEND``, or NumPy's.

    A Backend replaces the one of its name: from then on arrays of its library belong to it.
    Raises ValueError when no backend has that name, or its library cannot be used here.
    """
    if isinstance(name, Backend):
        _backends[name.name] = name
        _owners.clear()
        return name
    name = name or setting("MM3D_BACKEND", _factories) or "numpy"
    if name not in _factories:
        raise ValueError(f"backend {name!r} is unknown: choose one of {', '.join(_factories)}")
    if name not in _backends:
        _backends[name] = _factories[name]()
    return _backends[name]


def backend_of(a: Array) -> Backend:
    """Return the backend in use that `a` belongs to; TypeError where it belongs to none."""
    if (owner := _owners.get(type(a))) is not None:    # models ask hundreds of times a step
        return owner
    for backend in _backends.values():
        if backend.owns(a):
            if backend.owns_types:
                _owners[type(a)] = backend
            return backend
    raise TypeError(f"{type(a).__name__} is an array of no backend in use "
                    f"({', '.join(_backends) or 'none'})")


def namespace(a: Array) -> ModuleType:
    """Return the array library of `a`, with the functions that work on it."""
    return backend_of(a).xp


def reshape(a: Array, shape: tuple[int, ...]) -> Array:
    """Return `a` in another shape: a view if its strides allow it, `a` itself if it has it."""
    if a.shape == shape:
        return a    # below, NumPy's method takes a fourth of the time of its function
    return a.reshape(shape) if type(a) is np.ndarray else namespace(a).reshape(a, shape)


def accumulation_dtype(a: Array) -> Any:
    """Return the dtype for sums over `a`: its own, but float32 for floating point of 16 bits."""
    return namespace(a).float32 if _has_16_bits(a.dtype) else a.dtype


@cache
def _has_16_bits(dtype: Any) -> bool:
    return str(dtype) in ("float16", "bfloat16")    # to make the name takes time: cached


def host_dtype(a: Array) -> np.dtype:
    """Return the NumPy dtype of the elements of `a`, without reading them."""
    if isinstance(a.dtype, np.dtype):
        return a.dtype
    return np.dtype(str(a.dtype).rpartition(".")[2])    # a library may call it "library.float32"


def setting(variable: str, known: Iterable[str] = ("0", "1"), where: str = "") -> str:
    """Return the value of a variable of the environment; "" where it is empty or not set.

    Raises ValueError when it is none of the `known` values; the message has `where` they hold.
    """
    given, known = os.environ.get(variable, ""), list(known)
    *others, last = known
    if given and given not in known:
        raise ValueError(f"{variable}={given!r} is unknown{where}: choose "
                         f"{', '.join(others)}{' or ' * bool(others)}{last}")
    return given


def device_kernels() -> type:
    """Return the class of the kernels of a GPU, also where its library is not installed."""
    return import_module("mm3d.arrays.cupy_kernels").GpuKernels
