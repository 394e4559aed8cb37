"""List all parameters of a model without making one."""

import functools
import math
from dataclasses import replace

from mm3d.arrays import backend as backends
from mm3d.config import Config, Division, Model
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.training.gpt import GPT
from mm3d.transport.communicators import DryCommunicator


def parameter_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Return the global shape of every parameter as stored, by name, in the order of the model.

    A `mm3d.GPT` on arrays without contents has them, with as many layers as differ.  Raises
    ValueError when its sizes or options do not fit.
    """
    period = model.experts.every if model.experts else 1
    own = _shapes_of(replace(model, layers=min(model.layers, period), dtype="float32",
                             master=None))
    of_layers = [n for n, (name, _) in enumerate(own) if name.startswith("layers.")]
    first, last = of_layers[0], of_layers[-1] + 1
    found = dict(own[:first])
    for layer in range(model.layers):
        here = f"layers.{layer % period}."
        found |= {f"layers.{layer}.{name.removeprefix(here)}": shape
                  for name, shape in own[first:last] if name.startswith(here)}
    return found | dict(own[last:])


@functools.lru_cache
def _shapes_of(model: Model) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return name and shape of every parameter of a dry model: who reads weights asks often."""
    backend = backends.get(DryBackend())
    gpt = GPT(Config(model, Division(scheme="serial", backend=backend)), DryCommunicator(1, 0))
    return tuple((p.name, p.shape) for p in gpt.trained)


def parameter_count(model: Model) -> int:
    """Return the number of elements of all parameters of a model; a tied table counts once."""
    def count(layers: int) -> int:
        return sum(map(math.prod, parameter_shapes(replace(model, layers=layers)).values()))
    period = model.experts.every if model.experts else 1
    more = max(0, model.layers // period - 1)    # periods after the first
    return count(model.layers - more * period) + more * (count(2 * period) - count(period))
