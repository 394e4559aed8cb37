"""Observing a step: one hook for every product, collective and layer of a model.

`observed` stands in front of the methods of a grid's backend and transports, and of a model and
its layers, and tells an `Observer` of each call, for as long as a ``with`` block lasts.  Several
observers can be there at once.  The code that computes knows nothing of it and pays nothing for it
outside the block.  A dry run's `mm3d.tracing.trace.Trace` observes to count,
`bench.instruments.spans.Recorder` to measure, `mm3d.tracing.watchdog.Position` to say where a rank
is.
"""

from contextlib import contextmanager
from functools import partial
from typing import Any, Callable, Iterator

from mm3d.tracing.events import (Collective, Event, Gemm, Layer, Observer, Overlapped, Phase,
                                 Recomputation)
from mm3d.tracing.observed_calls import (LAYER_CALLS, Library, NamedOperand, Observers, Transport,
                                         report_products, join_observers, report_calls)

# Methods of a backend that multiply matrices, and stacks of them where it has its own for these.
PRODUCTS = ("gemm", "gemms")

# What travels for each attribute of a layer that communicates; of a product it says so itself.
OPERANDS = {"vector": "b", "split": "KV", "space": "row sums"}

Wrap = Callable[[Any, Observers], Any]
Place = tuple[Any, str, Wrap]    # owner, attribute, and what makes its wrapper


@contextmanager
def observed(grid: Any, observer: Observer, model: Any = None) -> Iterator[None]:
    """Tell `observer` of the events on `grid` and in the layers of `model` within the block.

    Blocks of several observers may lie in each other; each is told of all events of its kinds.

    Parameters
    ----------
    grid : Grid
        Of whose backend the products, and of whose axes the collectives are observed.
    observer : Observer
        The observer, which says what it is to be told of.
    model : Transformer or bench.experiments.products.problem.Problem, optional
        The model whose passes and layers are events, too, and name the operands that travel.
    """
    points = _points_of_grid(grid, observer.kinds)
    if model is not None:
        points += _points_of_model(model, observer.kinds)
    told = []
    try:
        for owner, name, wrap in points:
            told.append(_Point.at(owner, name, wrap))
            told[-1].add(observer)
        yield
    finally:
        for point in reversed(told):
            point.remove(observer)


class _Point:
    """An attribute that is observed, in whose place lies a wrapper that tells its observers.

    Parameters
    ----------
    owner, name
        The object and its attribute.
    wrap : callable
        Makes the wrapper from the attribute's own value and the observers.
    """

    def __init__(self, owner: Any, name: str, wrap: Wrap) -> None:
        self.owner, self.name, self.wrap = owner, name, wrap
        self.own, self.plain = name in vars(owner), getattr(owner, name)
        self.observers: Observers = []

    @classmethod
    def at(cls, owner: Any, name: str, wrap: Wrap) -> "_Point":
        """The point there: the one of the observers before, or a new one."""
        points = vars(owner).setdefault("_points", {})
        if name not in points:
            points[name] = cls(owner, name, wrap)
        return points[name]

    def add(self, observer: Observer) -> None:
        """Tell one more observer."""
        self.observers.append(observer)
        self._place()

    def remove(self, observer: Observer) -> None:
        """Tell one observer less; of the last one nothing stays behind."""
        index = next(n for n, one in enumerate(self.observers) if one is observer)
        del self.observers[index]
        self._place()

    def _place(self) -> None:
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


def _calls(event: Event) -> Callable[[Callable, Observers], Callable]:
    """The wrapper of a method whose calls are `event`."""
    return lambda work, observers: report_calls(work, event,
                                                join_observers(observers, type(event)))


def _points_of_grid(grid: Any, kinds: tuple[type, ...]) -> list[Place]:
    """The products and the transports of a grid."""
    found: list[Place] = []
    backend, busy = grid.backend, []
    if Gemm in kinds:
        found += [(backend, name, partial(report_products, busy)) for name in PRODUCTS
                  if hasattr(backend, name)]
        found.append((backend, "xp", partial(Library, busy)))
    if Collective in kinds or Overlapped in kinds:
        found += [(axis, "transport", partial(Transport, axis, grid.shape.stride(name)))
                  for name, axis in grid.axes.items() if axis.size > 1]
    return found


def _points_of_model(model: Any, kinds: tuple[type, ...]) -> list[Place]:
    """The passes of a model and the layers in it."""
    found: list[Place] = []
    if Phase in kinds:
        found += [(model, name, _calls(Phase(name))) for name in ("forward", "backward")]
    if hasattr(model, "layers"):
        return found + _points_within(model.layers, kinds)
    product = getattr(model, "product", None)    # of matrices alone
    return found + [(product, "observed_split", _name_operands)] * (
        Collective in kinds and product is not None)


def _points_within(chain: Any, kinds: tuple[type, ...]) -> list[Place]:
    """The layers of `chain`, and those of the chains in it."""
    found: list[Place] = []
    for layer in chain.layers:
        if hasattr(layer, "recompute"):    # an event only when it is computed again
            if Recomputation in kinds:
                event = Recomputation(f"{_name(layer)} again")
                found.append((layer, "recompute", _calls(event)))
            found += _points_within(layer, kinds)
            continue
        if hasattr(layer, "layers"):
            found += _points_within(layer, kinds)
        elif Collective in kinds:
            found += _points_of_operands(layer)
        if Layer in kinds:
            found += [(layer, name, partial(wrap, layer, _layer(layer)))
                      for name, wrap in LAYER_CALLS.items() if hasattr(layer, name)]
    return found


def _points_of_operands(layer: Any) -> list[Place]:
    """What communicates in `layer`, with the names of its operands."""
    product = getattr(layer, "product", None)
    return [(owner, attribute, partial(_named, operand))
            for owner, names in ((layer, OPERANDS), (product, getattr(product, "operands", {})))
            for attribute, operand in names.items()
            if getattr(owner, attribute, None) is not None]


def _named(operand: str, target: Any, observers: Observers) -> NamedOperand:
    """What communicates, with the name of its operand."""
    return NamedOperand(target, operand, join_observers(observers, Collective))


def _name_operands(named: Callable[[Any, str], Any], observers: Observers) -> Callable:
    """`named` of a `mm3d.schemes.matrix_product.MatrixProduct`, of which the observers learn the
    names."""
    observer = join_observers(observers, Collective)
    return lambda split, name: NamedOperand(named(split, name), name, observer)


def _name(layer: Any) -> str:
    """Its name in the model; that of its class where it was not built from a spec."""
    return getattr(layer, "name", type(layer).__name__.lower())


def _layer(layer: Any) -> Layer:
    """Its name in the model, and that of its part, the same in all blocks."""
    return Layer(_name(layer), getattr(layer, "part", _name(layer)))
