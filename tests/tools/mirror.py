"""Communication of many ranks in one process: each of the others does as this one does.

A `Mirror` stands in for the communicator of a line of ranks.  Its blocking collectives give what
MPI's would if all ranks brought the same array.  Those that do not block are as late as MPI's may
be: they read and write nothing before they are waited for, and until then the result is NaN.
"""
from contextlib import contextmanager
from typing import Iterator

import numpy as np

import mm3d
from mm3d.tracing.events import Gemm, LayerEvent, Observer
from mm3d.tracing.observe import observed
from mm3d.transport.mpi import MpiTransport
from mm3d.transport.communicators import DryCommunicator


class Request:
    """A collective that is in flight until it is waited for."""

    def __init__(self, mirror: "Mirror", kind: str, complete) -> None:
        self.mirror, self.name, self.complete = mirror, f"{kind} along {mirror.name}", complete
        mirror.in_flight.append(self)

    def Test(self) -> bool:
        assert self in self.mirror.in_flight
        self.mirror.tests += 1
        return False

    def Wait(self) -> None:
        self.mirror.in_flight.remove(self)
        self.complete()


class Mirror(DryCommunicator):
    """A communicator of `size` ranks that all do as this one does.

    `in_flight`, which several of them can have in common, are the requests to be waited for.
    """

    def __init__(self, name: str, size: int, in_flight: list) -> None:
        super().__init__(size)
        self.name, self.in_flight, self.tests = name, in_flight, 0

    def Allgather(self, send, recv) -> None:
        for block in recv.reshape(self.size, -1):
            block[...] = send.reshape(-1)

    def Reduce_scatter_block(self, send, recv) -> None:
        recv[...] = send.reshape(self.size, -1)[0].reshape(recv.shape) * self.size

    def Allreduce(self, send, recv) -> None:
        recv[...] = send * self.size

    def Bcast(self, buffer, root) -> None:
        """All have the same."""

    def Reduce(self, send, recv, root) -> None:
        if recv is not None:
            recv[...] = send * self.size

    def Ibcast(self, buffer, root) -> Request:
        """Of other ranks come zeros."""
        def arrive() -> None:
            if root != self.rank:
                buffer[...] = 0
        return Request(self, "broadcast", arrive)

    def Ireduce(self, send, recv, root) -> Request:
        if recv is not None:
            recv[...] = np.nan
        return Request(self, "sum", lambda: self.Reduce(send, recv, root))

    def Iallgatherv(self, send, recv) -> Request:
        flat, _ = recv
        flat[...] = np.nan
        return Request(self, "gather", lambda: self.Allgather(send, flat))

    def Ireduce_scatter(self, send, recv, lengths) -> Request:
        recv[...] = np.nan
        return Request(self, "sum", lambda: self.Reduce_scatter_block(send, recv))


@contextmanager
def mirrored(name: str, grid: tuple[int, ...], **options) -> Iterator[tuple]:
    """A scheme on NumPy and such ranks, and the requests that are in flight on it."""
    scheme = mm3d.scheme(name, DryCommunicator(int(np.prod(grid))), grid, "numpy", **options)
    in_flight: list[Request] = []
    for axis in scheme.grid.axes.values():
        axis.transport = MpiTransport(Mirror(axis.name, axis.size, in_flight), axis.backend)
    yield scheme, in_flight
    assert not in_flight


class InFlight(Observer):
    """Notes what is in flight during each product with a weight, and of which layer that is."""

    def __init__(self, in_flight: list) -> None:
        self.in_flight, self.layers = in_flight, [""]
        self.found: list[tuple[str, list[str]]] = []

    def enter(self, event, barrier=None) -> None:
        self.layers.append(event.part if isinstance(event, LayerEvent) else self.layers[-1])
        if isinstance(event, Gemm) and event.batch == 1:
            self.found.append((self.layers[-1], sorted(one.name for one in self.in_flight)))

    def leave(self) -> None:
        self.layers.pop()


def during_products(grid: tuple[int, ...], way: str, overlap: int = 1,
                    **options) -> list[tuple[str, list[str]]]:
    """What is in flight during each product of a forward or backward pass with overlap, or of a
    half of backward."""
    with mirrored("3d", grid, overlap=overlap, **options) as (scheme, in_flight):
        model = mm3d.Transformer(scheme, layers=1, hidden=16, heads=4, batch=8, seq=4)
        observer = InFlight(in_flight)
        x, dy = model.random("x"), model.random("dy")
        with observed(scheme.grid, observer, model):
            _, saved = model.forward(x)
            if way == "backward":
                observer.found.clear()
                model.backward(dy, saved)
            elif way != "forward":
                observer.found.clear()
                _, operands = model.backward_input(dy, saved)
                if way == "backward_weights":
                    observer.found.clear()
                    model.backward_weights(operands)
    return observer.found
