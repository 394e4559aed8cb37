"""Describe the shape of a process grid: sizes of named directions, without ranks.

Ranks are numbered with the first direction varying slowest: on an X x Y x Z grid, rank
(i Y + j) Z + l has the coordinates (i, j, l).  Directions are single letters, and any will do:
``mm3d/README.rst`` lists those that have a meaning.
"""

import itertools
import math
import numbers
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Iterable, Iterator

import numpy as np


@dataclass(frozen=True, eq=False, repr=False)
class GridShape(Mapping[str, int]):
    """Hold the sizes of the named directions of a process grid, the slowest first.

    It is a read-only mapping from directions to sizes: ``shape["x"]``, ``dict(shape)``.  Two
    shapes are equal when they have the same sizes in the same order.

    Parameters
    ----------
    directions : str or iterable of str
        The letters of the directions, as in ``"xyz"``.
    sizes : iterable of int
        The number of ranks along each.  For closed forms of many grids at once each may be a
        vector of Python's whole numbers; such a shape has no ranks' coordinates and no equal.

    Raises
    ------
    ValueError
        When a direction is no single letter or appears twice, a size is no integer of at least
        1, or there are not as many sizes as directions.

    Examples
    --------
    >>> shape = GridShape("dxyz", (2, 2, 4, 1))
    >>> str(shape), shape.ranks, shape.stride("x")
    ('2 x 2 x 4 x 1', 16, 4)
    >>> shape.coordinates(13)
    {'d': 1, 'x': 1, 'y': 1, 'z': 0}
    """

    directions: str
    sizes: tuple[int, ...]

    def __post_init__(self) -> None:
        names, sizes = tuple(self.directions), tuple(self.sizes)
        wrong = [f"{name}={size!r}" for name, size in zip(names, sizes)
                 if len(name) != 1 or not name.isalpha() or not _is_size(size)]
        if wrong:
            raise ValueError(f"grid directions are single letters with sizes of at least 1, "
                             f"not {', '.join(wrong)}")
        if len(names) != len(sizes):
            raise ValueError(f"{len(sizes)} sizes, {' x '.join(map(str, sizes))}, for the "
                             f"{len(names)} grid directions {', '.join(names) or '(none)'}: "
                             f"give one size for each")
        if len(set(names)) != len(names):
            raise ValueError(f"grid directions {', '.join(names)}: one appears twice")
        object.__setattr__(self, "directions", "".join(names))
        object.__setattr__(self, "sizes", tuple(
            size if isinstance(size, np.ndarray) else int(size) for size in sizes))
        object.__setattr__(self, "_sizes", dict(zip(self.directions, self.sizes)))

    @classmethod
    def from_sizes(cls, sizes: Mapping[str, int]) -> "GridShape":
        """Return the shape with these sizes by direction, the slowest direction first."""
        return sizes if isinstance(sizes, cls) else cls(tuple(sizes), tuple(sizes.values()))

    @classmethod
    def parse(cls, text: str, directions: str) -> "GridShape":
        """Return the shape written as ``2x2x2`` or ``2 x 2 x 2``, of `directions` such as ``xyz``.

        Raises ValueError when the text does not give an integer of at least 1 for each direction.
        """
        try:
            sizes = tuple(map(int, text.split("x"))) if text.strip() else ()
        except ValueError:
            raise ValueError(f"{text!r} is no shape of a grid: give sizes as in 2x2x2") from None
        return cls(directions.replace(" ", ""), sizes)

    def __getitem__(self, direction: str) -> int:
        return self._sizes[direction]

    def __iter__(self) -> Iterator[str]:
        return iter(self.directions)

    def __len__(self) -> int:
        return len(self.sizes)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, GridShape):
            return (self.directions, self.sizes) == (other.directions, other.sizes)
        return Mapping.__eq__(self, other)

    def __hash__(self) -> int:
        return hash((self.directions, self.sizes))

    def __str__(self) -> str:
        return " x ".join(map(str, self.sizes))

    def __repr__(self) -> str:
        return f"GridShape({self.directions!r}, {self.sizes})"

    @property
    def compact(self) -> str:
        """Return the sizes without spaces, as in options and file names: ``2x2x2``."""
        return "x".join(map(str, self.sizes))

    @cached_property
    def divided(self) -> str:
        """Return the directions of more than one rank."""
        return "".join(name for name, size in self.items() if np.any(size > 1))

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return math.prod(self.sizes)

    def ranks_along(self, directions: Iterable[str]) -> int:
        """Return the number of ranks whose coordinates differ along these directions only."""
        return math.prod(self[name] for name in directions)

    def stride(self, direction: str) -> int:
        """Return the difference between the ranks of two neighbours along a direction."""
        places = {name: place for place, name in enumerate(self.directions)}
        return math.prod(self.sizes[places[direction] + 1:])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return the coordinate of a rank along each direction; ValueError if there is none."""
        if not 0 <= rank < self.ranks:
            raise ValueError(f"a grid of {self} has the ranks 0 to {self.ranks - 1}, not {rank}")
        found = dict.fromkeys(self.directions, 0)
        for name in reversed(self.directions):
            rank, found[name] = divmod(rank, self[name])
        return found

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the number of the rank at `coordinates`, which have every direction of the grid.

        Raises ValueError when one is not below the size of its direction.
        """
        number = 0
        for name, size in zip(self.directions, self.sizes):
            if not 0 <= coordinates[name] < size:
                raise ValueError(f"coordinate {name}={coordinates[name]} of a grid of {self}: "
                                 f"0 to {size - 1} would do")
            number = number * size + coordinates[name]
        return number

    def all_coordinates(self) -> Iterator[dict[str, int]]:
        """Iterate over the coordinates of all ranks, in rank order."""
        return (dict(zip(self.directions, point))
                for point in itertools.product(*map(range, self.sizes)))


def divides(parts: int | np.ndarray, number: int) -> bool:
    """Return whether `parts`, or all of an array of them, divide a number."""
    return bool(np.all(number % parts == 0))


def _is_size(size: int | np.ndarray) -> bool:
    """Return whether a size is a whole number of at least 1, or a vector of such."""
    if isinstance(size, np.ndarray):
        return size.ndim == 1 and size.size > 0 and size.dtype == object and all(
            map(_is_size, size))
    return isinstance(size, numbers.Integral) and size >= 1
