"""Observe the local matrix products of a step."""

from collections import Counter
from typing import Any, Callable, Iterable

import numpy as np

from bench.experiments.torch.serve import Product
from mm3d.arrays.backend import Array
from mm3d.grid.grid import Grid
from mm3d.tracing.events import ArrayObserver, Gemm
from mm3d.tracing.observe import observed


class OperandShapes(ArrayObserver):
    """Collect the operands of products of two matrices: shapes, and which are transposed."""

    kinds = (Gemm,)

    def __init__(self) -> None:
        self.found: list[tuple[tuple, tuple]] = []

    def see_result(self, event: Gemm, given: tuple[Array, Array], result: Array) -> None:
        """Collect the operands, unless they are stacks, as attention multiplies them."""
        if all(len(m.shape) == 2 for m in given):
            self.found.append(tuple((tuple(m.shape), _transposed(m)) for m in given))


def observe_products(step: Callable[[], Any], grid: Grid) -> list[Product]:
    """Return this rank's products of two matrices in a step of all ranks."""
    shapes = OperandShapes()
    with observed(grid, shapes):
        step()
    return count_products((*a, b[1], a_columns, b_columns)
                          for (a, a_columns), (b, b_columns) in shapes.found)


def count_products(found: Iterable[tuple[int, int, int, bool, bool]]) -> list[Product]:
    """Return each product once, with its count; empty products are left out."""
    return [(*each, count) for each, count in Counter(found).items() if min(each[:3])]


def _transposed(a: Any) -> bool:
    """Return True if columns are contiguous and rows are not."""
    rows, columns = np.shape(a)
    return rows > 1 and columns > 1 and a.strides[0] < a.strides[1]
