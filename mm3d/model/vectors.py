"""Add and multiply vectors stored on the diagonal of the grid: Algorithms 7 and 8 of the paper.

The vectors are biases and weights of layer norms.  Algorithm 7 gathers this rank's part of a
vector from the ranks that store it.  Algorithm 8 reduces the gradient onto them; the reduction
that its printed form lacks is included.  Functions of backward return a rank's term of the
gradient, the sum over its own rows, which `Vector.reduce_gradient` adds up.
"""

import math

from mm3d.arrays.backend import Array, reshape
from mm3d.grid.activations import Space
from mm3d.grid.layout import Layout, divided_directions
from mm3d.grid.split import Gathered
from mm3d.model.functional import (add_rows, bias_gelu_backward, bias_gelu_forward,
                                   prefer_backend_kernel, scale_rows, sum_products, sum_rows)


class Vector:
    """Describe a vector along the features of a space, stored once and gathered for use.

    This is the paper's balanced storage, for any scheme.  The vector's layout divides it like the
    features, and then once more by directions that divide rows.  On the side of A the layout is
    ``"zx@y"``, which stores b_li on the diagonal j = l; on the side of C it is ``"yx@z"``, which
    stores b_ji on the same diagonal.

    Parameters
    ----------
    space : Space
        The space along whose features the vector lies.
    shape : tuple of int
        Global shape; the last dimension is the features.
    unit : int
        Number of neighbouring features that stay together where the space divides them.

    Attributes
    ----------
    layout : Layout
        Layout of the stored blocks.
    sub : list of Split
        How the further directions divide this rank's features of it.
    copies : list of Axis
        Directions of ranks that have other rows, and store the same block.
    line, root : Axis or None, int or None
        The direction after '@' in the layout, and its rank on the diagonal.
    block : tuple of int
        Shape of the block that is stored on the diagonal of this rank's line.
    """

    def __init__(self, space: Space, shape: tuple[int, ...], unit: int = 1) -> None:
        self.space, self.shape, grid = space, tuple(shape), space.grid
        spec = "," * (len(shape) - 1) + space.vector
        self.layout = Layout(spec, {len(shape) - 1: unit})
        self.line = grid[self.layout.diagonal] if self.layout.diagonal else None
        self.root = None if self.line is None else self.layout.diagonal_rank(grid)
        further = self.layout.letters[len(space.features):]
        self.sub = [self.layout.split(grid, self.shape, letter) for letter in further]
        self.copies = [grid[c] for c in divided_directions(space.rows)
                       if c not in self.layout.named]
        coords = dict(grid.coords)
        if self.line is not None:
            coords[self.line.name] = self.root
        self.block = self.layout.local_shape(grid, self.shape, coords)

    @property
    def travels(self) -> bool:
        """Return whether gathers or sums of gradients call any collective."""
        axes = [*self.copies, self.line, *(split.axis for split in self.sub)]
        return any(axis is not None and axis.size > 1 for axis in axes)

    def gather_features(self, b: Array | Gathered) -> Array:
        """Gather the features of this rank, b_l or b_j, from the stored blocks (Algorithm 7).

        Every rank must call it.

        Parameters
        ----------
        b : Array or Gathered
            This rank's stored block, empty on ranks that store none; or the gathered vector.

        Returns
        -------
        Array
            The part of the vector that belongs to this rank's features.
        """
        if isinstance(b, Gathered):
            return b.array
        if self.line is not None:
            if self.line.rank != self.root:
                b = self.space.grid.backend.empty(self.block, b.dtype)
            b = self.line.broadcast(b, self.root)
        for split in reversed(self.sub):
            b = split.all_gather(b)
        return b

    def reduce_gradient(self, db: Array) -> Array | None:
        """Sum `db` over all ranks that share these features, onto the ranks that store blocks.

        This is Algorithm 8 with the reduction that it lacks: a reduce-scatter along x *and* a
        reduction along y (z on the side of C) onto the diagonal.  Every rank must call it.

        Parameters
        ----------
        db : Array
            This rank's term, the sum over its rows; the shape is that of `gather_features`.

        Returns
        -------
        Array or None
            The stored block of the sum; None on ranks that store none.
        """
        for split in self.sub:
            db = split.reduce_scatter(db)
        for axis in self.copies:    # of the part that is left, so the fewest words
            db = axis.all_reduce(db)
        if self.line is not None:
            db = self.line.reduce(db, self.root)
        return db


def _rows(a: Array) -> Array:
    """View `a` as (batch, positions, features), with its feature dimensions joined."""
    return a if a.ndim == 3 else reshape(a, (*a.shape[:2], math.prod(a.shape[2:])))


def _flat(b: Array) -> Array:
    """View a vector along the features as one dimension."""
    return b if b.ndim == 1 else reshape(b, (math.prod(b.shape),))


def add_forward(A: Array, b: Array | Gathered, vector: Vector, out: Array) -> Array:
    """Compute C = A + b, the vector b added to every row (Algorithm 7).

    b is this rank's stored block of the vector, or the gathered vector; `out` may be `A`.
    """
    add_rows(_rows(A), _flat(vector.gather_features(b)), out=_rows(out))
    return out


def add_backward(dC: Array, accumulate_float32: bool = False) -> Array:
    """Compute this rank's term of db, the sum of dC over its rows; dA is dC itself.

    With `accumulate_float32` the sum is computed and returned in float32 at least.
    """
    db = sum_rows(_rows(dC), accumulate_float32)
    return reshape(db, dC.shape[2:])


def scale_forward(A: Array, b: Array | Gathered, vector: Vector, out: Array,
                  added: Array | Gathered | None = None) -> tuple[Array, Array]:
    """Compute C = A * b, every row multiplied by the vector b; return C and the gathered b_l.

    Parameters as in `add_forward`; the vector `added` is added to every row of C.
    """
    b_l = vector.gather_features(b)
    if added is None:
        scale_rows(_rows(A), _flat(b_l), out=_rows(out))
    else:
        scale_add_rows(_rows(A), _flat(b_l), _flat(vector.gather_features(added)), out=_rows(out))
    return out, b_l


def scale_backward(dC: Array, A: Array, b_l: Array, out: Array, accumulate_float32: bool = False,
                   added: bool = False) -> tuple[Array, ...]:
    """Compute dA = dC * b_l in `out`, and this rank's term of db, the sum of dC * A over its rows.

    dA needs the gathered b_l, not the stored block.  `accumulate_float32` is as in `add_backward`.
    Where a vector was added to C, with `added`, its term is the third result.
    """
    sums = sum_rows_and_products if added else sum_products
    found = sums(_rows(dC), _rows(A), accumulate_float32)
    scale_rows(_rows(dC), _flat(b_l), out=_rows(out))
    return out, *(reshape(db, dC.shape[2:]) for db in (reversed(found) if added else [found]))


@prefer_backend_kernel
def scale_add_rows(a: Array, b: Array, c: Array, out: Array) -> Array:
    """Compute a * b + c, with both vectors for every row of `a`.

    Parameters as in `mm3d.model.functional.add_rows`.
    """
    return add_rows(scale_rows(a, b, out), c, out)


@prefer_backend_kernel
def sum_rows_and_products(a: Array, b: Array, keep_float32: bool = False) -> tuple[Array, Array]:
    """Sum a, and a * b, over all rows; as `mm3d.model.functional.sum_rows`."""
    return sum_rows(a, keep_float32), sum_products(a, b, keep_float32)


def add_gelu_forward(A: Array, b: Array | Gathered, vector: Vector,
                     out: Array) -> tuple[Array, Array]:
    """Compute C = GELU(A + b), b added to every row; return C and the gathered b_l.

    Parameters as in `add_forward`.
    """
    b_l = vector.gather_features(b)
    bias_gelu_forward(_rows(A), _flat(b_l), out=_rows(out))
    return out, b_l


def add_gelu_backward(dC: Array, A: Array, b_l: Array, out: Array,
                      accumulate_float32: bool = False) -> tuple[Array, Array]:
    """Compute dA = dC GELU'(A + b_l) in `out`, and this rank's term of db, the sum of dA.

    `accumulate_float32` is as in `add_backward`.
    """
    _, db = bias_gelu_backward(_rows(dC), _rows(A), _flat(b_l), _rows(out), accumulate_float32)
    return out, reshape(db, dC.shape[2:])
