"""List what a checkpoint holds: parameters, an optimizer's moments, and what defines them."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from mm3d.arrays.backend import Array, DTYPES, host_dtype

OPTIMIZER_PREFIX = "optimizer."    # before the names of an optimizer's options


@dataclass(frozen=True)
class StoredArray:
    """Describe a global array, and this rank's block of it."""

    path: str    # its place in the index: "parameters/NAME", or "optimizer/MOMENT/NAME"
    # Global shape as the model stores it, and as `Transformer.state` returns it.
    shape: tuple[int, ...]
    public_shape: tuple[int, ...]
    place: tuple[slice, ...]    # this rank's block of it
    counted: bool    # whether this rank writes the block
    array: Array    # the block, which reading changes
    backend: Any    # copies it to the host and back

    @property
    def dtype(self) -> np.dtype:
        """Return the type of its elements in a file."""
        return host_dtype(self.array)


def stored_arrays(model: Any, optimizer: Any = None) -> list[StoredArray]:
    """Return this rank's arrays of a model and of the moments of its optimizer.

    Raises ValueError for a type that HDF5 does not have, and for the optimizer of another model.
    """
    moments = optimizer.state if optimizer is not None else {}
    if optimizer is not None and [*optimizer.model.trained] != [*model.trained]:
        raise ValueError(f"this {type(optimizer).__name__} changes the parameters of another "
                         f"model: an optimizer of the model itself would do")
    found = []
    for index, t in enumerate(model.trained):
        arrays = {f"parameters/{t.name}": t.master} | {
            f"optimizer/{moment}/{t.name}": arrays[index] for moment, arrays in moments.items()}
        place = t.layout.slices(t.grid, t.shape)
        for path, array in arrays.items():
            if str(host_dtype(array)) not in DTYPES:
                raise ValueError(f"a checkpoint cannot hold {t.name!r} in {host_dtype(array)}: "
                                 f"create the model with master='float32'")
            found.append(StoredArray(path, tuple(t.shape), tuple(t.public_shape), place,
                                     t.counted, array, t.grid.backend))
    return found


def known_facts(model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts that define a model, and those of its training alone; both may be empty."""
    definition = getattr(model, "definition", None)
    function, training = (definition.function, definition.training) if definition else ({}, {})
    options = {} if optimizer is None else optimizer.options()
    return function, training | {OPTIMIZER_PREFIX + name: value for name, value in options.items()}
