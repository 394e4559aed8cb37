"""Wrap methods so that observers are told of their calls; `mm3d.tracing.observe` attaches them."""

import math
from functools import partial, wraps
from typing import Any, Callable, NamedTuple

import numpy as np

from mm3d.arrays.backend import host_dtype
from mm3d.arrays.blocks import resized_shape, total_length
from mm3d.grid.axis import COLLECTIVES
from mm3d.tracing.events import (ArrayObserver, Collective, Event, Gemm, LayerEvent, Observer,
                                 Overlapped, Phase)
from mm3d.transport.pending import Pending

# Methods of a Split, Vector or Space whose collectives move its operand.
OPERAND_METHODS = {*COLLECTIVES, "begin_reduce_scatter", "begin_broadcast", "begin_reduce",
                   "prefetch", "shift", "gather_features", "reduce_gradient", "sum_features"}

Observers = list[Observer]


class _ObserverGroup(Observer):
    """Join observers: tell them one after another, and of the end in reverse order."""

    def __init__(self, observers: Observers) -> None:
        self.observers = observers

    def enter(self, event: Event, barrier: Callable[[], None] | None = None) -> None:
        for observer in self.observers:
            observer.enter(event, barrier)

    def leave(self) -> None:
        for observer in reversed(self.observers):
            observer.leave()

    def see_layer(self, call: str, x: Any, result: Any) -> None:
        for observer in self.observers:
            observer.see_layer(call, x, result)

    def see_pass(self, call: str, result: Any) -> None:
        for observer in self.observers:
            observer.see_pass(call, result)


def join_observers(observers: Observers, kind: type) -> Observer | None:
    """Join the observers of a kind of events to one observer; None if there are none."""
    found = [observer for observer in observers if kind in observer.kinds]
    return found[0] if len(found) == 1 else _ObserverGroup(found) if found else None


def _array_observers(observers: Observers, kind: type) -> list[ArrayObserver]:
    """Select the observers that are given the arrays of a kind of events."""
    return [observer for observer in observers
            if isinstance(observer, ArrayObserver) and kind in observer.kinds]


def report_calls(work: Callable, event: Event, observer: Observer) -> Callable:
    """Wrap `work` so that `observer` is told of its calls as `event`."""
    @wraps(work)
    def reported(*arrays: Any) -> Any:
        observer.enter(event)
        try:
            result = work(*arrays)
            if isinstance(event, LayerEvent):
                observer.see_layer(work.__name__, arrays[0], result)
            elif isinstance(event, Phase):
                observer.see_pass(work.__name__, result)
            return result
        finally:
            observer.leave()
    return reported


class _SavedWithNotes(NamedTuple):
    """Hold what a layer saved for backward, and its observers' notes on that forward."""

    saved: Any
    notes: list


def _report_forward(layer: Any, event: Event, work: Callable, observers: Observers,
                    recomputes: bool = False) -> Callable:
    """Wrap `forward` of a layer, or `recompute_saved`, which computes all but the output.

    Observers of arrays are given its input, and its output where there is one.
    """
    reported = report_calls(work, event, join_observers(observers, LayerEvent))
    seeing = _array_observers(observers, LayerEvent)

    def forward(x: Any, within: Any = None) -> Any:
        y, saved = reported(x, within)
        return y, _SavedWithNotes(saved, [one.forward(layer, x, y) for one in seeing])

    def again(x: Any, within: Any = None) -> Any:
        saved = reported(x, within)
        return _SavedWithNotes(saved, [one.again(layer, x) for one in seeing])
    return reported if not seeing else again if recomputes else forward


def _report_backward(layer: Any, event: Event, work: Callable, observers: Observers) -> Callable:
    """Wrap `backward` of a layer; observers of arrays are given dy, dx and their notes.

    They are given no arrays of the halves of backward.
    """
    reported = report_calls(work, event, join_observers(observers, LayerEvent))
    seeing = _array_observers(observers, LayerEvent)

    def backward(dy: Any, noted: Any, within: Any = None) -> Any:
        if not isinstance(noted, _SavedWithNotes):    # its forward was not observed
            return reported(dy, noted, within)
        dx = reported(dy, noted.saved, within)
        if within is not None and within.later is not None:    # gradients of weights are not there
            return dx
        if within is not None:
            within.finish_gradients()    # observers read them
        for observer, note in zip(seeing, noted.notes, strict=True):
            observer.backward(layer, dy, dx, note)
        return dx
    return backward if seeing else reported


def _report_second_half(layer: Any, event: Event, work: Callable,
                        observers: Observers) -> Callable:
    return report_calls(work, event, join_observers(observers, LayerEvent))


LAYER_CALLS = {"forward": _report_forward, "backward": _report_backward,
               "backward_weights": _report_second_half,
               "recompute_saved": partial(_report_forward, recomputes=True)}


def report_products(busy: list, multiply: Callable, observers: Observers) -> Callable:
    """Wrap `multiply`, a product of matrices or of stacks of them.

    Products that it calls itself, while `busy` is not empty, are part of it and not reported.
    """
    observer, seeing = join_observers(observers, Gemm), _array_observers(observers, Gemm)

    @wraps(multiply)
    def reported(a: Any, b: Any, *out: Any, **options: Any) -> Any:
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
            one.see_result(event, (a, b), result)
        return result
    return reported


class ObservedLibrary:
    """Wrap an array library so that its `matmul` is reported to observers."""

    def __init__(self, busy: list, library: Any, observers: Observers) -> None:
        self._library, self.matmul = library, report_products(busy, library.matmul, observers)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        setattr(self, name, found)
        return found


class ObservedTransport:
    """Wrap the transport of `axis` so that its collectives are reported to observers."""

    def __init__(self, axis: Any, stride: int, transport: Any, observers: Observers) -> None:
        self._axis, self._stride, self._transport = axis, stride, transport
        self._observers = observers
        for kind in COLLECTIVES:
            setattr(self, kind, self._report_collective(kind, getattr(transport, kind)))
        for kind in ("reduce_scatter", "all_gather", "broadcast", "reduce"):
            begin = self._report_overlapped(kind, getattr(transport, f"begin_{kind}"))
            setattr(self, f"begin_{kind}", self._report_collective(kind, begin))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _report_collective(self, kind: str, move: Callable) -> Callable:
        """Wrap `move`, a collective of that kind or the begin of one."""
        axis, observer = self._axis, join_observers(self._observers, Collective)
        if observer is None:
            return move
        without_sizes = Collective(kind, axis.name, axis.size, self._stride, 0)
        barrier = self._transport.barrier
        sizes = any(one.sizes for one in self._observers if Collective in one.kinds)

        def reported(a: Any, *where: Any) -> Any:
            event = without_sizes
            if sizes:
                shape = a.shape
                if kind == "all_gather":
                    shape = resized_shape(shape, where[0], total_length(where[1]))
                event = event._replace(
                    bytes=math.prod(shape) * host_dtype(a).itemsize,
                    pieces=len(where) > 1 and math.prod(shape[:where[0] % len(shape)]) > 1)
            observer.enter(event, barrier)
            try:
                return move(a, *where)
            finally:
                observer.leave()
        return reported

    def _report_overlapped(self, kind: str, begin: Callable) -> Callable:
        """Wrap `begin` of a nonblocking collective, and the methods of the Pending it returns."""
        observer = join_observers(self._observers, Overlapped)
        if observer is None:
            return begin
        seeing = _array_observers(self._observers, Overlapped)
        events = {call: Overlapped(call, kind, self._axis.name)
                  for call in ("begin", "progress", "wait")}
        reported = report_calls(begin, events["begin"], observer)

        def begun(a: Any, *where: Any) -> Pending:
            pending = reported(a, *where)
            for call in ("progress", "wait"):
                setattr(pending, call, report_calls(getattr(pending, call), events[call],
                                                    observer))
            for one in seeing:
                one.see_result(events["begin"], (a,), pending)
            return pending
        return begun


class NamedOperand:
    """Wrap a Split, Vector or Space so that observers know the operand that it moves.

    Its name, such as "A", is their `operand` during the calls of collectives.
    """

    def __init__(self, target: Any, operand: str, observers: Observers) -> None:
        self._target, self._operand, self._observers = target, operand, observers

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if name == "of_panel":
            return lambda panels: NamedOperand(found(panels), self._operand, self._observers)
        if name not in OPERAND_METHODS:
            return found

        def named(*arguments: Any) -> Any:
            before = self._observers[0].operand
            for observer in self._observers:
                observer.operand = self._operand
            try:
                return found(*arguments)
            finally:
                for observer in self._observers:
                    observer.operand = before
        return named
