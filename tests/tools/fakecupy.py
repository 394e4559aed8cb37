"""A CuPy for machines without a GPU: host arithmetic, but a device's rules.

Memory has two sides.  What kernels of the computing stream write is on the one, and what copies,
MPI and NCCL read and write by address is on the other.  Only waiting brings the two together: the
stream's `synchronize`, or events between streams.  Work on other streams is not done until
somebody waits for it.  Code that forgets to wait gets wrong numbers, each time.  Arrays refuse to
become NumPy arrays unasked.

With a `driver` (see ``standin/driver.c``) the second side is memory that no host instruction may
touch, for a CUDA-aware MPI to work on.
"""
import ctypes
import time
import types
import weakref
from operator import attrgetter

import numpy as np

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None


class Memory:
    """One allocation and its two sides."""

    alive: "weakref.WeakValueDictionary[int, Memory]" = weakref.WeakValueDictionary()  # by address
    lent: list["Memory"] = []          # a driver's, which other processes may have open
    written: set["Memory"] = set()     # by kernels, since the last flush
    driver = None
    open = False                       # whether MPI reads it without a driver, too

    def __init__(self, nbytes: int) -> None:
        nbytes = max(1, nbytes)
        self.computing = np.full(nbytes, 0xA5, np.uint8)
        if self.driver is None:
            self.device = np.full(nbytes, 0x5A, np.uint8)
            self.address = self.device.ctypes.data
        else:
            pointer = ctypes.c_uint64()
            assert self.driver.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(nbytes)) == 0
            self.address = pointer.value
            there = self.driver.standin_memory(pointer)
            self.device = np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(there))
        self.told, self.pool = False, MemoryPool.last
        self.alive[self.address] = self
        if self.driver is not None:
            self.lent.append(self)

    @property
    def dirty(self) -> bool:
        return self in self.written

    def write(self) -> None:
        """A kernel has written."""
        self.told = False
        self.written.add(self)

    def __del__(self) -> None:
        if self.driver is not None:
            del self.device
            self.driver.cuMemFree_v2(ctypes.c_uint64(self.address))

    def see(self) -> None:
        """Before a kernel looks: take what others wrote since they were told the address."""
        if self.told:
            self.computing[...] = self.device
            self.told = False


def flush() -> None:
    """What kernels wrote has arrived."""
    while Memory.written:
        memory = Memory.written.pop()
        memory.device[...] = memory.computing


def at(pointer: int, dtype, count: int, kernel: bool = False) -> np.ndarray:
    """`count` elements at an address, on the side of kernels or on the other."""
    exact = Memory.alive.get(pointer)
    for memory in [exact] if exact else list(Memory.alive.values()):
        start = memory.address
        if start <= pointer < start + memory.device.nbytes:
            side = memory.computing if kernel else memory.device
            part = side[pointer - start:pointer - start + count * np.dtype(dtype).itemsize]
            assert part.nbytes == count * np.dtype(dtype).itemsize, "beyond the allocation"
            if kernel:    # it was told the address, but is no stranger
                memory.write()
            return part.view(dtype)
    assert not count, f"no device memory at {pointer:#x}"
    return np.empty(0, dtype)


def seen_by_kernels(table: np.ndarray) -> np.ndarray:
    """A table of addresses, and of numbers below them all, as kernels see the same memory."""
    found = table.copy()
    for place, pointer in np.ndenumerate(table):
        for memory in list(Memory.alive.values()):
            if 0 <= (offset := int(pointer) - memory.address) < memory.device.nbytes:
                if not memory.dirty:
                    memory.see()
                found[place] = memory.computing.ctypes.data + offset
                memory.write()
    return found


class ndarray(np.lib.mixins.NDArrayOperatorsMixin):
    """An array on the device: a view of what kernels see of some memory."""

    def __init__(self, memory: Memory, shell: np.ndarray) -> None:
        self.memory, self.shell = memory, shell

    shape, dtype, ndim, size, nbytes, itemsize, strides, flags = (
        property(attrgetter(f"shell.{name}")) for name in
        ("shape", "dtype", "ndim", "size", "nbytes", "itemsize", "strides", "flags"))
    T = property(lambda self: ndarray(self.memory, self.shell.T))

    def __array__(self, *_, **__):
        raise TypeError("implicit conversion to a NumPy array is not allowed")

    def __len__(self) -> int:
        return len(self.shell)

    def _address(self) -> int:
        """Tell the address to a stranger."""
        if not self.memory.dirty:
            self.memory.see()
        self.memory.told = True
        offset = self.shell.__array_interface__["data"][0] - self.memory.computing.ctypes.data
        return self.memory.address + offset if self.size else 0

    @property
    def data(self):
        return types.SimpleNamespace(ptr=self._address())

    @property
    def __cuda_array_interface__(self) -> dict:
        if Memory.driver is None and not Memory.open:
            raise AttributeError("no MPI can read this memory")
        assert self.flags.c_contiguous
        # mpi4py takes the DLPack form of CuPy's arrays, and finds gaps in (4, 0).
        assert self.size or self.ndim == 1, "dlpack: buffer is not contiguous"
        return dict(shape=self.shape, typestr=self.dtype.str, strides=None, version=3,
                    data=(self._address(), False))

    def __array_ufunc__(self, ufunc, method, *inputs, out=None, **options):
        return call(getattr(ufunc, method), *inputs, out=out and out[0], **options)

    def __getitem__(self, index):
        return call(lambda a: a[index], self)

    def __setitem__(self, index, value):
        self.memory.see()
        index, value = unwrapped(index), unwrapped(value)

        def work() -> None:
            self.shell[index] = value
            self.memory.write()
        kernel(work)

    def view(self, dtype):
        return ndarray(self.memory, self.shell.view(dtype))

    def reshape(self, *shape):
        return call(np.reshape, self, shape[0] if len(shape) == 1 else shape)

    def transpose(self, *axes):
        return call(np.transpose, self, axes)

    def astype(self, dtype, copy=True):
        return self if not copy and self.dtype == dtype else call(lambda a: a.astype(dtype), self)


def unwrapped(value):
    if isinstance(value, ndarray):
        value.memory.see()
        return value.shell
    if isinstance(value, np.ndarray) and value.ndim:
        raise TypeError("a NumPy array is not on the device")
    return value


def new(a: np.ndarray) -> ndarray:
    """An array in memory of its own, of the contents of `a`."""
    memory = Memory(a.nbytes)
    shell = memory.computing[:a.nbytes].view(a.dtype).reshape(a.shape)
    shell[...] = a
    memory.write()
    return ndarray(memory, shell)


def kernel(work) -> None:
    """Do what a kernel does; in a capture it is noted, too, and undone when that ends."""
    work()
    if Graph.captured is not None:
        Graph.captured.append(work)


def call(function, *arguments, out=None, **options):
    """A function of NumPy's as a kernel; what it returns is a view if NumPy's is one."""
    given = [a for a in arguments if isinstance(a, ndarray)]
    plain = [unwrapped(a) for a in arguments]
    if out is not None:
        options["out"] = unwrapped(out)

        def work() -> None:
            function(*plain, **options)
            out.memory.write()
        kernel(work)
        return out
    result = function(*plain, **options)
    if not isinstance(result, np.ndarray):
        return new(np.asarray(result)) if isinstance(result, np.generic) else result
    for a in given:
        if result.base is not None and np.may_share_memory(result, a.memory.computing):
            return ndarray(a.memory, result)
    made = new(result)

    def again() -> None:
        made.shell[...] = function(*plain, **options)
        made.memory.write()
    kernel(again)
    return made


# --- Streams and graphs --------------------------------------------------------------------

class Graph:
    """Kernels in order.  Nothing is computed while they are captured, and nobody may wait."""

    captured: "list | None" = None
    streams: "set[Stream]" = set()    # that are captured: those that wait for one are, too

    @classmethod
    def begin(cls) -> None:
        assert cls.captured is None
        flush()
        cls.captured = []
        cls.before = [(memory, memory.computing.copy()) for memory in Memory.alive.values()]

    def __init__(self) -> None:
        self.kernels, Graph.captured = self.captured, None
        Graph.streams.clear()
        for memory in Memory.alive.values():
            memory.computing[...] = 0xA5
        for memory, contents in self.before:
            memory.computing[...] = contents
        del Graph.before
        Memory.written.clear()

    @classmethod
    def refuse(cls) -> None:
        """What would wait for the device, or copy from the host, ends a capture."""
        if cls.captured is not None:
            raise RuntimeError("cudaErrorStreamCaptureUnsupported")

    def launch(self, stream: "Stream") -> None:
        assert stream is Stream.computing
        for work in self.kernels:
            work()


class Event:
    """A place in the order of a stream."""

    def __init__(self, **_) -> None:
        self.stream = None

    @property
    def done(self) -> bool:
        return self.place <= self.stream.finished

    def synchronize(self) -> None:
        Graph.refuse()
        self.stream.finish(self.place)


class Stream:
    """Work in order; that of the `computing` stream is done at once, on its own side of memory."""

    computing: "Stream | None" = None
    every: dict[int, "Stream"] = {}

    def __init__(self, non_blocking: bool = False, ptr: int | None = None) -> None:
        assert non_blocking or ptr == 0, "a stream that waits for the default stream"
        self.queue, self.finished, self.ready = [], 0, False
        self.ptr = id(self) if ptr is None else ptr
        self.every[self.ptr] = self

    def use(self) -> "Stream":
        Stream.computing = self
        return self

    def record(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.stream, event.place = self, self.finished + len(self.queue)
        event.time = time.perf_counter()
        return event

    def wait_event(self, event: Event) -> None:
        if self is Stream.computing:
            event.synchronize()
        elif event.stream is Stream.computing:
            flush()
        if event.stream in Graph.streams:
            Graph.streams.add(self)

    def begin_capture(self) -> None:
        assert self is Stream.computing
        Graph.begin()
        Graph.streams.add(self)

    def end_capture(self) -> Graph:
        return Graph()

    def is_capturing(self) -> bool:
        return self in Graph.streams

    def synchronize(self) -> None:
        Graph.refuse()
        if self is Stream.computing:
            flush()
        self.finish(self.finished + len(self.queue))

    def finish(self, place: int) -> None:
        while self.finished < place:
            work = self.queue.pop(0)
            self.finished += 1
            work()


def enqueue(pointer: int, work) -> None:
    """Put work on the stream of that pointer, to be done when somebody waits for it."""
    stream = Stream.every[pointer]
    assert stream is not Stream.computing
    stream.queue.append(work)


# --- The module ----------------------------------------------------------------------------

def memcpyAsync(to: int, source: int, nbytes: int, kind: str, stream: int) -> None:
    def copy():
        host = [np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(p))
                if side == "host" else at(p, np.uint8, nbytes)
                for p, side in zip((source, to), kind.split(" to "))]
        host[1][...] = host[0]
    enqueue(stream, copy)


class MemoryPool:
    """Counts; the memory itself is `Memory`'s."""

    asked = 0
    last: "MemoryPool | None" = None    # that was asked

    def malloc(self, size: int) -> int:
        self.asked += 1
        MemoryPool.last = self
        return size

    def used_bytes(self) -> int:
        return sum(memory.computing.nbytes for memory in Memory.alive.values()
                   if memory.pool is self)

    total_bytes = used_bytes

    def free_all_blocks(self) -> None:
        """Nothing is kept."""


class PinnedPool:
    """Keeps what is free for the next that asks for so many bytes."""

    def __init__(self) -> None:
        self.free: list[bytearray] = []

    def malloc(self, size: int) -> bytearray:
        memory = Pinned(1 << (size - 1).bit_length())
        memory.pool = self
        return memory

    def n_free_blocks(self) -> int:
        return len(self.free)

    def free_all_blocks(self) -> None:
        self.free.clear()


class Pinned(bytearray):
    def __del__(self) -> None:
        self.pool.free.append(bytearray(len(self)))


class Device:
    compute_capability = "80"

    def __init__(self, number: int) -> None:
        self.pci_bus_id = f"0000:0{number}:00.0"

    def use(self) -> None:
        """There is no other."""


# Functions of CuPy's that call cuBLAS.
PRODUCTS = ("matmul", "dot", "vdot", "inner", "tensordot", "einsum", "linalg")


class FakeCupy(types.ModuleType):
    """What `import cupy` gives."""

    ndarray = ndarray
    __version__ = "14.2.0"

    def __init__(self, gpus: int = 1) -> None:
        super().__init__("cupy")
        self.runtime = types.SimpleNamespace(
            getDeviceCount=lambda: gpus, memcpyAsync=memcpyAsync,
            getDeviceProperties=lambda n: {"name": b"none", "totalGlobalMem": 1,
                                           "multiProcessorCount": 1},
            runtimeGetVersion=lambda: 13000, driverGetVersion=lambda: 13000,
            memcpyDeviceToHost="device to host", memcpyHostToDevice="host to device")
        self.allocate, self.pinned = None, PinnedPool()
        self.get_default_pinned_memory_pool = lambda: self.pinned
        self.cuda = types.SimpleNamespace(
            runtime=self.runtime, Device=Device, MemoryPool=MemoryPool, Stream=Stream,
            get_current_stream=lambda: Stream.computing or Stream(ptr=0),
            Event=Event, set_allocator=lambda allocate: setattr(self, "allocate", allocate),
            alloc_pinned_memory=lambda size: self.pinned.malloc(size),
            get_elapsed_time=lambda a, b: 1000.0 * (b.time - a.time))

    def __getattr__(self, name: str):
        function = getattr(np, name)
        if isinstance(function, type):    # a dtype
            return function
        if name in PRODUCTS and Graph.captured is not None:
            raise NotImplementedError("CuPy calls cuBLAS while a stream is captured")
        return lambda *arguments, **options: call(function, *arguments, **options)

    def is_available(self) -> bool:
        return True

    def empty(self, shape, dtype=float) -> ndarray:
        self.allocate(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        memory = Memory(int(np.prod(shape)) * np.dtype(dtype).itemsize)
        shell = memory.computing[:int(np.prod(shape)) * np.dtype(dtype).itemsize]
        return ndarray(memory, shell.view(dtype).reshape(shape))

    def zeros(self, shape, dtype=float) -> ndarray:
        a = self.empty(shape, dtype)
        a[...] = 0
        return a

    def asarray(self, a) -> ndarray:
        Graph.refuse()
        return a if isinstance(a, ndarray) else new(np.asarray(a))

    def asnumpy(self, a: ndarray) -> np.ndarray:
        Graph.refuse()
        if not a.flags.c_contiguous:    # as CuPy 14.2 does, after a copy of its own
            Stream(ptr=0).use()
        return unwrapped(a).copy()
