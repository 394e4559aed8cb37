"""Wait for the work of each rank instead of computing it, while collectives move real bytes.

The unchanged model runs on arrays without contents (`mm3d.tracing.dry_arrays`).  Each product and
elementwise operation adds its modelled seconds to a queue, which runs on while the host works, as
on a device.  Before a collective, and where the host waits for the device, the rank sleeps until
the queue is empty and its core is free for other ranks.  A collective then moves arrays of the
right sizes by the transport of the grid.  Thus many ranks work at the same time, however few cores
they share.
"""

import math
import time
from contextlib import contextmanager
from typing import Any, Callable, Iterator, Sequence

import numpy as np

from mm3d.arrays import backend as backends
from mm3d.arrays.backend import Array, Progress, host_dtype
from mm3d.grid.grid import GridAxes
from mm3d.tracing.dry_arrays import DryArray, DryBackend, DryNamespace
from mm3d.tracing.events import Gemm, MemoryPass
from mm3d.transport.mpi import MpiTransport
from mm3d.transport.pending import Pending

WorkSeconds = Callable[[Gemm | MemoryPass], float]
OVERLAPPED_SLEEPS = 8    # parts of a wait for work while a collective goes on
SHORTEST_SLEEP = 1e-3    # seconds of a part of elementwise work, at least


class WorkClock:
    """Queue the modelled seconds of work, as on a device, and sleep for what is left of them.

    The queue runs on while the host works.  A sleep lasts longer than asked for; the excess
    shortens the next ones, so that over many sleeps the queue takes the seconds modelled.

    Attributes
    ----------
    counted : float
        Seconds of the work so far by the model, at its pace.
    slept, overlapped : float
        Seconds of it that this rank slept, and that passed while the host worked.
    times : int
        Number of equal events that each event counted from now on stands for.
    between_sleeps : callable or None
        Called now and then while the clock sleeps.
    pace : float
        Seconds that events take from now on over those of the model; 0 to wait for nothing.
    """

    def __init__(self, seconds: WorkSeconds, now: Callable[[], float] = time.perf_counter,
                 sleep: Callable[[float], None] = time.sleep) -> None:
        self._seconds, self._known = seconds, {}
        self._now, self._pause = now, sleep
        self.times, self.pace = 1, 1.0
        self.between_sleeps: Progress = None
        self.reset()

    def count_event(self, event: Gemm | MemoryPass) -> None:
        """Add the seconds of an event, which occurs `times` times, to the queue."""
        seconds = self._known.get(event)
        if seconds is None:
            seconds = self._known[event] = self._seconds(event)
        self._run_on()
        self.counted += self.times * self.pace * seconds
        self._left += self.times * self.pace * seconds

    def settle(self) -> None:
        """Sleep until the queue is empty."""
        self._run_on()
        if self.between_sleeps is not None:
            parts = min(OVERLAPPED_SLEEPS, math.ceil(self._left / SHORTEST_SLEEP))
            self.settle_in_parts(self.between_sleeps, parts)
        else:
            self._sleep_until(0)

    def settle_in_parts(self, progress: Callable[[], None],
                        parts: int = OVERLAPPED_SLEEPS) -> None:
        """Sleep until the queue is empty, in parts, and call `progress` after each of them."""
        self._run_on()
        whole = self._left
        for left in range(parts - 1, -1, -1):
            self._sleep_until(whole * left / parts)
            progress()

    def _run_on(self) -> None:
        """Take from the queue the time that has passed since it was last looked at."""
        now = self._now()
        passed = min(self._left, now - self._seen)
        self._left -= passed
        self.overlapped += passed
        self._seen = now

    def _sleep_until(self, left: float) -> None:
        """Sleep until `left` seconds are queued, shorter by the excess of earlier sleeps."""
        self._run_on()
        wanted = self._left - left
        if wanted <= 0:
            return
        spent = 0.0
        if wanted > self._late:
            self._pause(wanted - self._late)
            now = self._now()
            spent, self._seen = now - self._seen, now
        self._late += spent - wanted
        self.slept += spent
        self._left = left

    def reset(self) -> None:
        """Empty the queue, and forget all sums."""
        self.counted = self.slept = self.overlapped = 0.0
        self._left = self._late = 0.0    # in the queue; slept too long, and not yet caught up
        self._seen = self._now()


class _WaitingNamespace(DryNamespace):
    """The functions of the array library; ranks wait for products of stacks of matrices."""

    def matmul(self, a: DryArray, b: DryArray, out: DryArray | None = None) -> DryArray:
        batch = math.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
        self._backend.trace.count_event(_product(batch, a, b))
        return super().matmul(a, b, out)


class WaitingBackend(DryBackend):
    """The backend of arrays without contents whose work is waited for, by the clock `trace`.

    Elementwise work handles `block` elements at a time, see `mm3d.tracing.dry_run.trace_step`.
    """

    name = "waiting"

    def __init__(self, seconds: WorkSeconds, block: int) -> None:
        super().__init__()
        self.kernels.calling = None    # calls of functions take no time beside their work
        self.reset(block)
        self.xp = _WaitingNamespace(self)
        self.trace = WorkClock(seconds)

    @property
    def between_blocks(self) -> None:
        """None, as blocks take no time; set, it is called while the clock sleeps."""

    @between_blocks.setter
    def between_blocks(self, progress: Progress) -> None:
        self.trace.between_sleeps = progress

    def _record_memory(self) -> None:
        """Record nothing: a measurement takes many steps."""

    def gemm(self, a: DryArray, b: DryArray, out: DryArray,
             progress: Callable[[], None] | None = None) -> DryArray:
        self.trace.count_event(_product(1, a, b))
        if progress is not None:
            self.trace.settle_in_parts(progress)
        return out

    def mpi_buffer(self, a: DryArray) -> np.ndarray:
        """Allocate memory for the bytes of a message; MPI's request keeps it."""
        return np.empty(a.nbytes, np.uint8)

    def synchronize(self) -> None:
        """Wait until all work so far is done."""
        self.trace.settle()


def _product(batch: int, a: DryArray, b: DryArray) -> Gemm:
    """Return the event of a product."""
    return Gemm(batch, *a.shape[-2:], b.shape[-1], str(host_dtype(a)))


class _WaitedRequest:
    """A request of MPI that waits for the rank's own work, then for the collective `pending`."""

    def __init__(self, pending: Pending, clock: WorkClock) -> None:
        self._pending, self._clock = pending, clock

    def Test(self) -> None:
        """Let MPI make progress."""
        if self._pending.request is not None:
            self._pending.progress()

    def Wait(self) -> None:
        """Wait for the work, then for the collective."""
        self._clock.settle()
        with np.errstate(all="ignore"):    # sums of undefined numbers
            self._pending.take()


class WaitingTransport(MpiTransport):
    """Wait for the work before each collective, then move arrays of its size.

    Where the carrier cannot begin one, it is complete at once.  Packing and unpacking of columns
    is counted as work, as in a dry run.
    """

    def __init__(self, carrier: MpiTransport, backend: WaitingBackend) -> None:
        super().__init__(carrier.comm, backend)
        self.carrier, self._clock = carrier, backend.trace
        self.name, self.nonblocking = carrier.name, carrier.nonblocking
        self.on_host = carrier.on_host
        self.nonblocking_rooted = carrier.nonblocking_rooted

    def take_moved(self) -> float:
        return self.carrier.take_moved()

    def barrier(self) -> None:
        self._clock.settle()
        self.carrier.barrier()

    def free(self) -> None:
        """Free nothing: the carrier does it."""

    def begin_all_gather(self, a: Array, dim: int, counts: list[int]) -> Pending:
        if not self.nonblocking:
            return Pending(self.all_gather(a, dim, counts))
        a, flat, lengths, out = self._whole(a, dim, counts)
        moving = self._carry(self.carrier.begin_all_gather, self._block(out, lengths), 0, lengths)
        return Pending(out, lambda: self._unpacked(flat, out, dim, counts),
                       _WaitedRequest(moving, self._clock), (a,))

    def begin_reduce_scatter(self, a: Array, dim: int, counts: list[int]) -> Pending:
        if not self.nonblocking:
            return Pending(self.reduce_scatter(a, dim, counts))
        flat, lengths, out = self._terms(a, dim, counts)
        moving = self._carry(self.carrier.begin_reduce_scatter, self._term(flat), 0, lengths)
        return Pending(out, None, _WaitedRequest(moving, self._clock), (flat,))

    def begin_broadcast(self, a: Array, root: int) -> Pending:
        if not self.nonblocking_rooted:
            return Pending(self.broadcast(a, root))
        a = self.backend.contiguous(a)
        moving = self._carry(self.carrier.begin_broadcast, self._buffer(a), root)
        return Pending(a, request=_WaitedRequest(moving, self._clock))

    def begin_reduce(self, a: Array, root: int) -> Pending:
        if not self.nonblocking_rooted:
            return Pending(self.reduce(a, root))
        out = self.backend.empty(a.shape, a.dtype) if self.rank == root else None
        moving = self._carry(self.carrier.begin_reduce,
                             self.carrier.reduce_term((a.size,), a.dtype), root)
        return Pending(out, None, _WaitedRequest(moving, self._clock),
                       (self.backend.contiguous(a),))

    def _pieces(self, flat: Array, a: Array, dim: int,
                counts: list[int]) -> Iterator[tuple[Array, Array]]:
        """Return all pieces as one, as a dry run does: they have no contents."""
        yield self.backend.xp.reshape(flat, a.shape), a

    def _all_gather(self, send: Array, recv: Array, lengths: list[int]) -> None:
        self._carry(self.carrier.all_gather, self._block(recv, lengths), 0, lengths)

    def _reduce_scatter(self, send: Array, recv: Array, lengths: list[int]) -> None:
        self._carry(self.carrier.reduce_scatter, self._term(send), 0, lengths)

    def _all_reduce(self, send: Array, recv: Array) -> None:
        self._carry(self.carrier.all_reduce, self._buffer(send))

    def _broadcast(self, buffer: Array, root: int) -> None:
        self._carry(self.carrier.broadcast, self._buffer(buffer), root)

    def _reduce(self, send: Array, recv: Array | None, root: int) -> None:
        self._carry(self.carrier.reduce, self.carrier.reduce_term((send.size,), send.dtype), root)

    def _exchange(self, send: Array, recv: Array, sends: list[int], receives: list[int]) -> None:
        self._carry(self.carrier.all_to_all, self._buffer(send), 0, sends, receives)

    def _carry(self, collective: Callable[..., Any], *arguments: Any) -> Any:
        """Wait for the work, then call a collective of the carrier."""
        self._clock.settle()
        with np.errstate(all="ignore"):    # sums of undefined numbers
            return collective(*arguments)

    def _block(self, a: Array, lengths: list[int]) -> np.ndarray:
        """Allocate this rank's block of a flat array like `a`."""
        return self.carrier.block((lengths[self.rank],), a.dtype, 0, lengths)

    def _term(self, a: Array) -> np.ndarray:
        """Allocate this rank's term of a flat sum like `a`."""
        return self.carrier.term((a.size,), a.dtype)

    def _buffer(self, a: Array) -> np.ndarray:
        """Allocate a flat array like `a`."""
        return self.carrier.backend.empty((a.size,), a.dtype)


@contextmanager
def waited_work(grids: Sequence[GridAxes], seconds: WorkSeconds,
                block: int) -> Iterator[WaitingBackend]:
    """Let models built on `grids` within the block wait for their work instead of computing it.

    The grids are of arrays in host memory, and their transports move the bytes; `WaitingBackend`
    is theirs within the block.
    """
    own, backend = grids[0].backend, backends.get(WaitingBackend(seconds, block))
    axes = [axis for grid in grids for axis in grid.axes.values()]
    carriers = [axis.transport for axis in axes]

    def use(library: Any, transports: Sequence[MpiTransport]) -> None:
        for grid in grids:
            grid.backend = library
        for axis, transport in zip(axes, transports):
            axis.backend, axis.transport = library, transport
    use(backend, [WaitingTransport(carrier, backend) for carrier in carriers])
    try:
        yield backend
    finally:
        use(own, carriers)
