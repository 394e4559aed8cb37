"""Run the whole model on one rank: the reference that every other scheme is checked against."""

from typing import Any, Mapping

from mm3d.arrays.backend import Array
from mm3d.arrays.products import matmul, matmul_nt
from mm3d.grid.activations import Space
from mm3d.grid.layout import Layout
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.product import Product
from mm3d.schemes.scheme import Scheme, SpaceLayout


class SerialProduct(Product):
    """Compute C = A B without communication."""

    def __init__(self, weight: Layout) -> None:
        self.weight = weight

    def forward(self, A: Array, B: Array) -> tuple[Array, Any]:
        return matmul(A, B), A

    def backward_input(self, dC: Array, B: Array, saved: Any) -> tuple[Array, Any]:
        return matmul_nt(dC, B), (saved, dC)

    def backward_weights(self, operands: Any) -> Array:
        return self.weight_gradient(*operands)

    def recompute_saved(self, A: Array, weight: Any) -> Any:
        return A

    def forward_transposed(self, C: Array, B: Array) -> Array:
        return matmul_nt(C, B)

    def backward_transposed(self, dA: Array, C: Array, B: Array) -> tuple[Array, Array]:
        return matmul(dA, B), self.weight_gradient(dA, C)


class Serial(Scheme):
    """Hold and compute everything on every rank, without parallelism."""

    name = "serial"
    directions = "x"
    down_weight = ","
    divides_work = False

    @classmethod
    def default_grid(cls, ranks: int) -> tuple[int, ...]:
        return (ranks,)

    @classmethod
    def layouts(cls, sizes: dict[str, int], batch: int, seq: int,
                **options: Any) -> tuple[SpaceLayout, SpaceLayout]:
        return (",", "", "", ""), (",", "", "", "")

    def product(self, source: Space, target: Space, shape: tuple[int, ...],
                units: tuple[int, int]) -> Product:
        return SerialProduct(Layout("," * (len(shape) - 1)))

    @classmethod
    def product_moves(cls, sizes: Mapping[str, int], product: ProductShape,
                      **options: Any) -> tuple[list[Move], list[Move]]:
        return [], []
