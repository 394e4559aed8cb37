"""Implement 3-D products with operands on faces of the grid, the storage that the paper improves.

Section 3.1.1 of arXiv 2105.14450 begins with the intuitive storage: A_il lies on the rank (i, 0,
l), B_lj on (0, j, l) and C_ij on (i, j, 0).  A is broadcast along y and B along x, each rank
multiplies once, and C is reduced along z (Dekel, Nassimi and Sahni, 1981).  All ranks multiply the
same amount, but only the ranks of a face store an operand and do the elementwise work on it; rank
(0, 0, 0), which is on all three, stores most.

These are the paper's algorithms of `mm3d.schemes.cube` with other blocks: the whole of each on
the first rank of a line, instead of a part on every rank.  So C, with y and z exchanged, is the A
of the next product, and gradients are products of the same three forms.
"""

from typing import Any, Mapping

from mm3d.schemes.closed_form import ON_FACES, Move, ProductShape
from mm3d.schemes.cube import Cube, CubeMatrixProduct
from mm3d.schemes.scheme import SpaceLayout


class FacesMatrixProduct(CubeMatrixProduct):
    """Compute C = A B, A B^T or A^T B of matrices, each on one face of the grid."""

    LAYOUTS = {"ab": ("xy0,z", "z,yx0", "xz0,y"), "abt": ("xy0,z", "y,zx0", "xz0,y"),
               "atb": ("xz0,y", "xy0,z", "y,zx0")}

    @classmethod
    def forward_moves(cls, sizes: Mapping[str, int], form: str,
                      shape: tuple[int, int, int]) -> list[Move]:
        """List the broadcasts of A and B and the reduction of C, each along its direction."""
        return [move._replace(collective=ON_FACES[move.collective])
                for move in super().forward_moves(sizes, form, shape)]


class Faces(Cube):
    """Store matrices on faces of an X x Y x Z grid, and multiply on all of its ranks.

    Outer activations lie on the face y = 0, inner ones on z = 0, weights on x = 0, and vectors on
    the edges of the grid where the faces meet.
    """

    name = "faces"
    title = "Faces"
    down_weight = "y,zx0"
    layer_weight = "{of_A}{commas}{of_C}x0"
    matrix_product = FacesMatrixProduct
    options = {}

    @classmethod
    def layouts(cls, sizes: dict[str, int], batch: int, seq: int,
                **options: Any) -> tuple[SpaceLayout, SpaceLayout]:
        return ("xy0,", "z", "zx0y0", ""), ("xz0,", "y", "yx0z0", "")

    @classmethod
    def product_moves(cls, sizes: Mapping[str, int], product: ProductShape,
                      **options: Any) -> tuple[list[Move], list[Move]]:
        """List the moves of the balanced algorithms, by other collectives.

        A rank that stores no A receives MN/(XZ) words of it; the ranks of the face send them.
        """
        forward, backward = super().product_moves(sizes, product)
        return tuple([move._replace(collective=ON_FACES[move.collective]) for move in moves]
                     for moves in (forward, backward))
