"""Calls that tell observers of what they do: the wrappers that `mm3d.tracing.observe` puts in
place."""

import math
from functools import wraps
from typing import Any, Callable, NamedTuple

import numpy as np

from mm3d.arrays.backend import host_dtype
from mm3d.arrays.blocks import resized
from mm3d.grid.axis import COLLECTIVES
from mm3d.tracing.events import ArrayObserver, Collective, Event, Gemm, Layer, Observer, Overlapped
from mm3d.transport.pending import Pending

# Methods of what communicates whose collectives move the operand that it is for.
TRAVELS = {*COLLECTIVES, "begin_reduce_scatter", "prefetch", "gather_features",
           "reduce_gradient", "sum_features"}

Observers = list[Observer]


class Several(Observer):
    """Observers that are told one after another."""

    def __init__(self, observers: Observers) -> None:
        self.observers = observers

    @property
    def operand(self) -> str:
        """The name of the operand, the same for all."""
        return self.observers[0].operand

    @operand.setter
    def operand(self, name: str) -> None:
        for observer in self.observers:
            observer.operand = name

    def enter(self, event: Event, barrier: Callable[[], None] | None = None) -> None:
        for observer in self.observers:
            observer.enter(event, barrier)

    def leave(self) -> None:
        for observer in reversed(self.observers):
            observer.leave()


def join_observers(observers: Observers, kind: type) -> Observer | None:
    """Those of the observers that are told of a kind of events, as one; None if there are none."""
    found = [observer for observer in observers if kind in observer.kinds]
    return found[0] if len(found) == 1 else Several(found) if found else None


def seeing_arrays(observers: Observers, kind: type) -> list[ArrayObserver]:
    """Those of the observers that see the arrays of a kind of events."""
    return [observer for observer in observers
            if isinstance(observer, ArrayObserver) and kind in observer.kinds]


def report_calls(work: Callable, event: Event, observer: Observer) -> Callable:
    """`work`, with its calls told as `event`."""
    @wraps(work)
    def told(*arrays: Any) -> Any:
        observer.enter(event)
        try:
            return work(*arrays)
        finally:
            observer.leave()
    return told


class Noted(NamedTuple):
    """What a layer saved, and what its observers noted of the forward that saved it."""

    saved: Any
    notes: list


def forward_of(layer: Any, event: Event, work: Callable, observers: Observers) -> Callable:
    """The forward of a layer, told and shown."""
    told = report_calls(work, event, join_observers(observers, Layer))
    seeing = seeing_arrays(observers, Layer)

    def forward(x: Any, overlap: Any = None) -> tuple[Any, Any]:
        y, saved = told(x, overlap)
        return y, Noted(saved, [observer.forward(layer, x, y) for observer in seeing])
    return forward if seeing else told


def recomputed_of(layer: Any, event: Event, work: Callable, observers: Observers) -> Callable:
    """What a layer saves, without its output: told and shown."""
    told = report_calls(work, event, join_observers(observers, Layer))
    seeing = seeing_arrays(observers, Layer)

    def again(x: Any, overlap: Any = None) -> Any:
        return Noted(told(x, overlap), [observer.again(layer, x) for observer in seeing])
    return again if seeing else told


def backward_of(layer: Any, event: Event, work: Callable, observers: Observers) -> Callable:
    """The backward of a layer, told and shown."""
    told = report_calls(work, event, join_observers(observers, Layer))
    seeing = seeing_arrays(observers, Layer)

    def backward(dy: Any, noted: Any, overlap: Any = None) -> Any:
        if not isinstance(noted, Noted):    # of a forward before there was an observer
            return told(dy, noted, overlap)
        dx = told(dy, noted.saved, overlap)
        if overlap is not None:
            overlap.finish_gradients()    # which the observers see
        for observer, note in zip(seeing, noted.notes, strict=True):
            observer.backward(layer, dy, dx, note)
        return dx
    return backward if seeing else told


LAYER_CALLS = {"forward": forward_of, "backward": backward_of, "recompute_saved": recomputed_of}


def report_products(busy: list, multiply: Callable, observers: Observers) -> Callable:
    """`multiply` of matrices or stacks of them, with its calls told.

    What it calls itself while `busy` is part of it and not told again.
    """
    observer, seeing = join_observers(observers, Gemm), seeing_arrays(observers, Gemm)

    @wraps(multiply)
    def told(a: Any, b: Any, *out: Any, **options: Any) -> Any:
        if busy:
            return multiply(a, b, *out, **options)
        batch = math.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
        event = Gemm(batch, *a.shape[-2:], b.shape[-1], str(host_dtype(a)))
        observer.enter(event)
        busy.append(multiply)
        try:
            result = multiply(a, b, *out, **options)
        finally:
            busy.pop()
            observer.leave()
        for one in seeing:
            one.seen(event, (a, b), result)
        return result
    return told


class Library:
    """An array library whose `matmul` is told of."""

    def __init__(self, busy: list, library: Any, observers: Observers) -> None:
        self._library, self.matmul = library, report_products(busy, library.matmul, observers)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        setattr(self, name, found)
        return found


class Transport:
    """The transport of `axis`, with its collectives told."""

    def __init__(self, axis: Any, stride: int, transport: Any, observers: Observers) -> None:
        self._axis, self._stride, self._transport = axis, stride, transport
        self._observers = observers
        for kind in COLLECTIVES:
            setattr(self, kind, self._told(kind, getattr(transport, kind)))
        self.begin_reduce_scatter = self._told(
            "reduce_scatter", self._overlapped("reduce_scatter", transport.begin_reduce_scatter))
        self.begin_all_gather = self._told(
            "all_gather", self._overlapped("all_gather", transport.begin_all_gather))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _told(self, kind: str, move: Callable) -> Callable:
        """`move`, told as a collective."""
        axis, observer = self._axis, join_observers(self._observers, Collective)
        if observer is None:
            return move
        plain = Collective(kind, axis.name, axis.size, self._stride, 0)
        barrier = self._transport.barrier

        def named(a: Any, *where: Any) -> Any:
            observer.enter(plain, barrier)
            try:
                return move(a, *where)
            finally:
                observer.leave()

        def told(a: Any, *where: Any) -> Any:
            shape = resized(a.shape, where[0], sum(where[1])) if kind == "all_gather" else a.shape
            size = math.prod(shape) * host_dtype(a).itemsize
            pieces = len(where) == 2 and math.prod(shape[:where[0] % len(shape)]) > 1
            event = Collective(kind, axis.name, axis.size, self._stride, size, pieces)
            observer.enter(event, barrier)
            try:
                return move(a, *where)
            finally:
                observer.leave()
        sizes = any(one.sizes for one in self._observers if Collective in one.kinds)
        return told if sizes else named

    def _overlapped(self, kind: str, begin: Callable) -> Callable:
        """`begin` of a collective that goes on, told with the calls for what it returns."""
        observer = join_observers(self._observers, Overlapped)
        if observer is None:
            return begin
        seeing = seeing_arrays(self._observers, Overlapped)
        calls = {call: Overlapped(call, kind, self._axis.name)
                 for call in ("begin", "progress", "wait")}
        told = report_calls(begin, calls["begin"], observer)

        def begun(a: Any, *where: Any) -> Pending:
            pending = told(a, *where)
            for call in ("progress", "wait"):
                setattr(pending, call, report_calls(getattr(pending, call), calls[call], observer))
            for one in seeing:
                one.seen(calls["begin"], (a,), pending)
            return pending
        return begun


class NamedOperand:
    """Something that communicates, which tells the observer the name of what travels.

    Parameters
    ----------
    target : Split, Vector or Space
        What communicates.
    operand : str
        Such as "A".
    observer : Observer
        Whose `operand` is set meanwhile.
    """

    def __init__(self, target: Any, operand: str, observer: Observer) -> None:
        self._target, self._operand, self._observer = target, operand, observer

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name not in TRAVELS:
            return found

        def told(*arguments: Any) -> Any:
            before, self._observer.operand = self._observer.operand, self._operand
            try:
                return found(*arguments)
            finally:
                self._observer.operand = before
        return told
