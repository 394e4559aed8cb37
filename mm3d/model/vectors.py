"""Biases and norm weights on the diagonal of the grid: algorithms 7 and 8."""

import math

from mm3d.arrays.backend import Array, namespace
from mm3d.grid.activations import Space
from mm3d.grid.layout import Layout
from mm3d.model.functional import (add_rows, bias_gelu_backward, bias_gelu_forward, scale_rows,
                                   sum_products, sum_rows)


class Vector:
    """A vector along the features of a space: stored once, used by all who hold rows.

    The paper's balanced storage, for any scheme: the vector's layout divides it like the
    features and then again by directions that hold rows; on the side of A that is ``"zx@y"``,
    b_li on the diagonal j = l, on the side of C ``"yx@z"``, b_ji on the same diagonal.

    Parameters
    ----------
    space : Space
        Whose features it runs along.
    shape : tuple of int
        Global shape; the last dimension is the features.
    unit : int
        Features that stay together where the space divides them.
    """

    def __init__(self, space: Space, shape: tuple[int, ...], unit: int = 1) -> None:
        self.space, self.shape, grid = space, tuple(shape), space.grid
        spec = "," * (len(shape) - 1) + space.vector
        self.layout = Layout(spec, {len(shape) - 1: unit})
        self._line = grid[self.layout.diagonal] if self.layout.diagonal else None
        extra = self.layout.letters[len(space.features):]
        self._sub = [self.layout.split(grid, self.shape, letter) for letter in extra]
        held = self.layout.letters + (self.layout.diagonal or "")
        self._copies = [grid[c] for c in space.rows.replace(",", "") if c not in held]
        coords = dict(grid.coords)
        if self._line is not None:
            self._root = coords[self._line.name] = self.layout.root(grid)
        self._block = self.layout.local_shape(grid, self.shape, coords)

    def fetch(self, b: Array) -> Array:
        """The features of this rank, b_l or b_j, from the stored blocks (Algorithm 7)."""
        if self._line is not None:
            if self._line.rank != self._root:
                b = self.space.grid.backend.empty(self._block, b.dtype)
            b = self._line.broadcast(b, self._root)
        for split in reversed(self._sub):
            b = split.all_gather(b)
        return b

    def collect(self, db: Array) -> Array | None:
        """The stored block of the sum of `db` over all ranks that hold rows.

        Algorithm 8 with the reduction that it leaves out: reduce-scatter along x *and* reduce
        along y (z on the side of C) onto the diagonal.  Every rank of a line takes part in
        both; None is returned where no block is stored.
        """
        for axis in self._copies:
            db = axis.all_reduce(db)
        for split in self._sub:
            db = split.reduce_scatter(db)
        if self._line is not None:
            db = self._line.reduce(db, self._root)
        return db


def _rows(a: Array) -> Array:
    """`a` as (batch, positions, features), whatever its features are."""
    return namespace(a).reshape(a, (*a.shape[:2], math.prod(a.shape[2:])))


def _flat(b: Array) -> Array:
    """A vector along the features with one dimension."""
    return namespace(b).reshape(b, (math.prod(b.shape),))


def add_forward(A: Array, b: Array, vector: Vector, out: Array) -> Array:
    """C = A + b, the vector b added to every row (Algorithm 7)."""
    add_rows(_rows(A), _flat(vector.fetch(b)), out=_rows(out))
    return out


def add_backward(dC: Array, vector: Vector, accumulate_float32: bool = False) -> Array | None:
    """db = the sum of dC over all rows (Algorithm 8, corrected); dA is dC itself.

    With `accumulate_float32` it is summed, also over the ranks, and returned in float32 at least.
    """
    db = sum_rows(_rows(dC), accumulate_float32)
    return vector.collect(namespace(dC).reshape(db, dC.shape[2:]))


def scale_forward(A: Array, b: Array, vector: Vector, out: Array) -> tuple[Array, Array]:
    """C = A * b, every row times the vector b; returns also b_l, which backward needs."""
    b_l = vector.fetch(b)
    scale_rows(_rows(A), _flat(b_l), out=_rows(out))
    return out, b_l


def scale_backward(dC: Array, A: Array, b_l: Array, vector: Vector,
                   out: Array, accumulate_float32: bool = False) -> tuple[Array, Array | None]:
    """dA = dC * b_l, with the gathered b_l, and db = the sum of dC * A over all rows.

    `accumulate_float32` as in `add_backward`.
    """
    db = sum_products(_rows(dC), _rows(A), accumulate_float32)
    scale_rows(_rows(dC), _flat(b_l), out=_rows(out))
    return out, vector.collect(namespace(dC).reshape(db, dC.shape[2:]))


def gelu_forward(A: Array, b: Array, vector: Vector, out: Array) -> tuple[Array, Array]:
    """C = GELU(A + b), the vector b added to every row; returns also b_l, for backward."""
    b_l = vector.fetch(b)
    bias_gelu_forward(_rows(A), _flat(b_l), out=_rows(out))
    return out, b_l


def gelu_backward(dC: Array, A: Array, b_l: Array, vector: Vector, out: Array,
                  accumulate_float32: bool = False) -> tuple[Array, Array | None]:
    """dA = dC times the slope of GELU at A + b, with the gathered b_l, and db = the sum of dA
    over all rows.

    `accumulate_float32` as in `add_backward`.
    """
    _, db = bias_gelu_backward(_rows(dC), _rows(A), _flat(b_l), _rows(out), accumulate_float32)
    return out, vector.collect(namespace(dC).reshape(db, dC.shape[2:]))
