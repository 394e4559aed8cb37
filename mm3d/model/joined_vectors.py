"""Join the vectors of a block: their collectives take all of them in one call."""

import math
from copy import copy
from itertools import accumulate, islice
from typing import Any, Container, Sequence

import numpy as np

from mm3d.arrays.backend import Array, backend_of, reshape
from mm3d.arrays.blocks import resized_shape
from mm3d.grid.split import Split
from mm3d.model.vectors import Vector

VectorPlace = tuple[slice, tuple[int, ...]]    # in a flat array, and the shape there


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
