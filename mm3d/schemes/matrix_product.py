"""Define the interface of products of plain matrices: C = A B, A B^T and A^T B.

They run the algorithms of the linear layers (`mm3d.schemes.product.Product`) without a model, for
microbenchmarks and checks.
"""

import numbers
from abc import ABC, abstractmethod
from typing import Mapping

from mm3d.arrays.backend import Array
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.grid.axis import Axis
from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout
from mm3d.grid.split import Split
from mm3d.schemes.closed_form import Move

# Extents of A, B and C by form: C = A B, A B^T and A^T B.
FORMS = {"ab": ("MN", "NK", "MK"), "abt": ("MN", "KN", "MK"), "atb": ("NM", "NK", "MK")}
LOCAL_PRODUCTS = {"ab": matmul, "abt": matmul_nt, "atb": matmul_tn}
# The gradients are such products, too.  By form: form and operands of dA, then of dB; "C" is dC.
GRADIENT_PRODUCTS = {"ab": (("abt", "CB"), ("atb", "AC")), "abt": (("ab", "CB"), ("atb", "CA")),
                     "atb": (("abt", "BC"), ("ab", "AC"))}


def matrix_shapes(form: str, shape: tuple[int, int, int]) -> dict[str, tuple[int, int]]:
    """Return the global shapes of A, B and C of a form; `shape` is M, N, K."""
    extents = dict(zip("MNK", shape))
    return {name: (extents[rows], extents[columns])
            for name, (rows, columns) in zip("ABC", FORMS[form])}


def element_counts(form: str, shape: tuple[int, int, int]) -> dict[str, int]:
    """Count the elements of A, B and C of a form; `shape` is M, N, K."""
    return {name: rows * columns for name, (rows, columns) in matrix_shapes(form, shape).items()}


class MatrixProduct(ABC):
    """Compute C = A B, A B^T or A^T B of matrices divided over a grid, and its gradients.

    Every element of A, B and C is stored on one rank before and after the product, or, along
    directions that a layout does not name, on all ranks alike.

    Parameters
    ----------
    grid : Grid
        The ranks.
    form : {"ab", "abt", "atb"}
        The product.
    shape : tuple of int
        M, N, K: C is M x K, a sum of N terms.  ValueError when one is no whole number of at least
        1, or there is no such form.

    Attributes
    ----------
    shapes, layouts, directions : dict
        Global shapes of "A", "B" and "C", their layouts, and the directions along which they are
        communicated in this form.
    """

    LAYOUTS: Mapping[str, tuple[str, str, str]]    # of A, B, C by form; each scheme defines them
    # Along which they are communicated, None for a matrix that is not; each scheme defines them.
    DIRECTIONS: Mapping[str, tuple[str | None, str | None, str | None]]

    def __init__(self, grid: Grid, form: str, shape: tuple[int, int, int]) -> None:
        if form not in FORMS or len(shape) != 3 or not all(
                isinstance(n, numbers.Integral) and n > 0 for n in shape):
            raise ValueError(f"a product {form!r} of {shape}: {', '.join(FORMS)}, and three whole "
                             f"numbers M, N, K of at least 1, would do")
        self.grid, self.form, self.shape = grid, form, shape
        self.shapes = matrix_shapes(form, shape)
        self.layouts = dict(zip("ABC", map(Layout, self.LAYOUTS[form])))
        self.directions = dict(zip("ABC", self.DIRECTIONS[form]))
        self._splits: dict[str, Split] = {}

    def __repr__(self) -> str:
        words = sum(move.words for move in self.forward_moves(self.grid.shape, self.form,
                                                              self.shape))
        rows = [f"\n  {name} {full} as {layout.spec!r}, here {layout.local_shape(self.grid, full)}"
                + f", travels along {along}" * bool(along) for (name, full), layout, along in zip(
                    self.shapes.items(), self.layouts.values(), self.directions.values())]
        return (f"{type(self).__name__} {self.form} on {self.grid!r}; words of all ranks forward: "
                f"{words}{''.join(rows)}")

    def observed_split(self, split: Split | Axis, name: str) -> Split | Axis:
        """Return `split`, which communicates the matrix `name`; observers wrap this method."""
        return split

    def split(self, name: str) -> Split:
        """Return the `Split` of the matrix `name` along its direction of communication."""
        if name not in self._splits:
            self._splits[name] = self.layouts[name].split(self.grid, self.shapes[name],
                                                          self.directions[name])
        return self.observed_split(self._splits[name], name)

    @classmethod
    @abstractmethod
    def forward_moves(cls, sizes: Mapping[str, int], form: str,
                      shape: tuple[int, int, int]) -> list[Move]:
        """List the collectives of `forward` on a grid of these sizes, with exact words."""

    @abstractmethod
    def forward(self, A: Array, B: Array) -> Array:
        """Compute C from this rank's blocks of A and B."""

    @abstractmethod
    def backward(self, dC: Array, A: Array, B: Array) -> tuple[Array, Array]:
        """Compute dA and dB from this rank's blocks, in the layouts of A and B."""
