"""Add and multiply vectors stored on the diagonal of the grid: Algorithms 7 and 8 of the paper.

The vectors are biases and weights of layer norms.  Algorithm 7 gathers this rank's part of a
vector from the ranks that store it.  Algorithm 8 reduces the gradient onto them; the reduction
that its printed form lacks is included.  Functions of backward return a rank's term of the
gradient, the sum over its own rows, which `Vector.reduce_gradient` adds up.
"""

import math
from typing import Any, Sequence

from mm3d.arrays.backend import Array, namespace
from mm3d.grid.activations import Space
from mm3d.grid.layout import Layout, divided_directions
from mm3d.grid.split import Gathered, JoinedSplit, Split
from mm3d.model.functional import (add_rows, bias_gelu_backward, bias_gelu_forward, scale_rows,
                                   sum_products, sum_rows)


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
    """

    def __init__(self, space: Space, shape: tuple[int, ...], unit: int = 1) -> None:
        self.space, self.shape, grid = space, tuple(shape), space.grid
        spec = "," * (len(shape) - 1) + space.vector
        self.layout = Layout(spec, {len(shape) - 1: unit})
        self._line = grid[self.layout.diagonal] if self.layout.diagonal else None
        self._root = None if self._line is None else self.layout.diagonal_rank(grid)
        extra = self.layout.letters[len(space.features):]
        self._sub = [self.layout.split(grid, self.shape, letter) for letter in extra]
        held = self.layout.letters + (self.layout.diagonal or "")
        self._copies = [grid[c] for c in divided_directions(space.rows) if c not in held]
        coords = dict(grid.coords)
        if self._line is not None:
            coords[self._line.name] = self._root
        self._block = self.layout.local_shape(grid, self.shape, coords)

    @property
    def travels(self) -> bool:
        """Return whether gathers or sums of gradients call any collective."""
        axes = [*self._copies, self._line, *(split.axis for split in self._sub)]
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
        if self._line is not None:
            if self._line.rank != self._root:
                b = self.space.grid.backend.empty(self._block, b.dtype)
            b = self._line.broadcast(b, self._root)
        for split in reversed(self._sub):
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
        for axis in self._copies:
            db = axis.all_reduce(db)
        for split in self._sub:
            db = split.reduce_scatter(db)
        if self._line is not None:
            db = self._line.reduce(db, self._root)
        return db


def _rows(a: Array) -> Array:
    """View `a` as (batch, positions, features), with its feature dimensions joined."""
    return namespace(a).reshape(a, (*a.shape[:2], math.prod(a.shape[2:])))


def _flat(b: Array) -> Array:
    """View a vector along the features as one dimension."""
    return namespace(b).reshape(b, (math.prod(b.shape),))


def add_forward(A: Array, b: Array | Gathered, vector: Vector, out: Array) -> Array:
    """Compute C = A + b, the vector b added to every row (Algorithm 7).

    Parameters
    ----------
    A : Array
        This rank's block of the activation, (batch, positions, ..., features).
    b : Array or Gathered
        This rank's stored block of the vector, or the gathered vector.
    vector : Vector
        Storage of the vector.
    out : Array
        Receives C; may be `A`.
    """
    add_rows(_rows(A), _flat(vector.gather_features(b)), out=_rows(out))
    return out


def add_backward(dC: Array, accumulate_float32: bool = False) -> Array:
    """Compute this rank's term of db, the sum of dC over its rows; dA is dC itself.

    With `accumulate_float32` the sum is computed and returned in float32 at least.
    """
    db = sum_rows(_rows(dC), accumulate_float32)
    return namespace(dC).reshape(db, dC.shape[2:])


def scale_forward(A: Array, b: Array | Gathered, vector: Vector,
                  out: Array) -> tuple[Array, Array]:
    """Compute C = A * b, every row multiplied by the vector b; return C and the gathered b_l.

    Parameters as in `add_forward`.
    """
    b_l = vector.gather_features(b)
    scale_rows(_rows(A), _flat(b_l), out=_rows(out))
    return out, b_l


def scale_backward(dC: Array, A: Array, b_l: Array, out: Array,
                   accumulate_float32: bool = False) -> tuple[Array, Array]:
    """Compute dA = dC * b_l in `out`, and this rank's term of db, the sum of dC * A over its rows.

    dA needs the gathered b_l, not the stored block.  `accumulate_float32` is as in `add_backward`.
    """
    db = sum_products(_rows(dC), _rows(A), accumulate_float32)
    scale_rows(_rows(dC), _flat(b_l), out=_rows(out))
    return out, namespace(dC).reshape(db, dC.shape[2:])


def gelu_forward(A: Array, b: Array | Gathered, vector: Vector,
                 out: Array) -> tuple[Array, Array]:
    """Compute C = GELU(A + b), b added to every row; return C and the gathered b_l.

    Parameters as in `add_forward`.
    """
    b_l = vector.gather_features(b)
    bias_gelu_forward(_rows(A), _flat(b_l), out=_rows(out))
    return out, b_l


def gelu_backward(dC: Array, A: Array, b_l: Array, out: Array,
                  accumulate_float32: bool = False) -> tuple[Array, Array]:
    """Compute dA = dC GELU'(A + b_l) in `out`, and this rank's term of db, the sum of dA.

    `accumulate_float32` is as in `add_backward`.
    """
    _, db = bias_gelu_backward(_rows(dC), _rows(A), _flat(b_l), _rows(out), accumulate_float32)
    return out, namespace(dC).reshape(db, dC.shape[2:])


class FlatVector(Vector):
    """Join vectors of one space to a flat one: a call of a collective takes all of them.

    Algorithms 7 and 8 are those of `Vector`, and so are the words.

    Parameters
    ----------
    vectors : sequence of Vector
        Vectors along the features of one space.

    Attributes
    ----------
    stored, gathered : list of tuple of int
        Shapes of the vectors' blocks where they are stored, and of this rank's features.
    """

    def __init__(self, vectors: Sequence[Vector]) -> None:
        self.space, self.grid = vectors[0].space, vectors[0].grid
        self._line, self._root, self._copies = (
            vectors[0]._line, vectors[0]._root, vectors[0]._copies)
        shapes = self.stored = [vector._block for vector in vectors]
        self._block, self._sub = (sum(map(math.prod, shapes)),), []
        for splits in zip(*(reversed(vector._sub) for vector in vectors)):
            self._sub.insert(0, JoinedSplit(splits, shapes))
            shapes = self._sub[0].shapes
        self.gathered = shapes


class JoinedVectors:
    """Gather the vectors of several parameters, or sum their gradients, together.

    Parameters
    ----------
    uses : sequence of (Parameter, Vector)
        The parameters, with their storage.
    flat : FlatVector, optional
        That of their vectors.
    """

    def __init__(self, uses: Sequence[tuple[Any, Vector]], flat: FlatVector | None = None) -> None:
        self.uses, self.parameters = uses, [parameter for parameter, _ in uses]
        self.flat = flat or FlatVector([vector for _, vector in uses])

    def gather(self) -> list[Array]:
        """Gather this rank's features of each vector, see `Vector.gather_features`."""
        b = self._join([parameter.value for parameter in self.parameters])
        return _cut(self.flat.gather_features(b), self.flat.gathered)

    def accumulate(self, terms: list[Array]) -> None:
        """Add the sums of all ranks' terms to the gradients, see `Vector.reduce_gradient`."""
        db = self.flat.reduce_gradient(self._join(terms))
        parts = [None] * len(terms) if db is None else _cut(db, self.flat.stored)
        for parameter, part in zip(self.parameters, parts):
            parameter.accumulate(part)

    def part(self, parameters: Sequence[Any]) -> "JoinedVectors":
        """Return some of them; itself for all."""
        chosen = [use for use in self.uses if any(use[0] is one for one in parameters)]
        return self if len(chosen) == len(self.uses) else JoinedVectors(chosen)

    def _join(self, blocks: list[Array]) -> Array:
        """Copy arrays to a flat one, one after another; a single one is viewed."""
        flat_blocks = [_flat(block) for block in blocks]
        if len(blocks) == 1:
            return flat_blocks[0]
        sizes = [math.prod(block.shape) for block in blocks]
        flat, start = self.flat.grid.backend.empty((sum(sizes),), blocks[0].dtype), 0
        for size, block in zip(sizes, flat_blocks):
            flat[start:start + size] = block
            start += size
        return flat


def _cut(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """View the arrays in a flat one, in the order in which they are joined."""
    found, start, xp = [], 0, namespace(flat)
    for shape in shapes:
        size = math.prod(shape)
        found.append(xp.reshape(flat[start:start + size], shape))
        start += size
    return found


def join_vectors(uses: Sequence[tuple[Any, Vector]]) -> dict[int, JoinedVectors]:
    """Join the vectors of each block of a model that are stored alike.

    A block is a layer of the Transformer, the first two parts of a parameter's name.  Vectors that
    no rank moves are left out.

    Parameters
    ----------
    uses : sequence of (Parameter, Vector)
        In the order of a forward pass.

    Returns
    -------
    dict
        By the identity of each parameter the vectors that it is joined with.
    """
    groups: dict[tuple, list] = {}
    for parameter, vector in uses:
        if vector.travels:
            space = vector.space
            groups.setdefault((*parameter.name.split(".")[:2], space.rows, space.features,
                               space.vector), []).append((parameter, vector))
    found, flat_ones = {}, {}    # blocks are alike
    for (*_, rows, features, spec), group in groups.items():
        shapes = tuple((vector.shape, *vector.layout.units.items()) for _, vector in group)
        key = rows, features, spec, shapes
        joined = JoinedVectors(group, flat_ones.get(key))
        flat_ones[key] = joined.flat
        found |= {id(parameter): joined for parameter in joined.parameters}
    return found
