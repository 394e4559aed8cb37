"""Multiply on a line of ranks that divide the weight, or that all do the same."""

from mm3d.arrays.backend import Array
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.grid.axis import Axis
from mm3d.grid.layout import Layout
from mm3d.grid.split import Operand, Split, gather
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

    def ab(self, A: Operand, B: Array) -> Array:
        return self.c.reduce_scatter(matmul(gather(A, self.a), B))

    def abt(self, dC: Operand, B: Array) -> Array:
        return self.a.reduce_scatter(matmul_nt(gather(dC, self.c), B))

    def atb(self, A: Operand, dC: Operand) -> Array:
        return matmul_tn(gather(A, self.a), gather(dC, self.c), self.empty_gradient,
                         self.accumulate_float32)
