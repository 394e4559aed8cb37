"""Observe a step: tell observers of every product, collective and layer of a model.

For as long as a ``with`` block lasts, `observed` replaces the methods of a grid's backend and
transports, and of a model and its layers, by wrappers that tell an `Observer` of each call.
The code that computes does not know of observers, and pays nothing for them outside of the block.
"""

from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Iterator, Sequence

from mm3d.tracing.events import (Collective, Event, Gemm, HALVES, LayerEvent, Observer, Overlapped,
                                 PHASES, Phase, Recomputation)
from mm3d.tracing.observed_calls import (LAYER_CALLS, NamedOperand, ObservedLibrary,
                                         ObservedTransport, Observers, join_observers,
                                         report_calls, report_products)

# Methods of a backend that multiply matrices, or stacks of them where the backend has its own.
PRODUCTS = ("gemm", "gemms")

# Operand of each attribute of a layer that calls collectives; a product names its own operands.
OPERANDS = {"vector": "b", "split": "KV", "chunks": "KV", "space": "row sums"}

Wrap = Callable[[Any, Observers], Any]
WrapPoint = tuple[Any, str, Wrap]    # owner, attribute, and the function that makes its wrapper


@contextmanager
def observed(grids: Any, observer: Observer, *models: Any) -> Iterator[None]:
    """Tell `observer` of the events on `grids` and in the layers of models within the block.

    Blocks may be nested; each observer is told of all events of its kinds.  The products of the
    backend of a grid, or of several, the collectives of their axes, and the passes and layers of
    models, such as a Transformer, are observed; these name the operands of collectives, too.
    """
    grids = grids if isinstance(grids, Sequence) else [grids]
    points = [point for grid in grids for point in _points_of_grid(grid, observer.kinds)]
    points += [point for model in models for point in _points_of_model(model, observer.kinds)]
    attached = []
    try:
        # What several grids or models have in common is observed once.
        for owner, name, wrap in {(id(one[0]), one[1]): one for one in points}.values():
            known = vars(owner).setdefault("_points", {})
            if name not in known:
                known[name] = _ObservedAttribute(owner, name, wrap)
            attached.append(known[name])
            known[name].observers.append(observer)
            known[name].place()
        yield
    finally:
        for attribute in reversed(attached):
            attribute.observers.remove(observer)
            attribute.place()


class _ObservedAttribute:
    """Replace an attribute by a wrapper, which `wrap` makes of its own value and its observers."""

    def __init__(self, owner: Any, name: str, wrap: Wrap) -> None:
        self.owner, self.name, self.wrap = owner, name, wrap
        self.own, self.plain = name in vars(owner), getattr(owner, name)
        self.observers: Observers = []

    def place(self) -> None:
        """Put the wrapper of the current observers in place; without any, the own value."""
        if self.observers:
            setattr(self.owner, self.name, self.wrap(self.plain, list(self.observers)))
            return
        if self.own:
            setattr(self.owner, self.name, self.plain)
        else:
            delattr(self.owner, self.name)
        del self.owner._points[self.name]
        if not self.owner._points:
            del self.owner._points


def _report_event(event: Event) -> Callable[[Callable, Observers], Callable]:
    """Return the function that wraps a method whose calls are `event`."""
    return lambda work, observers: report_calls(work, event,
                                                join_observers(observers, type(event)))


def _points_of_grid(grid: Any, kinds: tuple[type, ...]) -> list[WrapPoint]:
    """List the products and the transports of a grid."""
    found: list[WrapPoint] = []
    backend, busy = grid.backend, []
    if Gemm in kinds:
        found += [(backend, name, partial(report_products, busy)) for name in PRODUCTS
                  if hasattr(backend, name)]
        found.append((backend, "xp", partial(ObservedLibrary, busy)))
    if Collective in kinds or Overlapped in kinds:
        found += [(axis, "transport", partial(ObservedTransport, axis, grid.stride(name)))
                  for name, axis in grid.axes.items() if axis.size > 1]
    return found


def _points_of_model(model: Any, kinds: tuple[type, ...]) -> list[WrapPoint]:
    """List the passes of a model and the layers in it."""
    found: list[WrapPoint] = []
    if Phase in kinds:
        found += [(model, name, _report_event(Phase(name))) for name in (*PHASES, *HALVES)
                  if hasattr(model, name)]
    if Collective in kinds:
        found += [(joined, "flat", partial(_name_operand, "b"))
                  for joined in getattr(model, "joined", {}).values()]
    if hasattr(model, "layers"):
        return found + _points_within(model.layers, kinds)
    product = getattr(model, "product", None)    # a product of matrices alone
    return found + [(product, "observed_split", _name_splits)] * (
        Collective in kinds and product is not None)


def _points_within(chain: Any, kinds: tuple[type, ...]) -> list[WrapPoint]:
    """List the layers of `chain` and of the chains in it."""
    found: list[WrapPoint] = []
    for layer in chain.layers:
        if hasattr(layer, "recompute"):    # an event only when it is computed again
            if Recomputation in kinds:
                event = Recomputation(f"{_layer_name(layer)} again")
                found.append((layer, "recompute", _report_event(event)))
            found += _points_within(layer, kinds)
            continue
        if hasattr(layer, "layers"):
            found += _points_within(layer, kinds)
        elif Collective in kinds:
            found += _points_of_operands(layer)
        if LayerEvent in kinds:
            found += [(layer, name, partial(wrap, layer, _layer_event(layer)))
                      for name, wrap in LAYER_CALLS.items() if hasattr(layer, name)]
    return found


def _points_of_operands(layer: Any) -> list[WrapPoint]:
    """List the attributes of `layer` that call collectives, with the names of their operands."""
    product = getattr(layer, "product", None)
    return [(owner, attribute, partial(_name_operand, operand))
            for owner, names in ((layer, OPERANDS), (product, getattr(product, "operands", {})))
            for attribute, operand in names.items()
            if getattr(owner, attribute, None) is not None]


def _name_operand(operand: str, target: Any, observers: Observers) -> NamedOperand:
    """Wrap an object that calls collectives, so that observers know the name of its operand."""
    return NamedOperand(target, operand, observers)


def _name_splits(observed_split: Callable[[Any, str], Any], observers: Observers) -> Callable:
    """Wrap the method of a `mm3d.schemes.matrix_product.MatrixProduct` that names its splits."""
    return lambda split, name: NamedOperand(observed_split(split, name), name, observers)


def _layer_name(layer: Any) -> str:
    """Return a layer's name in the model, or its class's name if it has none."""
    return getattr(layer, "name", type(layer).__name__.lower())


def _layer_event(layer: Any) -> LayerEvent:
    """Return the event of a layer: its name in the model, and its part of a block."""
    return LayerEvent(_layer_name(layer), getattr(layer, "part", _layer_name(layer)))
