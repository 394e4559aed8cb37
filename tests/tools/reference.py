"""What the tests of the core share: exact data, grids to run on, and plain NumPy to compare with.

Arrays hold the integers -3 to 3, so that sums of products are exact in any order and "equal"
means equal to the bit.  Every rank draws the same global array and compares its own block.
"""
from contextlib import contextmanager
from typing import Iterator

import numpy as np
import pytest

import mm3d

# A cube, and slabs in which each direction has 1, 2 and 4 ranks in turn; 6 ranks.
GRIDS = {1: [(1, 1, 1)],
         4: [(2, 2, 1), (1, 2, 2)],
         6: [(2, 1, 3), (3, 2, 1)],
         8: [(2, 2, 2), (4, 1, 2), (1, 2, 4), (2, 4, 1)]}
# Grids of 8 ranks are of every kind, those of 6 uneven; those of 4 are for squares.
every_grid = pytest.mark.ranks(1, 8, slow=(6,))
grids_and_squares = pytest.mark.ranks(1, 4, 8, slow=(6,), first=(8,))

# Three lengths, all different: nothing divides them, and some have fewer elements than parts.
SHAPES = [(7, 11, 13), (5, 17, 3), (19, 2, 9)]


def integers(shape: tuple[int, ...], seed: int, dtype: str = "float64") -> np.ndarray:
    """Integers from -3 to 3, none of them 0, the same on every rank."""
    draw = np.random.default_rng([seed, *shape]).choice([-3, -2, -1, 1, 2, 3], shape)
    return draw.astype(dtype)


@contextmanager
def on_grid(comm, *sizes: int, **shape: int) -> Iterator[mm3d.Grid]:
    """A grid of `sizes` along x, y and z, or of a named `shape`, freed at the end."""
    grid = mm3d.Grid(comm, **(shape or dict(zip("xyz", sizes))))
    yield grid
    grid.free()    # not after a failure, when other ranks may never come to it


def grids(comm) -> Iterator[mm3d.Grid]:
    """Each of the `GRIDS` of so many ranks, one after another."""
    for sizes in GRIDS[comm.size]:
        with on_grid(comm, *sizes) as grid:
            yield grid


def fits(name: str, ranks: int) -> bool:
    """Whether a scheme has a grid of its own choice for so many ranks."""
    try:
        return bool(mm3d.SCHEMES[name].default_grid(ranks))
    except ValueError:
        return False


def schemes(comm, *names: str, **options: str) -> Iterator[mm3d.Scheme]:
    """Each of the schemes called `names` (or all), on every grid of so many ranks; on 4 ranks
    those of squares alone, as 8 show the others."""
    for name in names or mm3d.SCHEMES:
        if comm.size == 4 and fits(name, 8):
            continue
        for sizes in GRIDS[comm.size] if name == "3d" else [None] * fits(name, comm.size):
            scheme = mm3d.scheme(name, comm, grid=sizes, **options if name == "3d" else {})
            yield scheme
            scheme.grid.free()


def block(a: np.ndarray, spec: str, grid: mm3d.Grid) -> np.ndarray:
    """This rank's block of `a` in the layout `spec` (without '@'), by `numpy.array_split`."""
    for dim, letters in enumerate(spec.split(",")):
        for letter in letters:
            a = np.array_split(a, grid.shape[letter], axis=dim)[grid.coords[letter]]
    return a


@contextmanager
def all_refuse(comm, said: str | None = None,
               kind: type[Exception] = ValueError) -> Iterator[None]:
    """What is done within it raises the same error in one line on all ranks, which says so."""
    with pytest.raises(kind, match=said) as caught:
        yield
    text = str(caught.value)
    assert comm.allgather(text) == [text] * comm.size and "\n" not in text


def moved(layout: str, letter: str, shape: tuple[int, ...], grid: mm3d.Grid) -> int:
    """Words that this rank moves when an array of `layout` is gathered or scattered along
    `letter`: what the ranks of that line hold together, less its own block."""
    a = np.empty(shape, np.int8)
    return block(a, layout.replace(letter, ""), grid).size - block(a, layout, grid).size


def words(grid: mm3d.Grid) -> dict[tuple[str, str], int]:
    """Words by direction and collective that this rank moved."""
    return {key: traffic.words for key, traffic in grid.traffic().items()}


def total(comm, counts: dict) -> dict:
    """The sum of `counts` over the ranks, key by key."""
    every = comm.allgather(counts)
    return {key: sum(c.get(key, 0) for c in every) for key in {k for c in every for k in c}}


def relative_error(a: np.ndarray, b: np.ndarray) -> float:
    """Frobenius norm of a - b relative to that of b, in float64."""
    a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), np.finfo(float).tiny))
