"""Hold trained arrays, divided over the grid, with their gradients."""

import math
from typing import Any

import numpy as np

from mm3d.arrays.backend import Array, host_dtype, namespace
from mm3d.grid.axis import Split
from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout


class Parameter:
    """Hold this rank's block of a trained array and of its gradient.

    Attributes
    ----------
    name : str
        Its name in the model, such as "layers.0.mlp.up.weight".
    value : Array
        This rank's block of it, in the type that is computed with.
    master : Array
        The same in the type that is trained and stored; `value` itself where that is one type.
    grad : Array
        This rank's block of the gradient, in the master's type.
    layout : Layout
        Of all three.
    shape : tuple of int
        Global shape as stored; a query-key-value weight is (in, 3, out).
    public_shape : tuple of int
        Global shape outside, (in, 3 out).
    """

    def __init__(self, name: str, grid: Grid, layout: Layout, shape: tuple[int, ...],
                 dtype: Any, gathered_along: Split | None = None, master: Any = None) -> None:
        self.name, self.grid, self.layout, self.shape = name, grid, layout, tuple(shape)
        inputs = self.shape[:1] if name.endswith("weight") and len(shape) > 1 else ()
        self.public_shape = (*inputs, math.prod(self.shape[len(inputs):]))
        local = layout.local_shape(grid, self.shape)
        self.value = (gathered_along or grid.backend).empty(local, dtype)
        self.has_master = master is not None
        self.master = grid.backend.empty(local, master) if self.has_master else self.value
        self.grad = grid.backend.empty(local, master if self.has_master else dtype)
        self.grad[...] = 0

    @property
    def nbytes(self) -> int:
        """Return the bytes on this rank: value and gradient, and the master if it is separate."""
        held = [self.value, self.grad, *([self.master] if self.has_master else ())]
        return sum(a.nbytes for a in held)

    def refresh(self) -> None:
        """Round the master, after a change, to the type of `value`."""
        if self.has_master:
            xp = namespace(self.master)
            self.value[...] = xp.astype(self.master, self.value.dtype, copy=False)

    def accumulate(self, gradient: Array | None) -> None:
        """Add to the gradient; `gradient` is None where this rank holds no block."""
        if gradient is not None:
            self.grad += gradient

    def load(self, value: np.ndarray) -> None:
        """Take this rank's block of the global `value`."""
        place = self.layout.slices(self.grid, self.shape)
        block = np.ascontiguousarray(np.reshape(value, self.shape)[place])
        self.master[...] = self.grid.backend.asarray(block.astype(host_dtype(self.master)))
        self.refresh()

    def gather(self, block: Array) -> np.ndarray:
        """Gather the global array of which this rank holds `block` (for checks; collective)."""
        return self.layout.unshard(block, self.grid, self.shape).reshape(self.public_shape)
