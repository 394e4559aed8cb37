"""CuPy: arrays in the memory of an NVIDIA GPU.

One rank drives one GPU, the one of its number on the node; where there are fewer GPUs than ranks
they take turns.  All work is in order on one stream of the rank's own; copies to and from the host
and NCCL have streams of their own, which events order with it.
"""

import os
import platform
import sys
from typing import Any, Callable

import numpy as np

from mm3d import backend, environment
from mm3d.backend import Array, Backend
from mm3d.kernels import GpuKernels


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
        When CuPy is not installed or finds no GPU.
    """

    name = "cupy"
    block = sys.maxsize
    host_buffers = False

    def __init__(self) -> None:
        try:
            import cupy
        except ImportError as error:
            raise ValueError("backend 'cupy' needs the package cupy: "
                             "pip install cupy-cuda13x, or choose backend 'numpy'") from error
        if not cupy.is_available():
            raise ValueError("backend 'cupy' found no usable GPU: choose backend 'numpy'")
        self.xp, self.tf32 = cupy, os.environ.get("MM3D_TF32", "0") not in ("", "0")
        self.gpu = environment.local_rank() % cupy.cuda.runtime.getDeviceCount()
        cupy.cuda.Device(self.gpu).use()
        self.pool, self._peak = cupy.cuda.MemoryPool(), 0
        cupy.cuda.set_allocator(self._allocate)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.stream.use()
        self._sides: dict[str, Any] = {}
        self._delivering: list[tuple[Any, np.ndarray]] = []
        self.kernels = GpuKernels(self)
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
        a, out = self.wire(self.contiguous(a)), self.side_stream("device to host")
        host = self.host_buffer(a)
        out.wait_event(self.stream.record())
        self._copy(host.ctypes.data, self.pointer(a), a.nbytes, "memcpyDeviceToHost", out)
        out.synchronize()
        return host

    def host_buffer(self, a: Array) -> np.ndarray:
        a = self.wire(a)
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

    def wire(self, a: Array) -> Array:
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

    def gemm(self, a: Array, b: Array, out: Array) -> Array:
        """A B by cuBLAS; the sums are float32 for float32 and what has 16 bits.

        The factors are matrices of one type, contiguous or transposed; others are copied.  `out`
        is contiguous, of their type or, where they have 16 bits, of float32.
        """
        self.gemms(a[None, ...], b[None, ...], out[None, ...])
        return out

    def gemms(self, a: Array, b: Array, out: Array) -> None:
        """The products of matrices along the first dimension, as `gemm`; of any row strides."""
        (count, m, k), n = a.shape, b.shape[2]
        if not count * m * n * k:
            out[...] = 0
            return
        from cupy_backends.cuda.libs import cublas
        # cuBLAS stores by columns: what it is told is C^T = B^T A^T.
        factors = []
        for factor in (b, a):
            factor, turned, step = self._by_columns(factor)
            factors.append((turned, [self.pointer(factor), self._kind(factor.dtype), step,
                                     factor.strides[0] // factor.itemsize]))
        if out.strides[2] != out.itemsize and n > 1:
            raise ValueError("the rows of a product must be contiguous")
        sums = np.float64 if a.dtype == np.float64 else np.float32
        one, zero = np.ones((), sums), np.zeros((), sums)
        handle = self.xp.cuda.get_cublas_handle()
        cublas.setPointerMode(handle, cublas.CUBLAS_POINTER_MODE_HOST)
        (turn_b, second), (turn_a, first) = factors
        cublas.gemmStridedBatchedEx(
            handle, turn_b, turn_a, n, m, k, one.ctypes.data, *second, *first, zero.ctypes.data,
            self.pointer(out), self._kind(out.dtype), max(n, out.strides[1] // out.itemsize),
            out.strides[0] // out.itemsize, count, self._sums(cublas, a.dtype),
            cublas.CUBLAS_GEMM_DEFAULT)

    def _by_columns(self, a: Array) -> tuple[Array, int, int]:
        """Matrices for cuBLAS: themselves or a copy, 1 if their rows are not contiguous (they
        are to be read transposed), and the step between their rows or columns."""
        size, (_, rows, columns) = a.itemsize, a.strides
        if a.shape[2] == 1 or columns == size and rows >= a.shape[2] * size:
            return a, 0, max(a.shape[2], rows // size)
        if a.shape[1] == 1 or rows == size and columns >= a.shape[1] * size:
            return a, 1, max(a.shape[1], columns // size)
        return self.contiguous(a), 0, a.shape[2]

    def _kind(self, dtype: Any) -> int:
        """cuBLAS' name for a type."""
        names = {"float64": "CUDA_R_64F", "float32": "CUDA_R_32F", "float16": "CUDA_R_16F",
                 "bfloat16": "CUDA_R_16BF"}
        return getattr(self.xp.cuda.runtime, names[str(dtype)])

    def _sums(self, cublas: Any, dtype: Any) -> int:
        """cuBLAS' name for how products of such factors are computed."""
        if dtype == np.float64:
            return cublas.CUBLAS_COMPUTE_64F
        if dtype == np.float32 and self.tf32:
            return cublas.CUBLAS_COMPUTE_32F_FAST_TF32
        return cublas.CUBLAS_COMPUTE_32F

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
        self.pool.free_all_blocks()


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
