"""Define the interface of products of plain matrices: C = A B, A B^T and A^T B.

They run the algorithms of the linear layers (`mm3d.schemes.product.Product`) without a model, for
microbenchmarks and checks.
"""

from abc import ABC, abstractmethod
from typing import Callable, Mapping, Sequence

from mm3d.arrays.backend import Array
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.grid.axis import Axis
from mm3d.grid.grid import Grid
from mm3d.grid.layout import Layout
from mm3d.grid.shape import GridShape
from mm3d.grid.split import Split
from mm3d.schemes.closed_form import Move

# Extents of A, B and C by form: C = A B, A B^T and A^T B.
FORMS = {"ab": ("MN", "NK", "MK"), "abt": ("MN", "KN", "MK"), "atb": ("NM", "NK", "MK")}
LOCAL_PRODUCTS = {"ab": matmul, "abt": matmul_nt, "atb": matmul_tn}
# The gradients are again products.  By form: the form and the operands of dA, then of dB; "C" is
# dC.
GRADIENT_PRODUCTS = {"ab": (("abt", "CB"), ("atb", "AC")), "abt": (("ab", "CB"), ("atb", "CA")),
                     "atb": (("abt", "BC"), ("ab", "AC"))}
# By form: the matrices of a `BlockMatrixProduct` that move along y and along x.
MOVED_MATRICES = {"ab": "AB", "abt": "CB", "atb": "AC"}


def element_counts(form: str, shape: tuple[int, int, int]) -> dict[str, int]:
    """Count the elements of A, B and C of a form; `shape` is M, N, K."""
    extents = dict(zip("MNK", shape))
    return {name: extents[rows] * extents[columns]
            for name, (rows, columns) in zip("ABC", FORMS[form])}


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
        M, N, K: C is M x K, a sum of N terms.

    Attributes
    ----------
    LAYOUTS : mapping of str to tuple of str
        Layouts of A, B and C by form; each scheme defines them.
    DIRECTIONS : mapping of str to sequence of str or None
        Directions along which A, B and C are communicated, by form, and None for a matrix that is
        not communicated; each scheme defines them.
    shapes : dict of str to tuple of int
        Global shapes of "A", "B" and "C".
    layouts : dict of str to Layout
        Their layouts.
    directions : dict of str to str or None
        The directions along which they are communicated.
    """

    LAYOUTS: Mapping[str, tuple[str, str, str]]
    DIRECTIONS: Mapping[str, tuple[str | None, str | None, str | None]]

    def __init__(self, grid: Grid, form: str, shape: tuple[int, int, int]) -> None:
        extents = dict(zip("MNK", shape))
        self.grid, self.form = grid, form
        self.shapes = {name: tuple(extents[n] for n in letters)
                       for name, letters in zip("ABC", FORMS[form])}
        self.layouts = dict(zip("ABC", map(Layout, self.LAYOUTS[form])))
        self.directions = dict(zip("ABC", self.DIRECTIONS[form]))
        self._splits: dict[str, Split] = {}

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
    def forward_moves(cls, sizes: Mapping[str, int], form: str,
                      shape: tuple[int, int, int]) -> list[Move] | None:
        """List the collectives of `forward` on a grid of these sizes; None if not stated.

        Their words, over all ranks, are exact for any sizes.
        """
        return None

    @classmethod
    def copied_along(cls, sizes: Mapping[str, int], form: str, name: str) -> str:
        """Return the directions along which all ranks store the same of "A", "B" or "C"."""
        layout = Layout(cls.LAYOUTS[form]["ABC".index(name)])
        return "".join(direction for direction, size in sizes.items()
                       if size > 1 and direction not in layout.letters)

    @abstractmethod
    def forward(self, A: Array, B: Array) -> Array:
        """Compute C from this rank's blocks of A and B."""

    @abstractmethod
    def backward(self, dC: Array, A: Array, B: Array) -> tuple[Array, Array]:
        """Compute dA and dB from this rank's blocks, in the layouts of A and B."""


class BlockMatrixProduct(MatrixProduct):
    """Multiply matrices whose rows are divided along x and columns along y.

    Each form has an algorithm in which two of the three matrices move, one along y and one along
    x.  The gradients are products of other forms, by their algorithms.

    Attributes
    ----------
    ALGORITHMS : mapping of str to callable
        The algorithm of each form; each scheme defines them.
    """

    LAYOUTS = dict.fromkeys(FORMS, ("x,y", "x,y", "x,y"))
    ALGORITHMS: Mapping[str, Callable[..., Array]]

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


class GridAlgorithm(ABC):
    """Name an algorithm, and state the grids that it runs on.

    `mm3d.schemes.scheme.Scheme` has layers as well; `mm3d.schemes.products_alone` multiplies plain
    matrices only.

    Attributes
    ----------
    name : str
        Name by which users choose it.
    title : str
        Name in tables and figures.
    directions : str
        Letters of the grid's directions.
    matrix_product : type of MatrixProduct, optional
        Products of plain matrices by the algorithm; None if it has none of its own.
    """

    name: str
    title: str
    directions: str
    matrix_product: type[MatrixProduct] | None = None

    @classmethod
    @abstractmethod
    def default_grid(cls, ranks: int) -> tuple[int, ...]:
        """Return the default sizes of the directions for `ranks` ranks.

        Raises
        ------
        ValueError
            When there are none.
        """

    @classmethod
    def check_grid(cls, grid: GridShape) -> None:
        """Raise ValueError for a grid that it cannot use."""

    @classmethod
    def grid_shape(cls, sizes: Sequence[int] | GridShape) -> GridShape:
        """Return the shape of the grid with these sizes of its directions.

        Raises
        ------
        ValueError
            When these are other directions, or a size is less than 1.
        """
        given = sizes
        directions, sizes = ((given.directions, given.sizes) if isinstance(given, GridShape)
                             else (cls.directions, tuple(given)))
        if directions != cls.directions or len(sizes) != len(cls.directions):
            raise ValueError(f"the grid of scheme {cls.name!r} has the directions "
                             f"{', '.join(cls.directions) or '(none)'}, so grid={given!r} should "
                             f"have {len(cls.directions)} sizes, one for each")
        return GridShape(cls.directions, sizes)
