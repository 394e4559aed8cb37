"""Implement 2.5-D parallelism: SUMMA in d layers of q x q ranks, as in Tesseract.

Wang, Xu, Bian and You (arXiv 2105.14500) put d copies of a q x q grid on top of each other.  x
numbers the rows of a layer, y its columns, z the layers.  Rows of activations are divided over
the layers, weights are copied to each of them, and each layer multiplies its rows by SUMMA; C of
A B and dA need nothing from another layer.  The gradient of a weight is a sum over all rows, so
each layer has one term of it: the layers sum the terms by an all-reduce along z.

With d = 1 this is SUMMA, with q = 1 data parallelism.  It is not the 2.5-D algorithm of Solomonik
and Demmel (2011), in which the layers divide the terms of the sum A B.
"""

import itertools
import math
from typing import Any, Mapping

from mm3d.arrays.backend import Array
from mm3d.grid.activations import Space
from mm3d.grid.axis import Axis
from mm3d.grid.shape import GridShape
from mm3d.schemes.closed_form import Move
from mm3d.schemes.matrix_product import element_counts
from mm3d.schemes.product import Product
from mm3d.schemes.scheme import SpaceLayout
from mm3d.schemes.summa import Summa, SummaMatrixProduct, SummaProduct


class TesseractProduct(SummaProduct):
    """Compute C = A B and dA = dC B^T in each layer, and dB = A^T dC as a sum over the layers."""

    operands = {**Product.operands, "depth": "B"}

    def __init__(self, layer: SummaProduct, depth: Axis) -> None:
        super().__init__(layer.a, layer.b, layer.weight, layer.algorithms)
        self.depth = depth

    def atb(self, A: Array, dC: Array) -> Array:
        return self.depth.all_reduce(super().atb(A, dC))


class TesseractMatrixProduct(SummaMatrixProduct):
    """Compute C = A B, A B^T or A^T B, with the rows of two matrices divided over d layers.

    Each layer has the third matrix, like a weight: B, or the sum C = A^T B.
    """

    LAYOUTS = {"ab": ("zx,y", "x,y", "zx,y"), "abt": ("zx,y", "x,y", "zx,y"),
               "atb": ("zx,y", "zx,y", "x,y")}

    @classmethod
    def forward_moves(cls, sizes: Mapping[str, int], form: str,
                      shape: tuple[int, int, int]) -> list[Move]:
        """List SUMMA's collectives in each layer, and the sum of A^T B over the layers.

        In a linear layer a rank moves 3 (q-1) (MN / (d q^2) + NK / q^2) + 2 (d-1)/d NK / q^2
        words, forward and backward.
        """
        d, (divided, copied) = sizes["z"], super().forward_moves(sizes, form, shape)
        moves = [divided, copied._replace(words=d * copied.words)]
        whole = 2 * (d - 1) * element_counts(form, shape)["C"]
        return moves + [Move("z", "all_reduce", whole)] * (form == "atb")

    def _multiply(self, form: str, names: str, blocks: dict[str, Array]) -> Array:
        product = super()._multiply(form, names, blocks)
        if form != "atb":
            return product
        return self.observed_split(self.grid.z, names[2]).all_reduce(product)


class Tesseract(Summa):
    """Divide rows over d layers of q x q ranks, and all matrices of a layer into q x q blocks.

    Sequences are divided by z and then by x, features by y.  Vectors are stored on the diagonal
    of each layer.
    """

    name = "2.5d"
    title = "2.5-D"
    directions = "xyz"
    matrix_product = TesseractMatrixProduct

    @classmethod
    def default_grid(cls, ranks: int) -> tuple[int, ...]:
        """Return the deepest q x q x d grid with d <= q, the range that Tesseract is made for."""
        q = cls._default_side(ranks)
        if q is None:
            below, above = (next(filter(cls._default_side, numbers)) for numbers in (
                range(ranks - 1, 0, -1), itertools.count(ranks + 1)))
            raise ValueError(f"{ranks} ranks are no q x q x d with d <= q: start {below} or "
                             f"{above}, or name a grid of {ranks}, such as grid=(1, 1, {ranks})")
        return (q, q, ranks // q ** 2)

    @staticmethod
    def _default_side(ranks: int) -> int | None:
        """Return the least q with d <= q; None if there is none."""
        return next((q for q in range(1, math.isqrt(ranks) + 1)
                     if ranks % q ** 2 == 0 and ranks <= q ** 3), None)

    @classmethod
    def check_grid(cls, grid: GridShape) -> None:
        if grid["x"] != grid["y"]:
            raise ValueError(f"scheme '2.5d' needs a grid of q x q x d, not {grid}")

    @classmethod
    def layouts(cls, sizes: dict[str, int], batch: int, seq: int,
                **options: Any) -> tuple[SpaceLayout, SpaceLayout]:
        return ("zx,", "y", "y@x", ""), ("zx,", "y", "y@x", "")

    def product(self, source: Space, target: Space, shape: tuple[int, ...],
                units: tuple[int, int]) -> Product:
        return TesseractProduct(super().product(source, target, shape, units), self.grid.z)
