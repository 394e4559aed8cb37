"""Make training steps, right ones and parts of them, in which faults are planted."""

from dataclasses import dataclass, replace
from typing import Any, Callable, Mapping

import numpy as np

from bench.experiments.dump.causes import gradient_terms
from bench.experiments.dump.computation import (Start, Tensors, Way, compute_step, compute_update)
from bench.experiments.dump.envelopes import measure_norm
from bench.experiments.dump.places import LOSS, NORM, TensorId


@dataclass(frozen=True)
class Workshop:
    """Make steps, right ones and parts of them.

    Attributes
    ----------
    start : Start
        What they begin with.
    optimizer : mapping
        Settings of the optimizer.
    comm : mpi4py.MPI.Intracomm
        One rank.
    """

    start: Start
    optimizer: Mapping[str, Any]
    comm: Any

    @property
    def way(self) -> Way:
        """Return how steps are computed: another order than those of the envelope."""
        return Way(self.start.model.dtype, self.start.model.master, 1, 99)

    def step(self, start: Start | None = None, look: Callable | None = None) -> Tensors:
        """Compute a step up to the gradients; what `look` changes is in the dump's own order."""
        way = self.way if look is None else replace(self.way, seed=0)
        return compute_step(start or self.start, way, self.comm, look)

    def finish(self, tensors: Tensors, **optimizer: Any) -> Tensors:
        """Add the norm and the weights after a step, as they follow from the gradients."""
        gradients = self.gradients(tensors)
        tensors[TensorId(NORM)] = measure_norm(gradients)[0]
        return tensors | compute_update(self.start, self.way, self.comm, {
            **self.optimizer, **optimizer}, gradients)

    def gradients(self, tensors: Tensors) -> dict[str, np.ndarray]:
        """Return the gradients among tensors, as the dump stores them."""
        kept = self.start.model.master or self.start.model.dtype
        return {place.name: np.asarray(a, kept) for place, a in tensors.items()
                if place.kind == "gradient"}

    def with_gradient(self, name: str, a: np.ndarray | float) -> Tensors:
        """Return a step with another gradient of a weight, and what follows from it."""
        return self.change_gradients(
            name, lambda right: a * right if isinstance(a, float) else a)

    def change_gradients(self, part: str, change: Callable[[np.ndarray], Any]) -> Tensors:
        """Return a step with other gradients of weights whose names have a part."""
        return self.finish({place: change(a) if place.kind == "gradient" and part in place.name
                            else a for place, a in self.step().items()})

    def with_loss(self, change: Callable[[np.ndarray], Any]) -> Tensors:
        """Return a right step that reports another loss."""
        tensors = self.finish(self.step())
        return tensors | {TensorId(LOSS): change(tensors[TensorId(LOSS)])}

    def with_norm(self, count: Callable[[str], int]) -> Tensors:
        """Return a right step whose norm counts the gradients of each weight so many times."""
        tensors = self.finish(self.step())
        return tensors | {TensorId(NORM): np.sqrt(sum(
            count(name) * (np.float64(a) ** 2).sum()
            for name, a in self.gradients(tensors).items()))}

    def with_gradients(self, factor: float) -> Tensors:
        """Return a step with all gradients times a factor."""
        tensors = self.step()
        return self.finish({place: a * factor if place.kind.endswith("gradient") else a
                            for place, a in tensors.items()})

    def half(self, name: str, dim: int, factor: float = 1.0) -> Tensors:
        """Return a step whose gradient of a weight is that of half the sequences or positions."""
        terms = gradient_terms(self.start, name, dim)
        return self.with_gradient(name, factor * terms[:len(terms) // 2].sum(0))

    def without(self, sequences: slice) -> Start:
        """Return the start with ignored targets in some sequences."""
        targets = self.start.targets.copy()
        targets[sequences] = self.start.model.ignored
        return replace(self.start, targets=targets)

    def with_weight(self, name: str, change: Callable[[np.ndarray], np.ndarray]) -> Tensors:
        """Return a step that is computed with another weight than the dump has."""
        weights = {**self.start.weights}
        weights[name] = change(np.array(weights[name]))
        return self.finish(self.step(replace(self.start, weights=weights)))
