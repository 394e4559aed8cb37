"""Implement 2-D parallelism: SUMMA on a q x q grid, as in Optimus (Xu et al., arXiv 2104.05343).

x numbers the rows of the grid, y its columns; every matrix is divided into q x q blocks.  In each
form a loop runs over the q blocks of one operand's inner dimension: they are broadcast and
multiplied, or multiplied and reduced (van de Geijn and Watts, 1997).  a divides the columns of A
over y, b the rows of B over x.
"""

import math
from abc import abstractmethod
from typing import Any, Callable, Mapping

from mm3d.arrays.backend import Array
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.grid.activations import Space
from mm3d.grid.layout import Layout
from mm3d.grid.shape import GridShape
from mm3d.grid.split import Split
from mm3d.schemes.closed_form import Move, ProductShape
from mm3d.schemes.matrix_product import (FORMS, GRADIENT_PRODUCTS, MatrixProduct,
                                         element_counts)
from mm3d.schemes.product import Product
from mm3d.schemes.scheme import Scheme, SpaceLayout

# By form: the matrices that move along y and along x.
MOVED_MATRICES = {"ab": "AB", "abt": "CB", "atb": "AC"}


def ab(A: Array, B: Array, a: Split, b: Split) -> Array:
    """Compute C_ij = sum_t A_it B_tj: A_it is broadcast along y, B_tj along x."""
    C = None
    for t in range(len(a.counts)):
        A_it = a.broadcast(A, t)
        B_tj = b.broadcast(B, t)
        C_t = matmul(A_it, B_tj)
        if C is None:
            C = C_t
        else:
            C += C_t
    return C


def abt(A: Array, B: Array, a: Split, b: Split) -> Array:
    """Compute C_it = sum_j A_ij B_tj^T: B_tj is broadcast along x, C_it reduced along y."""
    C = None
    for t in range(len(a.counts)):
        B_tj = b.broadcast(B, t)
        C_it = a.reduce(matmul_nt(A, B_tj, a.reduce_term), t)
        C = C if C_it is None else C_it
    return C


def atb(A: Array, B: Array, a: Split, b: Split, accumulate_float32: bool = False) -> Array:
    """Compute C_tj = sum_i A_it^T B_ij: A_it is broadcast along y, C_tj reduced along x.

    With `accumulate_float32` C is computed and summed in float32 at least.
    """
    C = None
    for t in range(len(a.counts)):
        A_it = a.broadcast(A, t)
        C_tj = b.reduce(matmul_tn(A_it, B, b.reduce_term, accumulate_float32), t)
        C = C if C_tj is None else C_tj
    return C


class SummaProduct(Product):
    """Compute C = A B, dA = dC B^T and dB = A^T dC by the algorithms of the three forms."""

    def __init__(self, a: Split, b: Split, weight: Layout,
                 algorithms: Mapping[str, Callable[..., Array]]) -> None:
        self.a, self.b, self.weight, self.algorithms = a, b, weight, algorithms

    def ab(self, A: Array, B: Array) -> Array:
        return self.algorithms["ab"](A, B, self.a, self.b)

    def abt(self, dC: Array, B: Array) -> Array:
        return self.algorithms["abt"](dC, B, self.a, self.b)

    def atb(self, A: Array, dC: Array) -> Array:
        return self.algorithms["atb"](A, dC, self.a, self.b, self.accumulate_float32)

    def gather_once(self, operand: Array, split: Split | None) -> Array:
        return operand    # its blocks are broadcast, one at a time


class BlockMatrixProduct(MatrixProduct):
    """Multiply matrices whose rows are divided along x and columns along y.

    Each form has an algorithm in which two of the three matrices move, one along y and one along
    x.  The gradients are products of other forms, by their algorithms.
    """

    LAYOUTS = dict.fromkeys(FORMS, ("x,y", "x,y", "x,y"))
    ALGORITHMS: Mapping[str, Callable[..., Array]]    # of each form; each scheme defines them

    def forward(self, A: Array, B: Array) -> Array:
        return self._multiply(self.form, "ABC", {"A": A, "B": B})

    def backward(self, dC: Array, A: Array, B: Array) -> tuple[Array, Array]:
        blocks = {"A": A, "B": B, "C": dC}
        (form_A, names_A), (form_B, names_B) = GRADIENT_PRODUCTS[self.form]
        return (self._multiply(form_A, names_A + "A", blocks),
                self._multiply(form_B, names_B + "B", blocks))

    @abstractmethod
    def _multiply(self, form: str, names: str, blocks: dict[str, Array]) -> Array:
        """Compute the product of this form whose A, B and C are the matrices `names`."""

    def _moved_splits(self, form: str, names: str) -> tuple[Split, Split]:
        """Return the `Split` of the matrix that moves along y, and of the one along x."""
        matrix = dict(zip("ABC", names))
        along_y, along_x = (matrix[letter] for letter in MOVED_MATRICES[form])
        return (self.observed_split(Split(self.grid.y, 1, self.shapes[along_y][1]), along_y),
                self.observed_split(Split(self.grid.x, 0, self.shapes[along_x][0]), along_x))


class SummaMatrixProduct(BlockMatrixProduct):
    """Compute C = A B, A B^T or A^T B of matrices: A and B are broadcast, C is reduced."""

    DIRECTIONS = dict.fromkeys(FORMS, ("y", "x", None))
    ALGORITHMS = {"ab": ab, "abt": abt, "atb": atb}

    @classmethod
    def forward_moves(cls, sizes: Mapping[str, int], form: str,
                      shape: tuple[int, int, int]) -> list[Move]:
        """List q broadcasts of each operand that moves, and q reductions of C where C moves."""
        q, counts = sizes["x"], element_counts(form, shape)
        return [Move(direction, "reduce" if name == "C" else "broadcast",
                     (q - 1) * counts[name], q)
                for direction, name in zip("yx", MOVED_MATRICES[form])]

    def _multiply(self, form: str, names: str, blocks: dict[str, Array]) -> Array:
        return self.ALGORITHMS[form](blocks[names[0]], blocks[names[1]],
                                     *self._moved_splits(form, names))


class Summa(Scheme):
    """Divide all matrices into blocks over a square of ranks.

    Sequences are divided by x, features by y.  Vectors are stored on the diagonal of the grid, not
    on its first row: the costs are the same, and the storage is balanced.
    """

    name = "2d"
    title = "2-D"
    directions = "xy"
    down_weight = "x,y"
    matrix_product = SummaMatrixProduct

    @classmethod
    def default_grid(cls, ranks: int) -> tuple[int, ...]:
        q = math.isqrt(ranks)
        if q * q != ranks:
            raise ValueError(f"{ranks} ranks are no square: start {q * q} or {(q + 1) ** 2}")
        return (q, q)

    @classmethod
    def check_grid(cls, grid: GridShape) -> None:
        if grid["x"] != grid["y"]:
            raise ValueError(f"scheme {cls.name!r} needs a square grid, not {grid}")

    @classmethod
    def layouts(cls, sizes: dict[str, int], batch: int, seq: int,
                **options: Any) -> tuple[SpaceLayout, SpaceLayout]:
        # Blocks are broadcast, not gathered, so they are not allocated as parts of a gathered
        # array, in which their rows would not be contiguous.
        return ("x,", "y", "y@x", ""), ("x,", "y", "y@x", "")

    def product(self, source: Space, target: Space, shape: tuple[int, ...],
                units: tuple[int, int]) -> Product:
        last = len(shape) - 1
        weight = Layout("x" + "," * last + "y", {0: units[0], last: units[1]})
        a = Split(self.grid.y, -1, shape[0], units[0])
        return SummaProduct(a, weight.split(self.grid, shape, "x"), weight,
                            self.matrix_product.ALGORITHMS)

    @classmethod
    def product_moves(cls, sizes: Mapping[str, int], product: ProductShape,
                      **options: Any) -> tuple[list[Move], list[Move]]:
        """List the broadcasts of A and of B; backward adds the sums of each gradient."""
        A, B, *sums = cls._moves(sizes, product)
        return [A, B], [A, B, A._replace(collective="reduce"), *sums]

    @classmethod
    def transposed_moves(cls, sizes: Mapping[str, int], product: ProductShape,
                         **options: Any) -> tuple[list[Move], list[Move]]:
        """List the broadcasts of B and the sums of A; backward broadcasts dA twice, and no C."""
        A, B, *sums = cls._moves(sizes, product)
        return [B, A._replace(collective="reduce")], [A, B, A, *sums]

    @classmethod
    def _moves(cls, sizes: Mapping[str, int], product: ProductShape) -> list[Move]:
        """List the broadcasts of A and of B in A B, and the sums of dB = A^T dC."""
        (M, N, K), moves = product.extents, cls.matrix_product.forward_moves
        return moves(sizes, "ab", (M, N, K)) + moves(sizes, "atb", (N, M, K))[1:]
