"""Multiply on a line of ranks that divide the weight, or that all do the same."""

from typing import Any

from mm3d.arrays.backend import Array
from mm3d.arrays.products import matmul, matmul_nt
from mm3d.grid.axis import Axis
from mm3d.grid.layout import Layout
from mm3d.grid.split import Gathered, Split
from mm3d.schemes.product import Product


class Whole:
    """Store what no other rank needs: nothing is gathered, and nothing is summed.

    It has the part of the interface of `Split` that `LineProduct` needs.
    """

    def all_gather(self, a: Array) -> Array:
        """Return `a` itself."""
        return a

    reduce_scatter = all_gather


class Replicated(Whole):
    """Store a matrix on every rank: nothing is gathered, and an all-reduce sums the terms."""

    def __init__(self, axis: Axis) -> None:
        self.axis = axis

    def reduce_scatter(self, a: Array) -> Array:
        """Return the sum of `a` over the ranks, whole on every rank."""
        return self.axis.all_reduce(a)


class LineProduct(Product):
    """Compute C = A B on a line of ranks that divide B by columns, by rows, or not at all.

    By columns (a product up) rank j computes C_j = A B_j, and dA is the sum of dC_j B_j^T over the
    ranks.  By rows (a product down) C is the sum of A_j B_j, and dA_j = dC B_j^T.

    `weight` is the layout of B.  `a` and `c` say how A and C are stored.  The columns of one are
    divided like B: it is `Whole`.  The other, A by columns and C by rows, is gathered before a
    product and summed after one: it is `Replicated`, or a `Split` of its rows.
    """

    def __init__(self, weight: Layout, a: Split | Whole = Whole(),
                 c: Split | Whole = Whole()) -> None:
        self.weight, self.a, self.c = weight, a, c

    def forward(self, A: Array, B: Array) -> tuple[Array, Any]:
        return self.c.reduce_scatter(matmul(self.a.all_gather(A), B)), A

    def backward_input(self, dC: Array, B: Array, saved: Any) -> tuple[Array, Any]:
        gathered = Gathered(self.c.all_gather(dC))
        return self.a.reduce_scatter(matmul_nt(gathered.array, B)), (saved, gathered)

    def backward_weights(self, operands: Any) -> Array:
        A, dC = operands
        return self.weight_gradient(self.a.all_gather(A), dC.array)

    def recompute_saved(self, A: Array, weight: Any) -> Any:
        return A

    def forward_transposed(self, C: Array, B: Array) -> Array:
        return matmul_nt(self.c.all_gather(C), B)

    def backward_transposed(self, dA: Array, C: Array, B: Array) -> tuple[Array, Array]:
        dC = self.c.reduce_scatter(matmul(dA, B))
        return dC, self.weight_gradient(dA, self.c.all_gather(C))
