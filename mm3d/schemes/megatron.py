"""Implement 1-D parallelism as in Megatron-LM, without and with sequence parallelism.

Shoeybi et al. (arXiv 1909.08053) divide the columns of the first weight of a block and the rows
of the second, so that activations are whole on every rank outside and divided by features
inside; each block needs one all-reduce forward and one backward.  Korthikanti et al. (arXiv
2205.05198) replace each all-reduce by an all-gather and a reduce-scatter along the sequence, so
that norms and residuals work on shards of it.
"""

from typing import Any, Mapping

from mm3d.arrays.backend import Array
from mm3d.grid.activations import Space
from mm3d.grid.layout import Layout
from mm3d.grid.split import Split
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.matrix_product import (FORMS, GRADIENT_PRODUCTS, LOCAL_PRODUCTS, MatrixProduct,
                                         element_counts)
from mm3d.schemes.line_product import LineProduct, Replicated
from mm3d.schemes.product import Product
from mm3d.schemes.scheme import Scheme, SpaceLayout


class MegatronMatrixProduct(MatrixProduct):
    """Compute C = A B, A B^T or A^T B, with rows of A gathered and columns of op(B) divided.

    This is the product of sequence parallelism, on plain matrices.
    """

    LAYOUTS = {"ab": ("x,", ",x", ",x"), "abt": ("x,", "x,", ",x"), "atb": ("x,", ",x", ",x")}
    DIRECTIONS = dict.fromkeys(FORMS, ("x", None, None))

    @classmethod
    def forward_moves(cls, sizes: Mapping[str, int], form: str,
                      shape: tuple[int, int, int]) -> list[Move]:
        """List the gather of A."""
        return [Move("x", "all_gather", (sizes["x"] - 1) * element_counts(form, shape)["A"])]

    def forward(self, A: Array, B: Array) -> Array:
        return LOCAL_PRODUCTS[self.form](self.split("A").all_gather(A), B)

    def backward(self, dC: Array, A: Array, B: Array) -> tuple[Array, Array]:
        (form_A, names_A), (form_B, names_B) = GRADIENT_PRODUCTS[self.form]
        blocks = {"B": B, "C": dC}
        dA = self.split("A").reduce_scatter(LOCAL_PRODUCTS[form_A](*(blocks[n] for n in names_A)))
        blocks["A"] = self.split("A").all_gather(A)
        return dA, LOCAL_PRODUCTS[form_B](*(blocks[n] for n in names_B))


class Megatron(Scheme):
    """Divide weights over all ranks in a line; replicate activations outside the blocks."""

    name = "1d"
    title = "1-D"
    directions = "x"
    down_weight = "x,"
    matrix_product = MegatronMatrixProduct

    @classmethod
    def layouts(cls, sizes: dict[str, int], batch: int, seq: int,
                **options: Any) -> tuple[SpaceLayout, SpaceLayout]:
        return (",", "", "", ""), (",", "x", "x", "")

    def rows_split(self, outer: Space) -> Replicated | Split:
        """Return the object that gathers rows of the outer space, and sums terms of rows."""
        return Replicated(self.grid.x)

    def product(self, source: Space, target: Space, shape: tuple[int, ...],
                units: tuple[int, int]) -> Product:
        last = len(shape) - 1
        if target.features:
            return LineProduct(Layout("," * last + "x", {last: units[1]}),
                               a=self.rows_split(source))
        return LineProduct(Layout("x" + "," * last, {0: units[0]}), c=self.rows_split(target))

    @classmethod
    def product_moves(cls, sizes: Mapping[str, int], product: ProductShape,
                      **options: Any) -> tuple[list[Move], list[Move]]:
        """List the all-reduce of M x h: of dA on the way up, of C on the way down."""
        P, (M, N, K) = sizes["x"], product.extents
        if product.way == "up":
            return [], [Move("x", "all_reduce", 2 * (P - 1) * M * N)]
        return [Move("x", "all_reduce", 2 * (P - 1) * M * K)], []


class MegatronSequence(Megatron):
    """Divide weights as `Megatron` does, and the sequence outside the blocks."""

    name = "1d-sp"
    title = "1-D, sequence"
    matrix_product = None    # the products of "1d" gather rows already

    @classmethod
    def layouts(cls, sizes: dict[str, int], batch: int, seq: int,
                **options: Any) -> tuple[SpaceLayout, SpaceLayout]:
        return (",x", "", "", "x"), (",", "x", "x", "")

    def rows_split(self, outer: Space) -> Split:
        return outer.rows_split("x")

    @classmethod
    def product_moves(cls, sizes: Mapping[str, int], product: ProductShape,
                      **options: Any) -> tuple[list[Move], list[Move]]:
        """List the gather and the reduce-scatter of M x h; for dB, A is gathered again."""
        M, N, K = product.extents
        A, C = (sizes["x"] - 1) * M * N, (sizes["x"] - 1) * M * K
        if product.way == "up":
            return ([Move("x", "all_gather", A)],
                    [Move("x", "reduce_scatter", A), Move("x", "all_gather", A)])
        return [Move("x", "reduce_scatter", C)], [Move("x", "all_gather", C)]
