"""Define dropout, with masks that are the same on every grid.

A mask is never stored: backward draws it again (`mm3d.model.draws`), so dropout saves no words and
moves none.  Dropout of attention probabilities is not offered: they are computed in blocks that
exist for a moment, and again in backward.
"""

from typing import Any

import numpy as np

from mm3d.arrays.backend import Array, host_dtype, namespace
from mm3d.grid.activations import Space
from mm3d.model.draws import BITS, MaskKey, draw_kept, dropped_of_65536
from mm3d.model.parameters import Parameter
from mm3d.schemes.passes import Pass


class Dropout:
    """Set elements to zero at random, and scale the others so that the mean stays.

    Masks are drawn on the host, also for arrays of a device.  x is in `space`, with `features`
    globally; the probability that an element is dropped is rounded to a multiple of 2^-16.  A
    layer of another `name` has other masks.  `key` has seed, step and place in the batch; with the
    place None nothing is dropped.  While a CUDA graph is recorded, forward and backward raise
    RuntimeError unless it is None.
    """

    parameters: list[Parameter] = []

    def __init__(self, space: Space, features: int, probability: float, name: str,
                 key: MaskKey) -> None:
        self.space, self.name, self.key = space, name, key
        self.shape = (space.batch, space.seq, features)
        self.dropped = dropped_of_65536(probability)
        self.scale = 2 ** BITS / (2 ** BITS - self.dropped)
        self.empty = space.allocator(features)

    def forward(self, x: Array, within: Pass | None = None) -> tuple[Array, Any]:
        """Compute x times the mask and the scale; nothing is saved."""
        return self.apply(x, self.empty(x.dtype)), None

    def backward(self, dy: Array, saved: Any, within: Pass | None = None) -> Array:
        """Compute dy times the same mask and scale."""
        return self.apply(dy, self.empty(dy.dtype))

    def apply(self, a: Array, out: Array) -> Array:
        """Multiply this rank's block `a` by the mask and the scale, into `out`, or `a` itself."""
        if self.key.place is None:
            out[...] = a
            return out
        grid = self.space.grid
        if grid.backend.recording:
            raise RuntimeError("a CUDA graph would repeat the masks of this one step, which the "
                               "host draws: dropout=0 would do, or a step outside of a graph")
        factors = grid.backend.from_host(tuple(a.shape), host_dtype(a), self._draw_factors)
        return namespace(a).multiply(a, factors, out=out)

    def _draw_factors(self) -> Any:
        """Draw this rank's block of the mask; return it times the scale, in NumPy."""
        step, first = self.key.place
        rows, held, features = self.space.layout().slices(self.space.grid, self.shape)
        rows = slice(first + rows.start, first + rows.stop)
        kept = [draw_kept(self.key.seed, step, self.name, self.space.length,
                          (rows, slice(run.start, run.stop), features), self.dropped)
                for run in self.space.runs(held)]
        return np.concatenate(kept, axis=1) * self.scale
