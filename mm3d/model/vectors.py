"""Gather vectors stored on the diagonal of the grid, alone or joined: Algorithms 7 and 8.

The vectors are biases and weights of layer norms.  The paper's Algorithm 7 gathers this rank's
part of a vector from the ranks that store it; Algorithm 8 reduces the gradient onto them, with the
reduction that its printed form lacks.  The vectors of a block are joined: their collectives take
all of them in one call.
"""

import math
from copy import copy
from itertools import accumulate, islice
from typing import Any, Container, Sequence

import numpy as np

from mm3d.arrays.backend import Array, backend_of, reshape
from mm3d.arrays.blocks import resized_shape
from mm3d.grid.activations import Space
from mm3d.grid.layout import Layout, divided_directions
from mm3d.grid.split import Split

VectorPlace = tuple[slice, tuple[int, ...]]    # in a flat array, and the shape there


class Vector:
    """Describe a vector along the features of a space, stored once and gathered for use.

    This is the paper's balanced storage, for any scheme.  The vector's layout divides it like the
    features, and then once more by directions that divide rows.  On the side of A the layout is
    ``"zx@y"``, which stores b_li on the diagonal j = l; on the side of C it is ``"yx@z"``, which
    stores b_ji on the same diagonal.

    Its global `shape` ends with the features of `space`, of which so many neighbours as `unit`
    stay together.  The `layout` is of the stored blocks; `sub` says how further directions divide
    this rank's features of it; ranks along `copies` have other rows, and store the same block.
    The direction `line` is that after '@' in the layout, or None; its rank `root` is on the
    diagonal, where a block of the shape `block` is stored.
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

    def gather_features(self, b: Array) -> Array:
        """Gather the features of this rank, b_l or b_j, from the stored blocks (Algorithm 7).

        `b` is this rank's stored block, empty on ranks that store none.  Every rank must call it.
        """
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

        `db` is this rank's term, the sum over its rows, with the shape that `gather_features`
        returns.  The result is the stored block of the sum; None on ranks that store none.
        """
        for split in self.sub:
            db = split.reduce_scatter(db)
        for axis in self.copies:    # of the part that is left, so the fewest words
            db = axis.all_reduce(db)
        if self.line is not None:
            db = self.line.reduce(db, self.root)
        return db


class _JoinedSplit:
    """Divide several arrays, joined to a flat one, along one axis: each like its own `Split`.

    `splits` has one for each array, all along the same `axis`, and `shapes` the shape of this
    rank's block of each; the attribute `shapes` has those before the axis divides them.
    """

    def __init__(self, splits: Sequence[Split], shapes: Sequence[tuple[int, ...]]) -> None:
        self.axis = splits[0].axis
        self.shapes = [resized_shape(shape, split.dim, split.extent)
                       for shape, split in zip(shapes, splits, strict=True)]
        owners = np.concatenate([_owners(split, shape).ravel()
                                 for split, shape in zip(splits, self.shapes)])
        self._flat = copy(splits[0])
        self._flat.dim, self._flat.extent = 0, owners.size
        self._flat.counts = np.bincount(owners, minlength=self.axis.size).tolist()
        # Collectives take the blocks of one rank after another, layers one array after another.
        self._by_rank = self._by_array = None    # where the two orders are the same
        if (owners[1:] < owners[:-1]).any():
            order = np.argsort(owners, kind="stable")
            self._by_rank, self._by_array = map(self.axis.backend.asarray,
                                                (order, np.argsort(order)))

    def all_gather(self, a: Array) -> Array:
        """Gather all arrays from the joined blocks of all ranks."""
        return self._take(self._flat.all_gather(a), self._by_array)

    def reduce_scatter(self, a: Array) -> Array:
        """Sum the joined arrays over the ranks; return this rank's joined blocks."""
        return self._flat.reduce_scatter(self._take(a, self._by_rank))

    def _take(self, a: Array, order: Array | None) -> Array:
        return a if order is None else self.axis.backend.xp.take(a, order)


def _owners(split: Split, shape: tuple[int, ...]) -> np.ndarray:
    """Return the rank that has each element of an array of `shape`."""
    some = min(split.axis.size, split.extent)    # the others have none
    along = np.repeat(np.arange(some), split.counts[:some])
    return np.broadcast_to(along.reshape(resized_shape((1,) * len(shape), split.dim, -1)), shape)


class _FlatVector(Vector):
    """Join vectors of one space, as blocks: further directions are left to `FlatVectors`."""

    def __init__(self, vectors: Sequence[Vector]) -> None:
        first = vectors[0]
        self.space, self.sub = first.space, []
        self.line, self.root, self.copies = first.line, first.root, first.copies
        self.stored = _places([vector.block for vector in vectors])
        self.block = (self.stored[-1][0].stop,)


class FlatVectors:
    """Join vectors, of one or both spaces: each call of a collective takes all that it can.

    These are Algorithms 7 and 8 of all of them, with the same words.  `spaces` has the vectors of
    each space, which the same further directions divide.
    """

    def __init__(self, spaces: Sequence[Sequence[Vector]]) -> None:
        self._lines, self._sub = [_FlatVector(vectors) for vectors in spaces], []
        shapes = [shape for line in self._lines for _, shape in line.stored]
        for splits in zip(*(reversed(vector.sub) for vectors in spaces for vector in vectors)):
            self._sub.insert(0, _JoinedSplit(splits, shapes))
            shapes = self._sub[0].shapes
        self._gathered = _places(shapes)
        self._parts = _places([line.block for line in self._lines])

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
        for line, part in zip(self._lines, _cut(flat, self._parts)):
            db = line.reduce_gradient(part)
            found += [None] * len(line.stored) if db is None else _cut(db, line.stored)
        return found


class JoinedVectors:
    """Gather the vectors of several parameters, or sum their gradients, together.

    `spaces` has the parameters of each space, with their storage; `flat` is that of their vectors.
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


def _places(shapes: Sequence[tuple[int, ...]]) -> list[VectorPlace]:
    """Return where arrays of these shapes are in a flat one, one after another."""
    stops = [*accumulate(map(math.prod, shapes))]
    return [(slice(*span), shape) for *span, shape in zip([0, *stops], stops, shapes)]


def _join(blocks: Sequence[Array]) -> Array:
    """Copy arrays to a flat one, one after another; a single one is viewed."""
    if len(blocks) == 1:
        return reshape(blocks[0], (blocks[0].size,))
    stops = [*accumulate([block.size for block in blocks])]
    whole = backend_of(blocks[0]).empty((stops[-1],), blocks[0].dtype)
    for block, stop in zip(blocks, stops):
        whole[stop - block.size:stop] = reshape(block, (block.size,))
    return whole


def _cut(flat: Array, places: Sequence[VectorPlace]) -> list[Array]:
    """View the arrays in a flat one."""
    return [reshape(flat[place], shape) for place, shape in places]


def join_vectors(uses: Sequence[tuple[Any, Vector]]) -> dict[int, JoinedVectors]:
    """Join the vectors of each block of a model that the same further directions divide.

    A block is a layer of the Transformer, the first two parts of a parameter's name.  Vectors that
    no rank moves are left out.  `uses` has each parameter with its vector, in the order of a
    forward pass; the result, by the identity of each parameter, the vectors that it is joined
    with.
    """
    groups: dict[tuple, dict[tuple, list]] = {}
    for parameter, vector in uses:
        if vector.travels:
            space = vector.space
            further = tuple(split.axis.name for split in vector.sub)
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
