"""Array libraries: the one place that knows which of them holds the numbers.

A `Backend` makes, copies, multiplies and accounts for arrays.  Everything above it works
on the arrays themselves through their own namespace (`namespace`), so that no algorithm
names a library.  The library is chosen once, when a grid is made (``--backend`` of the
benchmarks, ``MM3D_BACKEND``), never in the middle of a computation.
"""

import os
import time
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Callable, Iterator

import numpy as np

from mm3d.arrays.numpy_kernels import Kernels
from mm3d.arrays.pool import Pool

# A product during which a collective goes on is cut into PANELS panels at most, each of a multiple
# of PANEL rows.
# BLAS works on blocks of rows, 12 or 24 with AVX2, and rounds in another way in the last, shorter
# ones: so that cutting changes no bit, each panel is of whole blocks.
PANELS, PANEL = 8, 96

Array = Any  # an array of whichever library the backend wraps
Progress = Callable[[], None] | None    # lets collectives move on during a product


class Backend:
    """NumPy on host memory; other libraries override what differs.

    Attributes
    ----------
    name : str
        What ``--backend`` calls it.
    xp : module
        The array library.
    block : int
        Elements that elementwise work handles at a time: as many as stay in cache on a
        processor, everything at once where each operation is a kernel launch.
    host_buffers : bool
        Whether MPI may read and write the arrays where they lie.
    kernels : object or None
        The library's own versions of functions of `mm3d.model.functional`, under the same names,
        for arrays of the types in its `dtypes`; where there is none the readable one is used.
    nccl : module or None
        CuPy's binding of NCCL, where the arrays lie on a device and NCCL is installed.
    more_dtypes : tuple of dtype
        Floating-point types beside those of 16, 32 and 64 bits that every library has.
    """

    name = "numpy"
    xp: ModuleType = np
    block = 32768
    host_buffers = True
    kernels: Any = None
    nccl: Any = None
    more_dtypes: tuple[Any, ...] = ()

    def __init__(self) -> None:
        self.pool = Pool()
        if self.xp is np:
            self.kernels = Kernels(self)

    def owns(self, a: Array) -> bool:
        """Whether `a` is an array of this library."""
        return isinstance(a, np.ndarray)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """An uninitialised array; its memory is reused when the last view of it is gone."""
        return self.pool.take(tuple(shape), np.dtype(dtype))

    def arange(self, start: int, stop: int) -> Array:
        """The integers from `start` up to but not including `stop`."""
        return self.xp.arange(start, stop)

    def asarray(self, host: np.ndarray) -> Array:
        """A copy of a NumPy array in this library's memory."""
        a = self.empty(host.shape, host.dtype)
        a[...] = host
        return a

    def from_host(self, shape: tuple[int, ...], dtype: Any,
                  make: Callable[[], np.ndarray]) -> Array:
        """The NumPy array of `shape` that `make` gives, as one of `dtype` in this library."""
        return self.asarray(make().astype(dtype, copy=False))

    def to_host(self, a: Array) -> np.ndarray:
        """`a` as a NumPy array (the explicit way to the host, and the only one)."""
        return np.asarray(a)

    def host_copy(self, a: Array) -> np.ndarray:
        """A copy of `a` in host memory, made to travel (see `mpi_buffer`)."""
        return np.ascontiguousarray(self.to_host(a))

    def host_buffer(self, a: Array) -> np.ndarray:
        """Host memory of the shape of `a`, for what is to be delivered there."""
        return np.empty(tuple(a.shape), str(a.dtype).rpartition(".")[2])

    def deliver(self, host: np.ndarray, a: Array) -> None:
        """Copy `host`, from `host_copy` or `host_buffer`, into `a`."""
        a[...] = self.asarray(host)

    def mpi_buffer(self, a: Array) -> Array:
        """`a` where it lies, as a type that MPI can move."""
        return a

    def place(self) -> tuple[str, str] | None:
        """The node and the device that the arrays lie on; None without a device."""
        return None

    def describe(self) -> dict[str, str | int]:
        """What the device is, for the record of a run; nothing without a device."""
        return {}

    def is_contiguous(self, a: Array) -> bool:
        """Whether the elements of `a` lie in C order without gaps."""
        return a.flags.c_contiguous

    def contiguous(self, a: Array) -> Array:
        """`a` itself when it is contiguous, otherwise a copy that is."""
        if self.is_contiguous(a):
            return a
        copy = self.empty(a.shape, a.dtype)
        copy[...] = a
        return copy

    def gemm(self, a: Array, b: Array, out: Array, progress: Progress = None) -> Array:
        """The product of two matrices in their own dtype; float16 is summed in float32.

        Where `progress` is given, the product is made in panels of rows and it is called after
        each of them, so that collectives in flight move on.
        """
        if a.dtype == np.float16:
            out[...] = np.matmul(a.astype(np.float32), b.astype(np.float32))
            return out
        if progress is None:
            return np.matmul(a, b, out=out)
        step = max(1, -(-a.shape[0] // (PANELS * PANEL))) * PANEL
        for start in range(0, a.shape[0], step):
            np.matmul(a[start:start + step], b, out=out[start:start + step])
            progress()
        return out

    def synchronize(self) -> None:
        """Wait until everything asked of the device is done (nothing to wait for here)."""

    def begin_range(self, name: str) -> None:
        """Tell the device's profiler that `name` begins (there is none here)."""

    def end_range(self) -> None:
        """Tell it that what began last has ended."""

    def mark(self) -> Any:
        """This moment in the order of what the device does, for `seconds`."""
        return time.perf_counter()

    def seconds(self, start: Any, end: Any) -> float:
        """Seconds on the device between two marks; waits until it has reached the second."""
        return end - start

    def graph(self, step: Callable[[], Any]) -> Callable[[], Any]:
        """A call that has the device repeat all that it does in `step`, launched as one.

        Raises
        ------
        ValueError
            Where there is no device that can.
        """
        raise ValueError(f"backend {self.name!r} cannot record a step as a graph: choose 'cupy'")

    def memory(self) -> dict[str, int]:
        """Bytes of array memory: ``in_use``, ``peak`` and ``reserved``."""
        return {"in_use": self.pool.in_use, "peak": self.pool.peak,
                "reserved": self.pool.reserved}

    def reset_peak(self) -> None:
        """Let the peak of `memory` start again from what is in use now."""
        self.pool.reset_peak()

    def trim(self) -> None:
        """Give memory that no array uses back to the system."""
        self.pool.trim()


_makers: dict[str, Callable[[], Backend]] = {"numpy": Backend}
_made: dict[str, Backend] = {}


def register(name: str, maker: Callable[[], Backend]) -> None:
    """Add the array library `name`; `maker` is called when it is first chosen."""
    _makers[name] = maker


def get(name: str | Backend | None = None) -> Backend:
    """The backend called `name`, or the one ``MM3D_BACKEND`` names, or NumPy's.

    One that is given itself takes the place of the one of its name: from then on arrays of its
    library belong to it.

    Raises
    ------
    ValueError
        When no backend has that name, or its library cannot be used here.
    """
    if isinstance(name, Backend):
        _made[name.name] = name
        return name
    name = name or os.environ.get("MM3D_BACKEND") or "numpy"
    if name not in _makers:
        raise ValueError(f"backend {name!r} is unknown: choose one of {', '.join(_makers)}")
    if name not in _made:
        _made[name] = _makers[name]()
    return _made[name]


@contextmanager
def only(*backends: Backend) -> Iterator[None]:
    """Have these backends alone in use within the block, and no other until `get` makes it.

    Arrays belong to the first of them that owns them.  After the block the backends that were in
    use before it are again.
    """
    before = dict(_made)
    _made.clear()
    try:
        for backend in backends:
            get(backend)
        yield
    finally:
        _made.clear()
        _made.update(before)


def backend_of(a: Array) -> Backend:
    """The backend in use that `a` belongs to.

    Raises
    ------
    TypeError
        When it belongs to none.
    """
    for backend in _made.values():
        if backend.owns(a):
            return backend
    raise TypeError(f"{type(a).__name__} is an array of no backend in use "
                    f"({', '.join(_made) or 'none'})")


def namespace(a: Array) -> ModuleType:
    """The array library of `a`, whose functions work on it."""
    return backend_of(a).xp


def accumulation_dtype(a: Array) -> Any:
    """The dtype for sums over `a`: its own, but float32 for floating point of 16 bits."""
    return namespace(a).float32 if str(a.dtype) in ("float16", "bfloat16") else a.dtype


def host_dtype(a: Array) -> np.dtype:
    """The NumPy dtype of the elements of `a`, found without looking at them."""
    if isinstance(a.dtype, np.dtype):
        return a.dtype
    return np.dtype(str(a.dtype).rpartition(".")[2])  # a library may call it "library.float32"
