"""Observing a step: one hook for every product, collective and layer of a model.

`observed` stands in front of a grid's backend and transports, and of a model's layers, and tells
an `Observer` of each call, for as long as a ``with`` block lasts.  The code that computes knows
nothing of it and pays nothing for it outside the block.  A dry run's `mm3d.trace.Trace` observes
to count, `mm3d.spans.Recorder` to measure.
"""

import math
from contextlib import contextmanager
from functools import wraps
from typing import Any, Callable, Iterator

import numpy as np

from mm3d.trace import Collective, Event, Gemm, Layer, Observer, Recomputation
from mm3d.transport import host_dtype, resized

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "broadcast", "reduce")

# Methods of a backend that multiply matrices, and stacks of them where it has its own for these.
PRODUCTS = ("gemm", "gemms")

# What travels for each attribute of a layer that communicates; of a product it says so itself.
OPERANDS = {"vector": "b", "split": "KV", "space": "row sums"}
TRAVELS = {*COLLECTIVES, "begin_reduce_scatter", "prefetch", "fetch", "collect", "sum_features"}


@contextmanager
def observed(grid: Any, observer: Observer, model: Any = None) -> Iterator[None]:
    """Tell `observer` what happens on `grid` meanwhile, and in the layers of `model`.

    Parameters
    ----------
    grid : Grid
        Of whose backend the products, and of whose axes the collectives are observed.
    observer : Observer
        Who is told.
    model : Transformer, optional
        Whose layers are told of too, and name the operands that travel.
    """
    backend, busy = grid.backend, []
    undo = []
    if observer.everything:
        undo += [_replace(backend, name, _product(getattr(backend, name), observer, busy))
                 for name in PRODUCTS if hasattr(backend, name)]
        undo.append(_replace(backend, "xp", _Library(backend.xp, observer, busy)))
    for name, axis in grid.axes.items():
        if axis.size > 1:
            transport = _Transport(axis, grid.shape.stride(name), observer)
            undo.append(_replace(axis, "transport", transport))
    if model is not None:
        _observe_within(model.layers, observer, undo)
    try:
        yield
    finally:
        for restore in reversed(undo):
            restore()


def _observe_within(chain: Any, observer: Observer, undo: list[Callable]) -> None:
    """Have the layers of `chain`, and of the chains in it, tell the observer."""
    watched = []
    for layer in chain.layers:
        if hasattr(layer, "recompute"):    # tells only when it is computed again
            again = Recomputation(f"{_name(layer)} again")
            undo.append(_replace(layer, "recompute", _told(layer.recompute, again, observer)))
            _observe_within(layer, observer, undo)
            watched.append(layer)
        elif hasattr(layer, "layers"):
            watched.append(_Observed(layer, _layer(layer), observer))
            _observe_within(layer, observer, undo)
        else:
            watched.append(_Observed(_named_operands(layer, observer, undo),
                                     _layer(layer), observer))
    undo.append(_replace(chain, "layers", tuple(watched)))


def _told(work: Callable, event: Event, observer: Observer) -> Callable:
    """`work`, with its calls told as `event`."""
    @wraps(work)
    def told(*arrays: Any) -> Any:
        observer.enter(event)
        try:
            return work(*arrays)
        finally:
            observer.leave()
    return told


def _replace(owner: Any, name: str, value: Any) -> Callable[[], None]:
    """Put `value` in the place of an attribute; what puts back what was there."""
    had, before = name in vars(owner), getattr(owner, name)
    setattr(owner, name, value)

    def restore() -> None:
        if had:
            setattr(owner, name, before)
        else:
            delattr(owner, name)
    return restore


def _product(multiply: Callable, observer: Observer, busy: list) -> Callable:
    """`multiply` of matrices or stacks of them, with its calls told.

    What it calls itself while `busy` is part of it and not told again.
    """
    @wraps(multiply)
    def told(a: Any, b: Any, *out: Any, **options: Any) -> Any:
        if busy:
            return multiply(a, b, *out, **options)
        batch = math.prod(np.broadcast_shapes(a.shape[:-2], b.shape[:-2]))
        observer.enter(Gemm(batch, *a.shape[-2:], b.shape[-1], str(host_dtype(a))))
        busy.append(multiply)
        try:
            return multiply(a, b, *out, **options)
        finally:
            busy.pop()
            observer.leave()
    return told


class _Library:
    """An array library whose `matmul` is told of."""

    def __init__(self, library: Any, observer: Observer, busy: list) -> None:
        self._library, self.matmul = library, _product(library.matmul, observer, busy)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._library, name)
        setattr(self, name, found)
        return found


class _Transport:
    """The transport of `axis`, with its collectives told."""

    def __init__(self, axis: Any, stride: int, observer: Observer) -> None:
        self._axis, self._stride, self._observer = axis, stride, observer
        self._transport = axis.transport
        for kind in COLLECTIVES:
            setattr(self, kind, self._told(kind, getattr(axis.transport, kind)))
        self.begin_reduce_scatter = self._told("reduce_scatter",
                                               axis.transport.begin_reduce_scatter)
        self.begin_all_gather = self._told("all_gather", axis.transport.begin_all_gather)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def _told(self, kind: str, move: Callable) -> Callable:
        axis = self._axis
        plain = Collective(kind, axis.name, axis.size, self._stride, 0)

        def named(a: Any, *where: Any) -> Any:
            self._observer.enter(plain, self._transport.meet)
            try:
                return move(a, *where)
            finally:
                self._observer.leave()

        def told(a: Any, *where: Any) -> Any:
            shape = resized(a.shape, where[0], sum(where[1])) if kind == "all_gather" else a.shape
            size = math.prod(shape) * host_dtype(a).itemsize
            pieces = len(where) == 2 and math.prod(shape[:where[0] % len(shape)]) > 1
            event = Collective(kind, axis.name, axis.size, self._stride, size, pieces)
            self._observer.enter(event, self._transport.meet)
            try:
                return move(a, *where)
            finally:
                self._observer.leave()
        return told if self._observer.everything else named


class _Observed:
    """A layer that tells when it works."""

    def __init__(self, layer: Any, event: Layer, observer: Observer) -> None:
        for name in ("forward", "backward", "again"):
            if hasattr(layer, name):
                setattr(self, name, _told(getattr(layer, name), event, observer))


class Named:
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


def _named_operands(layer: Any, observer: Observer, undo: list[Callable]) -> Any:
    """`layer`, in which everything that communicates has a name."""
    product = getattr(layer, "product", None)
    for owner, names in ((layer, OPERANDS), (product, getattr(product, "operands", {}))):
        for attribute, operand in names.items():
            target = getattr(owner, attribute, None)
            if target is not None:
                undo.append(_replace(owner, attribute, Named(target, operand, observer)))
    return layer


def _name(layer: Any) -> str:
    """Its name in the model; that of its class where it was not built from a spec."""
    return getattr(layer, "name", type(layer).__name__.lower())


def _layer(layer: Any) -> Layer:
    """Its name in the model, and that of its part, the same in all blocks."""
    return Layer(_name(layer), getattr(layer, "part", _name(layer)))
