"""Spaces: how activations, and the vectors along their features, lie on the grid."""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any, Callable, Mapping

from mm3d.axis import Axis, Split
from mm3d.backend import Array, namespace
from mm3d.functional import (add_rows, bias_gelu_backward, bias_gelu_forward, scale_rows,
                             sum_products, sum_rows)
from mm3d.grid import Grid
from mm3d.layout import Layout
from mm3d.shape import GridShape


@dataclass(frozen=True)
class Space:
    """How activations (batch, sequence, ..., features) lie on the grid.

    Attributes
    ----------
    grid : Grid or GridShape
        The ranks; their shape is enough for layouts and the shapes of blocks.
    batch, seq : int
        Global number of sequences, and of positions in each.
    rows : str
        Layout of the first two dimensions, as in ``"xy,"`` or ``"x,y"``.
    features : str
        The directions that divide the last dimension.
    vector : str
        Layout of a vector along the features (a bias), as in ``"zx@y"``.
    travels : str
        The direction along which products gather or broadcast these activations; empty when
        they use them where they lie.
    """

    grid: Grid | GridShape
    batch: int
    seq: int
    rows: str
    features: str
    vector: str
    travels: str = ""

    def layout(self, middle: int = 0, unit: int = 1) -> Layout:
        """Layout of an activation with `middle` whole dimensions before the features."""
        spec = ",".join([self.rows, *[""] * middle, self.features])
        return Layout(spec, {2 + middle: unit})

    def local_shape(self, *features: int, unit: int = 1,
                    coords: Mapping[str, int] | None = None) -> tuple[int, ...]:
        """Shape of a block of an activation of (batch, seq, *features).

        That of the rank at `coords`; of this rank, if not given and the grid is live.
        """
        layout = self.layout(len(features) - 1, unit)
        return layout.local_shape(self.grid, (self.batch, self.seq, *features), coords)

    def allocator(self, *features: int, unit: int = 1) -> Callable[[Any], Array]:
        """What makes, from a dtype, this rank's block of an activation (batch, seq, *features).

        Where the layers obtain their activations: the memory is placed for the direction that
        they travel along.  Every rank must call it.
        """
        layout, shape = self.layout(len(features) - 1, unit), (self.batch, self.seq, *features)
        local = layout.local_shape(self.grid, shape)
        source = self.grid.backend
        if self.travels:
            source = layout.split(self.grid, shape, self.travels)
        return partial(source.empty, local)

    def rows_split(self, letter: str) -> Split:
        """How the direction `letter` divides the rows."""
        return Layout(self.rows).split(self.grid, (self.batch, self.seq), letter)

    @property
    def sequence(self) -> Axis | None:
        """The direction that divides the positions of a sequence, if one does."""
        letter = self.rows.partition(",")[2]
        return self.grid[letter] if letter and self.grid[letter].size > 1 else None

    @property
    def first_position(self) -> int:
        """The position in its sequence of this rank's first token."""
        return Layout(self.rows).slices(self.grid, (self.batch, self.seq))[1].start

    def sum_features(self, a: Array) -> Array:
        """The sum of `a` over the ranks that share this rank's rows."""
        for letter in self.features:
            a = self.grid[letter].all_reduce(a)
        return a


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
