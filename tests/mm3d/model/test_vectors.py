"""Vectors along the features: stored once on the diagonal, gathered; sums of their gradients."""
import math
from itertools import chain
from typing import Iterator, NamedTuple

import numpy as np
import pytest

import mm3d
from mm3d.grid.activations import Space
from mm3d.model.functional import sum_rows
from mm3d.model.joined_vectors import join_vectors
from mm3d.model.vectors import Vector
from reference import (every_grid, grids, grids_and_squares, integers, moved, on_grid, schemes,
                       total, words)

BATCH, SEQ = 3, 5
# Global shape of the vector and what stays together: more or fewer features than ranks divide
# them, and three parts (as of queries, keys and values) in units of 2.
CASES = [((13,), 1), ((3,), 1), ((3, 10), 2)]


class Side(NamedTuple):
    """A space, and where the vector along its features belongs."""

    space: Space
    where: str


def sides(comm, *names: str, **options: str) -> Iterator[Side]:
    """The outer and the inner space of every scheme on every grid."""
    for scheme in schemes(comm, *names, **options):
        for space, where in zip(scheme.spaces(BATCH, SEQ), ("outer", "inner")):
            yield Side(space, f"{where} space of {scheme}")


def equal(got, expected) -> bool:
    """Whether two blocks are the same; a rank that stores nothing may hold None."""
    return expected.size == 0 if got is None else np.array_equal(got, expected)


# --- Storage -------------------------------------------------------------------------------

@every_grid
def test_the_diagonal_of_3d(comm):
    """On the side of A, b_li lies where j = l (modulo Y); on that of C, b_ji where l = j
    (modulo Z)."""
    for scheme in schemes(comm, "3d"):
        grid = scheme.grid
        (i, j, k), (X, Y, Z) = grid.coords.values(), grid.shape.values()
        b = integers((29,), 0)
        b_li = np.array_split(np.array_split(b, Z)[k], X)[i]
        b_ji = np.array_split(np.array_split(b, Y)[j], X)[i]
        for space, block, mine in zip(scheme.spaces(BATCH, SEQ), (b_li, b_ji),
                                      (j == k % Y, k == j % Z)):
            vector = Vector(space, b.shape)
            assert vector.layout.owns_block(grid) == mine, grid
            local = vector.layout.shard(b, grid)
            assert np.array_equal(local, block if mine else b[:0]), grid


# --- Gathering, and sums of gradients -------------------------------------------------------

@grids_and_squares
def test_every_rank_gathers_its_features_and_sums_are_of_all_rows(comm):
    """Exact integers, in every space of every scheme; also 3-D with whole sequences and copies.

    On 8 ranks each space has one of the cases in turn.
    """
    every = chain(sides(comm), sides(comm, "3d", rows="sequences", vectors="copied"))
    for turn, side in enumerate(every):
        for shape, unit in CASES if comm.size < 8 else CASES[turn % len(CASES):][:1]:
            check_owners(comm, side, shape, unit)
            for dtype in ("float64", "float32", "float16"):
                check_vector(side, shape, unit, dtype)


def check_owners(comm, side, shape, unit):
    """The ranks together store the vector once, P times where it is replicated, and once in each
    layer of 2.5-D."""
    vector, grid = Vector(side.space, shape, unit), side.space.grid
    copies = math.prod(size for name, size in grid.shape.items()
                       if name not in vector.layout.named)
    numbers = np.arange(np.prod(shape)).reshape(shape)
    stored = np.concatenate(comm.allgather(vector.layout.shard(numbers, grid).ravel()))
    assert sorted(stored) == sorted(list(numbers.ravel()) * copies), side.where


def check_vector(side, shape, unit, dtype):
    """A + b of this rank's rows, and sums over rows that differ from rank to rank."""
    grid, vector = side.space.grid, Vector(side.space, shape, unit)
    b, A = integers(shape, 1, dtype), integers((BATCH, SEQ, *shape), 2, dtype)
    rows = side.space.layout(len(shape) - 1, unit)
    b_local, A_local = vector.layout.shard(b, grid), rows.shard(A, grid)
    b_l = vector.gather_features(b_local)
    assert np.array_equal(A_local + b_l, rows.shard(A + b, grid)), side.where
    assert np.array_equal(b_local, vector.layout.shard(b, grid)), side.where
    db = vector.reduce_gradient(A_local.sum(axis=(0, 1)))
    assert equal(db, vector.layout.shard(A.sum(axis=(0, 1)), grid)), side.where
    assert {a.dtype.name for a in (b_l, db) if a is not None} == {dtype}, side.where


@pytest.mark.ranks(1, 8)
def test_float16_sums_over_rows_are_rounded_once(comm):
    """4096 rows of 1 on each rank: a sum in float16 would stop at 2048."""
    with on_grid(comm, 1, 1, comm.size) as grid:
        vector = Vector(Space(grid, 1, 4096, ",", "z", "z"), (3 * comm.size,))
        db = vector.reduce_gradient(sum_rows(np.ones((1, 4096, 3), np.float16)))
        assert db.tolist() == [4096] * 3


# --- Words ---------------------------------------------------------------------------------

@every_grid
def test_words_of_a_vector_on_each_rank(comm):
    """Off the diagonal a rank receives its block and sends its term; along x, all but its own
    block is gathered and scattered. The line of the diagonal moves nothing else."""
    n = 29
    for grid in grids(comm):
        for features, line in ("zy", "yz"):
            space = Space(grid, BATCH, SEQ, f"x,{line}", features, f"{features}x@{line}")
            vector, b = Vector(space, (n,)), integers((n,), 0)
            along_x = moved(f"{features}x", "x", (n,), grid)
            block = len(mm3d.Layout(f"{features}x").shard(b, grid))
            off = not vector.layout.owns_block(grid)

            def divided(expected):
                return {key: m for key, m in expected.items() if grid.shape[key[0]] > 1}
            grid.reset_traffic()
            b_l = vector.gather_features(vector.layout.shard(b, grid))
            assert words(grid) == divided({(line, "broadcast"): block * off,
                                           ("x", "all_gather"): along_x}), grid
            grid.reset_traffic()
            vector.reduce_gradient(b_l)
            assert words(grid) == divided({(line, "reduce"): block * off,
                                           ("x", "reduce_scatter"): along_x}), grid


# --- Several at once -----------------------------------------------------------------------

class Held:
    """A parameter that keeps the gradients which it is given."""

    def __init__(self, value) -> None:
        self.name, self.value, self.gradients = "layers.0.b", value, []
        self.accumulate = self.gradients.append


@pytest.mark.ranks(1, 4, slow=(6, 8))
def test_joined_vectors_are_each_of_them_in_fewer_calls(comm):
    """The same integers and words as alone, in both spaces of every scheme."""
    for scheme in chain(schemes(comm), schemes(comm, "3d", vectors="copied")):
        uses = []
        for space in scheme.spaces(BATCH, SEQ):
            for shape, unit in CASES:
                vector = Vector(space, shape, unit)
                uses.append((Held(vector.layout.shard(integers(shape, 1), scheme.grid)), vector))
        check_joined(scheme, uses)


def check_joined(scheme, uses):
    """Sums that differ from rank to rank; each block that is stored gets its own sum."""
    grid = scheme.grid
    grid.reset_traffic()
    alone = [vector.gather_features(held.value) for held, vector in uses]
    terms = {held: b_l * (grid.rank + 1) for (held, _), b_l in zip(uses, alone)}
    expected = [vector.reduce_gradient(terms[held]) for held, vector in uses]
    one_by_one = grid.traffic()
    groups = dict.fromkeys(join_vectors(uses).values())
    assert {held for joined in groups for held in joined.parameters} == {
        held for held, vector in uses if vector.travels}
    grid.reset_traffic()
    together = {}
    for joined in groups:
        together |= zip(joined.parameters, joined.gather())
        joined.accumulate([terms[held] for held in joined.parameters])
    for (held, vector), b_l, db in zip(uses, alone, expected):
        if vector.travels:
            (found,) = held.gradients
            assert np.array_equal(together[held], b_l), scheme
            assert (found is None and db is None) or np.array_equal(found, db), scheme
    traffic = grid.traffic()
    assert traffic.keys() == one_by_one.keys()
    for key, alone in one_by_one.items():
        assert traffic[key].calls * len(CASES) <= alone.calls, (scheme, key)
        assert total(grid.comm, {key: alone.words}) == total(grid.comm, {
            key: traffic[key].words}), (scheme, key)
