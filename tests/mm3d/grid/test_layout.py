"""Layouts: which block of an array a rank holds, and how blocks make the array again."""
from itertools import product
from types import SimpleNamespace

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.grid.shape import GridShape
from reference import SHAPES, block, every_grid, grids, integers, on_grid
from rounded import dtype_of, ml_dtypes

# Matrices, activations and weights of every scheme; what no letter divides is held in copies.
SPECS = {1: ["xyz", "zx", "y", ""],
         2: ["xy,z", "z,yx", "xz,y", "y,zx", ",zyx", "x,", "zyx,", ","],
         3: ["xy,,z", "x,y,z", "x,z,y", "z,,yx", ",x,", ",,"]}
SPECS = [(spec, dims) for dims, specs in SPECS.items() for spec in specs]


@every_grid
def test_shard_is_the_block_that_array_split_gives_and_unshard_undoes_it(comm):
    """Bitwise, with sizes that nothing divides, some smaller than the number of parts.  Every rank
    knows the block of every other, and all ranks together hold each element as often as there are
    ranks along no letter."""
    for grid, spec, dims in ((grid, *case) for grid in grids(comm) for case in SPECS):
        layout = mm3d.Layout(spec)
        for shape in SHAPES:
            A = np.random.default_rng(0).standard_normal(shape[:dims])
            local = layout.shard(A, grid)
            assert np.array_equal(local, block(A, spec, grid)), (grid, spec, shape)
            assert layout.local_shape(grid, A.shape) == local.shape
            assert np.array_equal(A[layout.slices(grid, A.shape)], local)
        assert np.array_equal(layout.unshard(local, grid, A.shape), A), (grid, spec)
        copies = np.prod([n for c, n in grid.shape.items() if c not in spec], dtype=int)
        held = np.zeros(A.shape, int)
        for coords in grid.shape.all_coordinates():
            held[layout.slices(grid, A.shape, coords)] += 1
        assert (held == copies).all(), (grid, spec)
        mine = [layout.local_shape(grid.shape, A.shape, coords)
                for coords in grid.shape.all_coordinates()]
        assert comm.allgather(local.shape) == mine, (grid, spec)


def test_blocks_need_the_shape_of_a_grid_and_no_ranks():
    """Directions of any names: each element is on one stage, and in each of three replicas."""
    shape = GridShape("dsx", (3, 2, 4))
    held = np.zeros((7, 9), int)
    for coords in shape.all_coordinates():
        held[mm3d.Layout("s,x").slices(shape, (7, 9), coords)] += 1
    assert (held == 3).all()
    owners = [coords for coords in shape.all_coordinates()
              if mm3d.Layout("x@s").owns_block(shape, coords)]
    assert [(c["s"], c["x"]) for c in owners] == [(0, 0), (0, 2), (1, 1), (1, 3)] * 3
    with pytest.raises(ValueError, match="needs coordinates: no rank is behind the shape"):
        mm3d.Layout("s,x").local_shape(shape, (7, 9))
    with pytest.raises(ValueError, match="names the direction 'z'.* it has d, s, x"):
        mm3d.Layout("z,x").local_shape(shape, (7, 9), shape.coordinates(0))


@every_grid
def test_a_split_is_the_step_from_the_line_to_the_rank(comm):
    """Gathering along a letter takes it out of the layout; its extent is what comes before it."""
    for grid in grids(comm):
        for spec, shape in product(("xy,z", "z,yx", "x,zy", "yzx,"), SHAPES):
            A = integers(shape[:2], 0)
            for dim, letters in enumerate(spec.split(",")):
                letter = letters[-1:]
                if letter:
                    split = mm3d.Layout(spec).split(grid, A.shape, letter)
                    gathered = split.all_gather(block(A, spec, grid))
                    assert np.array_equal(gathered, block(A, spec.replace(letter, ""), grid))
                    assert (split.dim, split.extent) == (dim, gathered.shape[dim])
                for n, letter in enumerate(letters):
                    counts = mm3d.Layout(spec).split(grid, A.shape, letter).counts
                    before = ",".join(letters[:n + 1] if d == dim else "" for d in range(2))
                    assert counts[grid.coords[letter]] == block(A, before, grid).shape[dim]


@pytest.mark.ranks(8)
def test_units_stay_together_along_the_first_letter(comm):
    """Five heads of 3 columns over z = 2 and x = 4: 9 and 6 columns, then single ones."""
    layout = mm3d.Layout(",,zx", units={2: 3})
    A = integers((2, 3, 15), 0)
    with on_grid(comm, 4, 1, 2) as grid:
        half = (A[..., :9], A[..., 9:])[grid.coords["z"]]
        expected = np.array_split(half, 4, axis=2)[grid.coords["x"]]
        local = layout.shard(A, grid)
        assert np.array_equal(local, expected)
        assert np.array_equal(layout.unshard(local, grid, A.shape), A)
        assert layout.split(grid, A.shape, "z").counts == [9, 6]
        assert layout.split(grid, A.shape, "x").counts == ([3, 2, 2, 2], [2, 2, 1, 1])[
            grid.coords["z"]]


@every_grid
def test_a_diagonal_vector_has_one_owner_for_each_element(comm):
    """The owner's coordinate along the direction after '@' is that of the first letter before
    it, modulo the size where the two differ; letters not named hold copies."""
    cases = [*product(("zx@y", "yx@z", "x@z", "z@y"), (3, 13, 24))]
    for grid, spec, n in ((grid, *case) for grid in grids(comm) for case in cases):
        layout, b = mm3d.Layout(spec), integers((n,), 0)
        dealt, line = spec.split("@")
        owner = grid.coords[line] == grid.coords[dealt[0]] % grid.shape[line]
        assert layout.owns_block(grid) == owner
        local = layout.shard(b, grid)
        assert np.array_equal(local, block(b, dealt, grid) if owner else b[:0])
        copies = np.prod([m for c, m in grid.shape.items() if c not in spec], dtype=int)
        assert sum(comm.allgather(local.size)) == n * copies
        assert np.array_equal(layout.unshard(local, grid, b.shape), b)


@pytest.mark.ranks(1, 8)
def test_the_dtype_and_every_bit_survive_in_a_copy(comm):
    with on_grid(comm, 1, 1, 1) if comm.size == 1 else on_grid(comm, 2, 2, 2) as grid:
        for dtype in ("float64", "float32", "float16", "int64", "bool",
                      *["bfloat16"] * bool(ml_dtypes)):
            A = np.frombuffer(np.random.default_rng(0).bytes(7 * 5 * 8), np.uint8)
            A = A > 99 if dtype == "bool" else A.view(dtype_of(dtype))
            A = A[:35].reshape(7, 5)
            before, layout = A.tobytes(), mm3d.Layout("xy,z")
            A = A.T.copy().T
            local = layout.shard(A, grid)
            assert local.dtype == A.dtype and local.flags.c_contiguous
            assert layout.unshard(local, grid, A.shape).tobytes() == before
            local[...] = 0
            assert A.tobytes() == before


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bool"])
def test_elements_are_counted_and_not_their_bytes(monkeypatch, dtype):
    """Many an MPI counts no further than 2^31, which are the bytes of half a table of words."""
    with on_grid(MPI.COMM_SELF, 1, 1, 1) as grid:
        counts = []

        def gather(send, recv):
            counts.extend(recv[1][0])
            MPI.COMM_SELF.Allgatherv(send, recv)
        monkeypatch.setattr(grid, "comm", SimpleNamespace(
            allgather=MPI.COMM_SELF.allgather, Allgatherv=gather))
        a = np.ones((3, 4), dtype)
        assert np.array_equal(mm3d.Layout("x,y").unshard(a, grid, a.shape), a) and counts == [12]


@pytest.mark.parametrize("spec", ["xx,z", "x,x", "xy,zx", "zx@z", "zx@", "zx@yy", "@y"])
def test_a_direction_twice_or_a_bad_diagonal_is_refused(spec):
    with pytest.raises(ValueError, match="once, and '@' names one direction more"):
        mm3d.Layout(spec)


@pytest.mark.parametrize("units", [{2: 3}, {-1: 3}, {0: 0}, {1: -4}, {0: 2, 1: 1.5}])
def test_units_that_divide_nothing_are_refused(units):
    with pytest.raises(ValueError, match="of at least 1, for dimensions 0 to 1, would do$"):
        mm3d.Layout("xy,z", units)


@pytest.mark.parametrize("spec, shape, message", [
    ("xw,z", (4, 4), "names the direction 'w', which the grid does not have: it has x, y, z"),
    ("z@w", (4,), "names the direction 'w'"),
    ("xy,z", (4, 4, 4), r"is for 2 dimensions, but the array has 3: \(4, 4, 4\)"),
    ("xy,z", (4,), "is for 2 dimensions, but the array has 1")])
def test_arrays_and_grids_that_do_not_fit_a_layout_are_refused(spec, shape, message):
    grid, layout = GridShape("xyz", (2, 2, 2)), mm3d.Layout(spec)
    coords = grid.coordinates(3)
    for call in (lambda: layout.local_shape(grid, shape, coords),
                 lambda: layout.slices(grid, shape, coords)):
        with pytest.raises(ValueError, match=message):
            call()
    with on_grid(MPI.COMM_SELF, 1, 1, 1) as grid:
        with pytest.raises(ValueError, match=message):
            layout.shard(np.zeros(shape), grid)


@pytest.mark.ranks(2)
def test_a_block_that_is_wrong_on_one_rank_is_refused_on_all(comm):
    with on_grid(comm, x=comm.size) as grid:
        block = np.zeros((4 + comm.rank, 3))
        with pytest.raises(ValueError, match=r"\(4, 3\) on rank 1, not \(5, 3\)"):
            mm3d.Layout("x,").unshard(block, grid, (8, 3))
