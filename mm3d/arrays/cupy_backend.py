"""CuPy: arrays in the memory of an NVIDIA GPU.

One rank drives one GPU, the one of its number on the node; where there are fewer GPUs than ranks
they take turns.  All work is in order on one stream of the rank's own; copies to and from the host
and NCCL have streams of their own, which events order with it.
"""

import os
import platform
import re
import sys
from typing import Any, Callable

import numpy as np

from mm3d import launcher
from mm3d.arrays import backend
from mm3d.arrays.backend import Array, Backend, Progress
from mm3d.arrays.cublas import Cublas
from mm3d.arrays.cupy_kernels import GpuKernels

# cupy.astype and bfloat16 came with 14.0; before 14.1 the bytes in use, which are asked for at
# each allocation, were summed over all blocks.
CUPY = (14, 1)
# CUDA 13 compiles for Turing and later.
TURING, CUDA_13 = 75, 13000
INSTALL = "pip install -U 'cupy-cuda13x[ctk]>=14.1' (cupy-cuda12x for GPUs before Turing)"


class CupyBackend(Backend):
    """CuPy arrays, with cuBLAS for products.

    Memory comes from a pool over plain ``cudaMalloc``: other kinds cannot be shared between
    processes by CUDA IPC, which MPI needs.

    Attributes
    ----------
    tf32 : bool
        Whether float32 products may round their factors to TensorFloat-32 (``MM3D_TF32=1``).
    stream : cupy.cuda.Stream
        Where everything is computed.

    Raises
    ------
    ValueError
        When CuPy is missing or too old, comes without cuBLAS or NVRTC, finds no GPU, or is of a
        CUDA that does not know this one.
    """

    name = "cupy"
    block = sys.maxsize
    host_buffers = False

    def __init__(self) -> None:
        cupy = self.xp = _library()
        self.tf32 = os.environ.get("MM3D_TF32", "0") not in ("", "0")
        self.gpu = launcher.local_rank() % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(self.gpu).use()    # before anything makes a context, on GPU 0 otherwise
        capability = int(cupy.cuda.Device(self.gpu).compute_capability)
        _check_architecture(capability, cupy.cuda.runtime.runtimeGetVersion())
        self.pool, self._peak = cupy.cuda.MemoryPool(), 0
        cupy.cuda.set_allocator(self._allocate)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self._sides: dict[str, Any] = {}
        self._delivering: list[tuple[Any, np.ndarray]] = []
        self.kernels = GpuKernels(self)
        self.cublas = Cublas(self, _cublas(), capability)
        cupy.zeros(1)

    def _allocate(self, size: int) -> Any:
        """Device memory, for every array and every temporary of CuPy's own."""
        memory = self.pool.malloc(size)
        self._peak = max(self._peak, self.pool.used_bytes())
        return memory

    def owns(self, a: Array) -> bool:
        return isinstance(a, self.xp.ndarray)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.xp.empty(tuple(shape), _dtype(dtype))

    def asarray(self, host: np.ndarray) -> Array:
        return self.xp.asarray(host)

    def to_host(self, a: Array) -> np.ndarray:
        return self.xp.asnumpy(a)

    def host_copy(self, a: Array) -> np.ndarray:
        a, out = self.mpi_buffer(self.contiguous(a)), self.side_stream("device to host")
        host = self.host_buffer(a)
        out.wait_event(self.stream.record())
        self._copy(host.ctypes.data, self.pointer(a), a.nbytes, "memcpyDeviceToHost", out)
        out.synchronize()
        return host

    def host_buffer(self, a: Array) -> np.ndarray:
        a = self.mpi_buffer(a)
        memory = self.xp.cuda.alloc_pinned_memory(max(1, a.nbytes))
        return np.frombuffer(memory, a.dtype, a.size).reshape(a.shape)

    def deliver(self, host: np.ndarray, a: Array) -> None:
        if not self.is_contiguous(a):
            raise ValueError("only a contiguous array can be delivered to")
        back = self.side_stream("host to device")
        # The memory of `a` may have been another array's, on which the stream still works.
        back.wait_event(self.stream.record())
        self._copy(self.pointer(a), host.ctypes.data, a.nbytes, "memcpyHostToDevice", back)
        arrived = back.record()
        self.stream.wait_event(arrived)
        # Pinned memory would be lent again as soon as nothing refers to it.
        self._delivering = [(event, kept) for event, kept in self._delivering if not event.done]
        self._delivering.append((arrived, host))

    def _copy(self, to: int, source: int, length: int, kind: str, stream: Any) -> None:
        if length:
            runtime = self.xp.cuda.runtime
            runtime.memcpyAsync(to, source, length, getattr(runtime, kind), stream.ptr)

    def mpi_buffer(self, a: Array) -> Array:
        return a.view(np.uint16) if str(a.dtype) in ("float16", "bfloat16") else a

    def pointer(self, a: Array) -> int:
        """The address of the first element."""
        return a.data.ptr

    def side_stream(self, name: str) -> Any:
        """The stream called `name`, beside the one that computes."""
        if name not in self._sides:
            self._sides[name] = self.xp.cuda.Stream(non_blocking=True)
        return self._sides[name]

    @property
    def more_dtypes(self) -> tuple[Any, ...]:
        """bfloat16, where the package ml_dtypes, which CuPy takes it from, is installed."""
        try:
            return (np.dtype(_dtype("bfloat16")),)
        except ImportError:
            return ()

    @property
    def nccl(self) -> Any:
        """CuPy's binding of NCCL; None where the library is not installed."""
        from cupy.cuda import nccl
        return nccl if nccl.available else None

    def place(self) -> tuple[str, str]:
        return platform.node(), self.xp.cuda.Device(self.gpu).pci_bus_id

    def describe(self) -> dict[str, str | int]:
        runtime = self.xp.cuda.runtime
        properties = runtime.getDeviceProperties(self.gpu)
        return {"gpu": properties["name"].decode(), "gpu_number": self.gpu,
                "gpu_memory": int(properties["totalGlobalMem"]),
                "gpu_multiprocessors": int(properties["multiProcessorCount"]),
                "cuda_runtime": int(runtime.runtimeGetVersion()),
                "cuda_driver": int(runtime.driverGetVersion()), "tf32": int(self.tf32)}

    def gemm(self, a: Array, b: Array, out: Array, progress: Progress = None) -> Array:
        """A B by cuBLAS; the sums are float32 for float32 and what has 16 bits.

        The factors are matrices of one type, contiguous or transposed; others are copied.  `out`
        is contiguous, of their type or, where they have 16 bits, of float32.  The host, which
        has left when the device multiplies, calls no `progress`.
        """
        self.gemms(a[None, ...], b[None, ...], out[None, ...])
        return out

    def gemms(self, a: Array, b: Array, out: Array, add: bool = False) -> None:
        """The products of matrices along the first dimension, see `Cublas.gemms`."""
        if a.size and b.size:
            self.cublas.gemms(a, b, out, add)
        elif not add:
            out[...] = 0

    def compiled(self, code: str, options: tuple[str, ...], names: list[str]) -> Any:
        """CUDA C++ compiled for this GPU; `names` are the instances of its templates."""
        return self.xp.RawModule(code=code, options=options, name_expressions=names)

    def synchronize(self) -> None:
        self.stream.synchronize()

    def begin_range(self, name: str) -> None:
        self.xp.cuda.nvtx.RangePush(name)

    def end_range(self) -> None:
        self.xp.cuda.nvtx.RangePop()

    def mark(self) -> Any:
        return self.stream.record(self.xp.cuda.Event())

    def seconds(self, start: Any, end: Any) -> float:
        end.synchronize()
        return 1e-3 * self.xp.cuda.get_elapsed_time(start, end)

    def graph(self, step: Callable[[], Any]) -> Callable[[], Any]:
        return Graph(self, step)

    def memory(self) -> dict[str, int]:
        return {"in_use": self.pool.used_bytes(), "peak": self._peak,
                "reserved": self.pool.total_bytes()}

    def reset_peak(self) -> None:
        self._peak = self.pool.used_bytes()

    def trim(self) -> None:
        self._delivering = [(event, kept) for event, kept in self._delivering if not event.done]
        self.pool.free_all_blocks()
        self.xp.get_default_pinned_memory_pool().free_all_blocks()    # host memory of `staged`


class Graph:
    """What a step has the device do, recorded as a CUDA graph; each call repeats it.

    What the step makes lies in a pool of its own, which gives the same addresses to nobody else;
    what it was given is read and written where it lies.  The step runs once before it is recorded,
    so that all memory is there and all kernels are compiled.

    Parameters
    ----------
    backend : CupyBackend
        Whose stream is recorded.
    step : callable
        Without work of the host's, such as MPI, between what it asks of the device.

    Attributes
    ----------
    result : object
        What `step` returned; each call fills its arrays anew.
    """

    def __init__(self, backend: CupyBackend, step: Callable[[], Any]) -> None:
        self._stream, self._step = backend.stream, step
        before, backend.pool = backend.pool, backend.xp.cuda.MemoryPool()
        self._pool = backend.pool
        try:
            step()
            backend.synchronize()
            self._stream.begin_capture()
            try:
                self.result = step()
            finally:
                self._graph = self._stream.end_capture()
        finally:
            backend.pool = before

    def __call__(self) -> Any:
        self._graph.launch(self._stream)
        return self.result


def _library() -> Any:
    """CuPy, with all that is used of it; ValueError says what is missing."""
    try:
        import cupy
    except ImportError as error:
        raise ValueError(f"backend 'cupy' needs the package cupy: {INSTALL}, or choose backend "
                         "'numpy'") from error
    if tuple(map(int, re.findall(r"\d+", cupy.__version__)[:2])) < CUPY:
        raise ValueError(f"backend 'cupy' needs CuPy {'.'.join(map(str, CUPY))} or newer, here is "
                         f"{cupy.__version__}: {INSTALL}")
    if not cupy.is_available():
        raise ValueError("backend 'cupy' found no usable GPU: choose backend 'numpy'")
    try:
        from cupy_backends.cuda.libs import nvrtc
        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"backend 'cupy' needs NVRTC, which CuPy does not find ({error}): "
                         f"{INSTALL}") from error
    return cupy


def _cublas() -> Any:
    """CuPy's binding of cuBLAS; ValueError where cuBLAS is missing."""
    try:
        from cupy_backends.cuda.libs import cublas
    except ImportError as error:
        raise ValueError(f"backend 'cupy' needs cuBLAS, which CuPy does not find ({error}): "
                         f"{INSTALL}") from error
    return cublas


def _check_architecture(capability: int, cuda: int) -> None:
    """ValueError when this CUDA compiles nothing for a GPU of this compute capability."""
    if capability < TURING and cuda >= CUDA_13:
        raise ValueError(f"CUDA {cuda // 1000} no longer supports this GPU (sm_{capability}): "
                         "pip uninstall cupy-cuda13x; pip install 'cupy-cuda12x[ctk]>=14.1'")


def _dtype(name: Any) -> Any:
    """The dtype; "bfloat16" is known once the package ml_dtypes is imported."""
    if str(name) == "bfloat16":
        import ml_dtypes
        return np.dtype(ml_dtypes.bfloat16)
    return name


def start() -> None:
    """Make the device's context now if ``MM3D_BACKEND`` names CuPy.

    MPI libraries find out when they start whether there is one.  If it cannot be made, whoever
    asks for the backend is told.
    """
    if os.environ.get("MM3D_BACKEND") == CupyBackend.name:
        try:
            backend.get(CupyBackend.name)
        except ValueError:
            return


backend.register(CupyBackend.name, CupyBackend)
