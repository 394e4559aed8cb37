"""Run the whole model on one rank: the reference that every other scheme is checked against."""

from typing import Any, Mapping

from mm3d.grid.activations import Space
from mm3d.grid.layout import Layout
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.line_product import LineProduct
from mm3d.schemes.product import Product
from mm3d.schemes.scheme import Scheme, SpaceLayout


class Serial(Scheme):
    """Hold and compute everything on every rank, without parallelism."""

    name = "serial"
    directions = "x"
    down_weight = ","
    divides_work = False

    @classmethod
    def layouts(cls, sizes: dict[str, int], batch: int, seq: int,
                **options: Any) -> tuple[SpaceLayout, SpaceLayout]:
        return (",", "", "", ""), (",", "", "", "")

    def product(self, source: Space, target: Space, shape: tuple[int, ...],
                units: tuple[int, int]) -> Product:
        return LineProduct(Layout("," * (len(shape) - 1)))

    @classmethod
    def product_moves(cls, sizes: Mapping[str, int], product: ProductShape,
                      **options: Any) -> tuple[list[Move], list[Move]]:
        return [], []
