"""Define products of matrices in blocks of rows and columns, two of which move in each form."""

from abc import abstractmethod
from typing import Callable, Mapping

from mm3d.arrays.backend import Array
from mm3d.grid.split import Split
from mm3d.schemes.matrix_product import FORMS, GRADIENT_PRODUCTS, MatrixProduct

# By form: the matrices that move along y and along x.
MOVED_MATRICES = {"ab": "AB", "abt": "CB", "atb": "AC"}


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
