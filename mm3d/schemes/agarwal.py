"""Implement the 3-D product of Agarwal, Balle, Gustavson, Joshi and Palkar (1995).

IBM Journal of Research and Development 39(5), pages 575 to 582: both operands are gathered, each
rank multiplies once, and the terms of C are exchanged and added by the rank that stores the sum.
The balance of the paper's product is theirs, and so are its words.  What differs is the sum: an
all-to-all and an addition in the order of the ranks, instead of a reduce-scatter.  So its bits do
not depend on the transport.  The storage is that of `mm3d.schemes.cube`, whose rows are divided
where the original divides columns.
"""

from typing import Any, Mapping

from mm3d.arrays.backend import Array, accumulation_dtype, namespace
from mm3d.arrays.blocks import block_indices
from mm3d.grid.split import Split
from mm3d.schemes.closed_form import Move
from mm3d.schemes.cube import Cube, CubeMatrixProduct
from mm3d.schemes.scheme import GridAlgorithm


class OrderedSums:
    """Wrap a `Split` so that terms are added in the order of the ranks."""

    def __init__(self, split: Split) -> None:
        self.split = split

    def __getattr__(self, name: str) -> Any:
        return getattr(self.split, name)

    def term(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate this rank's term."""
        return self.split.axis.backend.empty(shape, dtype)

    def reduce_scatter(self, a: Array) -> Array:
        """Sum `a` over the ranks, in float32 at least; return this rank's block."""
        axis, dim = self.split.axis, self.split.dim
        if axis.size == 1:
            return a
        terms = self.split.all_to_all(a)
        own = [self.split.counts[axis.rank]] * axis.size
        first, *others = (terms[index] for index in block_indices(len(a.shape), dim, own))
        xp = namespace(a)
        total = xp.astype(first, accumulation_dtype(first))
        for term in others:
            total += term
        return xp.astype(total, a.dtype, copy=False)


class AgarwalMatrixProduct(CubeMatrixProduct):
    """Compute C = A B, A B^T or A^T B with sums in the order of the ranks."""

    def split(self, name: str) -> OrderedSums:
        return OrderedSums(super().split(name))

    @classmethod
    def forward_moves(cls, sizes: Mapping[str, int], form: str,
                      shape: tuple[int, int, int]) -> list[Move]:
        """List the gathers of A and B and the all-to-all of C."""
        *gathers, scatter = super().forward_moves(sizes, form, shape)
        return [*gathers, scatter._replace(collective="all_to_all")]


class Agarwal(GridAlgorithm):
    """Gather both operands on an X x Y x Z grid, and add terms in the order of the ranks."""

    name = "agarwal"
    title = "Agarwal"
    directions = "xyz"
    matrix_product = AgarwalMatrixProduct
    default_grid = Cube.default_grid
