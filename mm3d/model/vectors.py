"""Add and multiply vectors stored on the diagonal of the grid: Algorithms 7 and 8 of the paper.

The vectors are biases and weights of layer norms.  Algorithm 7 gathers this rank's part of a
vector from the ranks that store it.  Algorithm 8 reduces the gradient onto them; the reduction
that its printed form lacks is included.  Functions of backward return a rank's term of the
gradient, the sum over its own rows, which `Vector.reduce_gradient` adds up.
"""

import math
from itertools import islice
from typing import Any, Container, Sequence

from mm3d.arrays.backend import Array, backend_of, namespace
from mm3d.grid.activations import Space
from mm3d.grid.layout import Layout, divided_directions
from mm3d.grid.split import Gathered, JoinedSplit
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
        for split in self._sub:
            db = split.reduce_scatter(db)
        for axis in self._copies:    # of the part that is left: the fewest words
            db = axis.all_reduce(db)
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
    """Join vectors of one space, beyond the directions that divide their features further."""

    def __init__(self, vectors: Sequence[Vector]) -> None:
        first = vectors[0]
        self.space, self._sub = first.space, []
        self._line, self._root, self._copies = first._line, first._root, first._copies
        self.stored = [vector._block for vector in vectors]
        self._block = (sum(map(math.prod, self.stored)),)


class FlatVectors:
    """Join vectors, of one or both spaces: each call of a collective takes all that it can.

    These are Algorithms 7 and 8 of all of them, with the same words.

    Parameters
    ----------
    spaces : sequence of sequence of Vector
        The vectors of each space, which the same further directions divide.
    """

    def __init__(self, spaces: Sequence[Sequence[Vector]]) -> None:
        self._lines, self._sub = [FlatVector(vectors) for vectors in spaces], []
        shapes = [shape for line in self._lines for shape in line.stored]
        for splits in zip(*(reversed(vector._sub) for vectors in spaces for vector in vectors)):
            self._sub.insert(0, JoinedSplit(splits, shapes))
            shapes = self._sub[0].shapes
        self._gathered = shapes

    def gather_features(self, blocks: Sequence[Array]) -> list[Array]:
        """Gather this rank's features of each vector from the stored blocks."""
        rest, parts = iter(blocks), []
        for line in self._lines:
            parts.append(line.gather_features(_join([*islice(rest, len(line.stored))])))
        flat = _join(parts)
        for split in reversed(self._sub):
            flat = split.all_gather(flat)
        return _cut(flat, self._gathered)

    def reduce_gradient(self, terms: Sequence[Array]) -> list[Array | None]:
        """Sum each of the terms onto the ranks that store its block."""
        flat, found = _join(terms), []
        for split in self._sub:
            flat = split.reduce_scatter(flat)
        for line, part in zip(self._lines, _cut(flat, [line._block for line in self._lines])):
            db = line.reduce_gradient(part)
            found += [None] * len(line.stored) if db is None else _cut(db, line.stored)
        return found


class JoinedVectors:
    """Gather the vectors of several parameters, or sum their gradients, together.

    Parameters
    ----------
    spaces : sequence of sequence of (Parameter, Vector)
        The parameters of each space, with their storage.
    flat : FlatVectors, optional
        That of their vectors.
    """

    def __init__(self, spaces: Sequence[Sequence[tuple[Any, Vector]]],
                 flat: FlatVectors | None = None) -> None:
        self._spaces = spaces
        self.parameters = [parameter for uses in spaces for parameter, _ in uses]
        self.flat = flat or FlatVectors([[vector for _, vector in uses] for uses in spaces])

    def gather(self) -> list[Array]:
        """Gather this rank's features of each vector, see `Vector.gather_features`."""
        return self.flat.gather_features([parameter.value for parameter in self.parameters])

    def accumulate(self, terms: Sequence[Array]) -> None:
        """Add the sums of all ranks' terms to the gradients, see `Vector.reduce_gradient`."""
        for parameter, db in zip(self.parameters, self.flat.reduce_gradient(terms), strict=True):
            parameter.accumulate(db)

    def part(self, parameters: Container[Any]) -> "JoinedVectors":
        """Return some of them; itself for all."""
        if all(parameter in parameters for parameter in self.parameters):
            return self
        chosen = ([use for use in uses if use[0] in parameters] for uses in self._spaces)
        return JoinedVectors([uses for uses in chosen if uses])


def _join(blocks: Sequence[Array]) -> Array:
    """Copy arrays to a flat one, one after another; a single one is viewed."""
    flats = [_flat(block) for block in blocks]
    if len(flats) == 1:
        return flats[0]
    sizes, start = [math.prod(block.shape) for block in blocks], 0
    whole = backend_of(blocks[0]).empty((sum(sizes),), blocks[0].dtype)
    for size, flat in zip(sizes, flats):
        whole[start:start + size] = flat
        start += size
    return whole


def _cut(flat: Array, shapes: Sequence[tuple[int, ...]]) -> list[Array]:
    """View the arrays in a flat one, in the order in which they are joined."""
    found, start, xp = [], 0, namespace(flat)
    for shape in shapes:
        size = math.prod(shape)
        found.append(xp.reshape(flat[start:start + size], shape))
        start += size
    return found


def join_vectors(uses: Sequence[tuple[Any, Vector]]) -> dict[int, JoinedVectors]:
    """Join the vectors of each block of a model that the same further directions divide.

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
    groups: dict[tuple, dict[tuple, list]] = {}
    for parameter, vector in uses:
        if vector.travels:
            space = vector.space
            further = tuple(split.axis.name for split in vector._sub)
            groups.setdefault((*parameter.name.split(".")[:2], further), {}).setdefault(
                (space.rows, space.features, space.vector), []).append((parameter, vector))
    found, flats = {}, {}    # blocks are alike
    for spaces in groups.values():
        key = tuple((*one, *((vector.shape, *vector.layout.units.items()) for _, vector in group))
                    for one, group in spaces.items())
        joined = JoinedVectors([*spaces.values()], flats.get(key))
        flats[key] = joined.flat
        found |= {id(parameter): joined for parameter in joined.parameters}
    return found
