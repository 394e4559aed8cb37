"""Provide CuPy arrays in the memory of an NVIDIA GPU.

A rank drives the GPU that `mm3d.arrays.device_choice` gives to its number on the node.  All
computation is in order on one stream of the rank; copies to and from the host and NCCL have
streams of their own, which events order with it.
"""

import math
import os
import platform
import re
import sys
from typing import Any, Callable

import numpy as np

from mm3d import launcher
from mm3d.arrays import backend
from mm3d.arrays.backend import Array, Backend, Progress, setting
from mm3d.arrays.cublas import Cublas
from mm3d.arrays.cupy_graph import Graph
from mm3d.arrays.cupy_kernels import GpuKernels
from mm3d.arrays.device_choice import gpu_of_rank

# cupy.astype and bfloat16 came with 14.0; before 14.1 `used_bytes`, which is called at each
# allocation, took time proportional to the number of blocks.
MINIMUM_CUPY = (14, 1)
# CUDA 13 compiles for Turing and later: compute capability 7.5, runtime version 13.0.
TURING_CAPABILITY, CUDA_13_VERSION = 75, 13000
INSTALL_COMMAND = "pip install -U 'cupy-cuda13x[ctk]>=14.1' (cupy-cuda12x for GPUs before Turing)"


class CupyBackend(Backend):
    """Provide CuPy arrays on one GPU, with cuBLAS for products.

    Memory comes from a pool over plain ``cudaMalloc``: other kinds cannot be shared between
    processes by CUDA IPC, which MPI needs.

    Attributes
    ----------
    tf32 : bool
        Whether float32 products may round their factors to TensorFloat-32 (``MM3D_TF32=1``).
    with_cudnn : bool
        Whether cuDNN may compute attention (not with ``MM3D_CUDNN=0``).
    stream : cupy.cuda.Stream
        The stream on which everything is computed.

    Raises
    ------
    ValueError
        When CuPy is missing or too old, comes without cuBLAS or NVRTC, finds no GPU, or uses a
        CUDA that does not support it; when ``MM3D_GPU_ORDER`` is no order of the GPUs, or another
        variable is neither 0 nor 1.
    """

    name = "cupy"
    block = sys.maxsize
    host_buffers = False
    has_device = True
    rehearsing = False    # a step runs once before it is recorded

    def __init__(self) -> None:
        self.xp = _import_cupy()
        self.tf32 = setting("MM3D_TF32") == "1"
        self.with_cudnn = setting("MM3D_CUDNN") != "0"
        told = launcher.local_rank()
        self._counted = 0 if told is None else math.inf
        self._open(gpu_of_rank(told or 0, self.xp.cuda.runtime.getDeviceCount()))

    def _open(self, gpu: int) -> None:
        """Prepare to compute on a GPU."""
        self.gpu, cupy = gpu, self.xp
        cupy.cuda.Device(gpu).use()    # before a context exists, else it is on GPU 0
        self.capability = int(cupy.cuda.Device(gpu).compute_capability)
        _check_architecture(self.capability, cupy.cuda.runtime.runtimeGetVersion())
        self.pool, self._peak = cupy.cuda.MemoryPool(), 0
        cupy.cuda.set_allocator(self._allocate)
        self.stream = cupy.cuda.Stream(non_blocking=True)
        self.join_stream()
        self._side_streams: dict[str, Any] = {}
        self._copies_in_flight: list[tuple[Any, np.ndarray]] = []
        self.kernels = GpuKernels(self)
        self.cublas = Cublas(self, _import_cublas(), self.capability)
        cupy.zeros(1)
        self._own_bytes = self.pool.used_bytes()

    def choose_device(self, number: int, counted: float) -> None:
        if counted < self._counted:
            return
        self._counted = counted
        gpu = gpu_of_rank(number, self.xp.cuda.runtime.getDeviceCount())
        if gpu != self.gpu:
            if self.pool.used_bytes() > self._own_bytes:
                raise ValueError(f"this rank is number {number} of its node, so that its GPU is "
                                 f"{gpu}, and it has arrays on GPU {self.gpu}: make a grid of all "
                                 "ranks before the first array")
            self._open(gpu)

    def join_stream(self) -> None:
        """Order `stream` after the current one, and make it current, if it is not.

        What CuPy's functions compute goes to the current stream.  CuPy, the caller or another
        thread may have made another one current.
        """
        current = self.xp.cuda.get_current_stream()
        if current.ptr != self.stream.ptr:
            self.stream.wait_event(current.record())
            self.stream.use()

    @property
    def recording(self) -> bool:
        self.join_stream()    # it is captured too where the current one is
        return self.rehearsing or self.stream.is_capturing()

    def _allocate(self, size: int) -> Any:
        """Allocate device memory, for every array and for CuPy's own temporaries."""
        memory = self.pool.malloc(size)
        used = self.pool.used_bytes()
        if used > self._peak:
            self._peak = used
        return memory

    def owns(self, a: Array) -> bool:
        return isinstance(a, self.xp.ndarray)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return self.xp.empty(tuple(shape), _dtype(dtype))

    def asarray(self, host: np.ndarray) -> Array:
        return self.xp.asarray(host)

    def to_host(self, a: Array) -> np.ndarray:
        self.join_stream()
        # CuPy 14.2 copies an array with gaps itself, and then leaves the default stream current.
        return self.xp.asnumpy(self.contiguous(a))

    def take_rows(self, a: Array, rows: np.ndarray, out: Array) -> Array:
        return self.xp.take(a, self.asarray(rows), axis=0, out=out)

    def put_rows(self, a: Array, rows: np.ndarray, values: Array) -> None:
        a[self.asarray(rows)] = values

    def host_copy(self, a: Array) -> np.ndarray:
        self.join_stream()
        a, out = self.contiguous(a), self.side_stream("device to host")
        host = self.host_buffer(a)
        out.wait_event(self.stream.record())
        self._copy(host.ctypes.data, self.pointer(a), a.nbytes, "memcpyDeviceToHost", out)
        out.synchronize()
        return host

    def host_buffer(self, a: Array) -> np.ndarray:
        memory = self.xp.cuda.alloc_pinned_memory(max(1, a.nbytes))
        return np.frombuffer(memory, self.mpi_buffer(a).dtype, a.size).reshape(a.shape)

    def copy_from_host(self, host: np.ndarray, a: Array) -> None:
        if not self.is_contiguous(a):
            raise ValueError("only into a contiguous array can host memory be copied")
        self.join_stream()
        back = self.side_stream("host to device")
        # The stream may still use the memory of `a` for another array that had it before.
        back.wait_event(self.stream.record())
        self._copy(self.pointer(a), host.ctypes.data, a.nbytes, "memcpyHostToDevice", back)
        arrived = back.record()
        self.stream.wait_event(arrived)
        # CuPy reuses pinned memory once nothing refers to it: it is kept until the copy is done.
        self._forget_finished_copies()
        self._copies_in_flight.append((arrived, host))

    def _forget_finished_copies(self) -> None:
        """Drop the references to host memory whose copies to the device are done."""
        self._copies_in_flight = [(event, host) for event, host in self._copies_in_flight
                                  if not event.done]

    def _copy(self, to: int, source: int, length: int, kind: str, stream: Any) -> None:
        if length:
            runtime = self.xp.cuda.runtime
            runtime.memcpyAsync(to, source, length, getattr(runtime, kind), stream.ptr)

    def mpi_buffer(self, a: Array) -> Array:
        a = a.view(np.uint16) if str(a.dtype) in ("float16", "bfloat16") else a
        return a if a.size else a.reshape(-1)    # in (4, 0) mpi4py finds gaps

    def pointer(self, a: Array) -> int:
        """Return the address of the first element."""
        return a.data.ptr

    def side_stream(self, name: str) -> Any:
        """Return the stream called `name`, beside the one that computes."""
        if name not in self._side_streams:
            self._side_streams[name] = self.xp.cuda.Stream(non_blocking=True)
        return self._side_streams[name]

    @property
    def nccl(self) -> Any:
        """CuPy's binding of NCCL; None if the library is not installed."""
        from cupy.cuda import nccl
        return nccl if nccl.available else None

    def device_location(self) -> tuple[str, str]:
        return platform.node(), self.xp.cuda.Device(self.gpu).pci_bus_id

    def describe_device(self) -> dict[str, str | int]:
        runtime, flash = self.xp.cuda.runtime, getattr(self.kernels, "flash", None)
        properties = runtime.getDeviceProperties(self.gpu)
        return {"gpu": properties["name"].decode(), "gpu_number": self.gpu,
                "gpu_memory": int(properties["totalGlobalMem"]),
                "gpu_multiprocessors": int(properties["multiProcessorCount"]),
                "cuda_runtime": int(runtime.runtimeGetVersion()),
                "cuda_driver": int(runtime.driverGetVersion()), "tf32": self.tf32,
                **({"flash_attention": f"cuDNN {flash.version}"} if flash else {})}

    def gemm(self, a: Array, b: Array, out: Array, progress: Progress = None) -> Array:
        """Multiply two matrices by cuBLAS; elements of 16 and 32 bits are summed in float32.

        Parameters
        ----------
        a, b : Array
            (m, k) and (k, n) of one type, contiguous or transposed; others are copied.
        out : Array
            (m, n), contiguous, of the type of `a`, or of float32 if that has 16 bits.
        progress : callable, optional
            Not called: the host does not wait for the product.

        Returns
        -------
        Array
            `out`.
        """
        self.gemms(a, b, out)
        return out

    def gemms(self, a: Array, b: Array, out: Array, add: bool = False) -> None:
        """Multiply one matrix each or those along a first dimension, see `Cublas.gemms`."""
        self.join_stream()
        if a.size and b.size:
            self.cublas.gemms(a, b, out, add)
        elif not add:
            out[...] = 0

    def add_to(self, a: Array, b: Array) -> Array:
        if self.kernels is None or a.dtype not in self.kernels.dtypes:
            return super().add_to(a, b)
        return self.kernels.add_to(a, b)

    def compile_module(self, code: str, options: tuple[str, ...], names: list[str]) -> Any:
        """Compile CUDA C++ for this GPU; `names` are the instances of its templates."""
        return self.xp.RawModule(code=code, options=options, name_expressions=names)

    def synchronize(self) -> None:
        self.join_stream()
        self.stream.synchronize()

    def begin_range(self, name: str) -> None:
        self.xp.cuda.nvtx.RangePush(name)

    def end_range(self) -> None:
        self.xp.cuda.nvtx.RangePop()

    def record_mark(self) -> Any:
        self.join_stream()
        return self.stream.record(self.xp.cuda.Event())

    def seconds_between(self, start: Any, end: Any) -> float:
        end.synchronize()
        return 1e-3 * self.xp.cuda.get_elapsed_time(start, end)

    def graph(self, step: Callable[[], Any]) -> Callable[[], Any]:
        return Graph(self, step)

    def memory(self) -> dict[str, int]:
        return {"in_use": self.pool.used_bytes(), "peak": self._peak,
                "reserved": self.pool.total_bytes()}

    def reset_peak(self) -> None:
        self._peak = self.pool.used_bytes()

    def release_idle_memory(self) -> None:
        self._forget_finished_copies()
        self.pool.free_all_blocks()
        self.xp.get_default_pinned_memory_pool().free_all_blocks()    # of the transport `staged`


def _import_cupy() -> Any:
    """Import CuPy with the libraries that are used; ValueError if one is missing."""
    try:
        import cupy
    except ImportError as error:
        raise ValueError(f"backend 'cupy' needs the package cupy: {INSTALL_COMMAND}, or choose "
                         "backend 'numpy'") from error
    if tuple(map(int, re.findall(r"\d+", cupy.__version__)[:2])) < MINIMUM_CUPY:
        wanted = ".".join(map(str, MINIMUM_CUPY))
        raise ValueError(f"backend 'cupy' needs CuPy {wanted} or newer, here is "
                         f"{cupy.__version__}: {INSTALL_COMMAND}")
    if not cupy.is_available():
        raise ValueError("backend 'cupy' found no usable GPU: choose backend 'numpy'")
    try:
        from cupy_backends.cuda.libs import nvrtc
        nvrtc.getVersion()
    except (ImportError, RuntimeError) as error:
        raise ValueError(f"backend 'cupy' needs NVRTC, which CuPy does not find ({error}): "
                         f"{INSTALL_COMMAND}") from error
    return cupy


def _import_cublas() -> Any:
    """Import CuPy's binding of cuBLAS; ValueError if cuBLAS is missing."""
    try:
        from cupy_backends.cuda.libs import cublas
    except ImportError as error:
        raise ValueError(f"backend 'cupy' needs cuBLAS, which CuPy does not find ({error}): "
                         f"{INSTALL_COMMAND}") from error
    return cublas


def _check_architecture(capability: int, cuda: int) -> None:
    """Raise ValueError if this CUDA does not support the GPU's compute capability."""
    if capability < TURING_CAPABILITY and cuda >= CUDA_13_VERSION:
        raise ValueError(f"CUDA {cuda // 1000} no longer supports this GPU (sm_{capability}): "
                         "pip uninstall cupy-cuda13x; pip install 'cupy-cuda12x[ctk]>=14.1'")


def _dtype(name: Any) -> Any:
    """Return the dtype; ml_dtypes is imported only for "bfloat16"."""
    if type(name) is str and name == "bfloat16":    # others name types that NumPy knows
        import ml_dtypes
        return np.dtype(ml_dtypes.bfloat16)
    return name


def create_device_context() -> None:
    """Create the device's context now if ``MM3D_BACKEND`` names CuPy.

    MPI libraries check when they start whether a context exists.  An error is not raised here,
    but when the backend is chosen.
    """
    if os.environ.get("MM3D_BACKEND") == CupyBackend.name:
        try:
            backend.get(CupyBackend.name)
        except ValueError:
            return


backend.register(CupyBackend.name, CupyBackend)
