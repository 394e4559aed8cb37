"""The process grid, its collectives and what they count, and the memory behind them."""
import copy
import gc
from itertools import accumulate, cycle, product

import numpy as np
import pytest

import mm3d
from mm3d.arrays.blocks import block_bounds, block_lengths, block_starts, total_length
from mm3d.arrays.pool import Pool
from mm3d.grid.axis import COLLECTIVES, Traffic
from mm3d.grid.split import Split
from mm3d.selftest import failed_collectives
from mm3d.transport.pending import Pending
from reference import all_refuse, every_grid, grids, integers, on_grid

# Which block goes where is what a transport decides: each case is one of its own.
pytestmark = [pytest.mark.usefixtures("transport"), pytest.mark.every_transport]

LINES = pytest.mark.ranks(1, 3, 8)
DTYPES = "float64", "float32", "float16", "int64"

# Shape of the whole, and the dimension along which it is dealt: a first, a middle and a last
# one, counted from either end; more parts than elements; nothing at all.
CASES = [((16,), 0), ((2, 8, 3), 1), ((11, 3), 0), ((2, 3, 19), -1), ((3, 2, 16), 2), ((4, 2), 1),
         ((0, 3), 0), ((4, 0), 1)]


def strided(a: np.ndarray) -> np.ndarray:
    """The same numbers, not contiguous in memory."""
    wide = np.repeat(np.swapaxes(a, 0, -1), 2, axis=0)
    return np.swapaxes(wide[::2], 0, -1)


def pieces(a: np.ndarray, dim: int, counts: list[int]) -> list[np.ndarray]:
    return np.split(a, list(accumulate(counts[:-1])), axis=dim)


# --- How a length is dealt -----------------------------------------------------------------

@pytest.mark.parametrize("parts", [1, 2, 3, 8, 36])
@pytest.mark.parametrize("units, unit", [(0, 1), (1, 1), (7, 1), (8, 1), (64, 48), (5, 3)])
def test_blocks_are_whole_units_that_differ_by_one_at_most(units, unit, parts):
    lengths = block_lengths(units * unit, parts, unit)
    assert len(lengths) == parts and sum(lengths) == units * unit
    assert all(length % unit == 0 for length in lengths)
    assert max(lengths) - min(lengths) <= unit
    assert lengths == sorted(lengths, reverse=True)


@pytest.mark.parametrize("extent, parts, unit", [
    (10 ** 7, 10 ** 6, 1), (40, 5000, 4), (0, 4097, 1)])
def test_many_blocks_are_divided_without_a_list(extent, parts, unit):
    lengths = block_lengths(extent, parts, unit)
    assert not isinstance(lengths, list) and len(lengths) == parts
    first = lengths[:8]
    assert first == [block_bounds(extent, parts, part, unit)[1] for part in range(8)]
    assert total_length(lengths) == extent and lengths[parts - 1] == lengths[-1] <= first[-1]
    assert parts > 5000 or sum(lengths) == extent
    with pytest.raises(IndexError):
        lengths[parts]


@pytest.mark.parametrize("unit", [1, 3])
def test_bounds_of_an_array_of_blocks_are_those_of_each(unit):
    starts, lengths = block_bounds(7 * unit, 5, np.arange(5), unit)
    assert [*zip(starts, lengths)] == [block_bounds(7 * unit, 5, part, unit) for part in range(5)]
    dealt = block_lengths(7 * unit, 5, unit)
    assert (starts.tolist(), lengths.tolist()) == (block_starts(dealt), dealt)


def test_blocks_of_a_length_that_units_do_not_fill_say_what_would_do():
    with pytest.raises(ValueError, match="10 cannot be divided into units of 4: 8 or 12 would"):
        block_lengths(10, 2, 4)


# --- Who is where --------------------------------------------------------------------------

@every_grid
def test_rank_numbers_and_coordinates(comm):
    """Rank (i Y + j) Z + k is (i, j, k); a direction joins those that differ in it alone."""
    for grid in grids(comm):
        X, Y, Z = (grid.shape[c] for c in "xyz")
        i, j, k = (grid.coords[c] for c in "xyz")
        assert (i * Y + j) * Z + k == comm.rank == grid.rank
        assert (grid.size, grid.axes.keys()) == (comm.size, set("xyz"))
        assert grid.shape.coordinates(comm.rank) == grid.coords
        lines = {"x": [(n * Y + j) * Z + k for n in range(X)],
                 "y": [(i * Y + n) * Z + k for n in range(Y)],
                 "z": [(i * Y + j) * Z + n for n in range(Z)]}
        for letter, line in lines.items():
            axis = grid[letter]
            assert axis is getattr(grid, letter)
            assert (axis.size, axis.rank) == (grid.shape[letter], grid.coords[letter])
            assert axis.all_gather(np.array([comm.rank])).tolist() == line, (grid, letter)


@pytest.mark.ranks(2)
def test_counts_that_do_not_fit_the_array_are_refused(comm):
    with on_grid(comm, x=comm.size) as grid:
        for counts in ([5, 4], [4], [], [2, 2, 4], block_lengths(10 ** 6, 10 ** 5)):
            with pytest.raises(ValueError, match=r"an array 4 long does not fit blocks of \["):
                grid.x.all_gather(np.ones((2, 4)), 1, [n + (comm.rank == 1) for n in counts])
            with pytest.raises(ValueError, match=r"an array 4 long does not fit blocks of \["):
                grid.x.reduce_scatter(np.ones((2, 4)), 1, counts)


@pytest.mark.ranks(2)
def test_words_in_place_of_a_switch_are_refused(comm, monkeypatch):
    """By whatever library and guard; also where one rank alone has them."""
    for name, ranks in product(("MM3D_ABORT", "MM3D_CUDNN", "MM3D_TF32"), ((0, 1), (1,))):
        if comm.rank in ranks:
            monkeypatch.setenv(name, "no")
        with all_refuse(comm, f"{name}='no' is unknown: choose 0 or 1"):
            mm3d.Grid(comm, x=comm.size)
        monkeypatch.delenv(name, raising=False)


@pytest.mark.ranks(2)
def test_a_root_that_is_no_rank_is_refused(comm):
    with on_grid(comm, x=comm.size) as grid:
        x, a = grid.x, np.ones(10 ** 5)    # too large for a message between ranks of a node
        for call, root in product((x.broadcast, x.reduce, x.begin_broadcast, x.begin_reduce),
                                  (-1, comm.size)):
            with all_refuse(comm, f"along x: no rank is root {root}, 0 to 1 would do"):
                call(a, root)


@pytest.mark.ranks(2)
def test_a_grid_that_cannot_be_is_refused_alike_on_all_ranks(comm):
    for shape, message in (
            (dict(x=2, y=2, z=3), "a grid of 2 x 2 x 3 has 12 ranks, but the communicator has"),
            (dict(x=0, y=8), "not x=0"), (dict(x=-8), "not x=-8"), (dict(x=8.0), "not x=8.0"),
            (dict(row=8), "not row=8")):
        with all_refuse(comm, message):
            mm3d.Grid(comm, **shape)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name, values", [
    ("MM3D_TRANSPORT", ("mpi", "0mpi")), ("MM3D_KERNELS", ("numpy", "")),
    ("MM3D_TF32", ("", "1"))])
def test_ranks_that_would_travel_or_compute_in_different_ways_are_refused(comm, monkeypatch, name,
                                                                          values):
    monkeypatch.setenv(name, values[comm.rank])
    with all_refuse(comm, f"the ranks differ in {name}"):
        mm3d.Grid(comm, x=2)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name, values", [
    ("MM3D_TRANSPORT", ("", None)), ("MM3D_TF32", ("0", None)), ("MM3D_TF32", ("", "0")),
    ("MM3D_CUDNN", ("1", None)), ("MM3D_NODE_SIZE", ("1", "01"))])
def test_ranks_agree_where_a_variable_means_the_same(comm, monkeypatch, name, values):
    """However it is written; one that is empty is not set."""
    monkeypatch.delenv(name, raising=False)
    if values[comm.rank] is not None:
        monkeypatch.setenv(name, values[comm.rank])
    mm3d.Grid(comm, x=2).free()


@pytest.mark.ranks(4)
def test_a_direction_that_the_grid_lacks(comm):
    with on_grid(comm, u=2, v=2) as grid:
        assert grid.shape == {"u": 2, "v": 2} and "u=2, v=2" in repr(grid)
        with pytest.raises(AttributeError, match="'x'"):
            grid.x


@pytest.mark.ranks(1, 4)
def test_what_was_freed_says_so_and_is_freed_again(comm, tmp_path):
    """On all ranks before any of them waits for a message; a scheme's grid and its lines, too."""
    sizes = dict(layers=2, hidden=8, heads=4, batch=4, seq=4)
    tokens = np.zeros((4, 4), int)
    for ways in [{}, {"data": 2, "stages": 2}, {"data": 2, "context": 2}][:comm.size]:
        mesh = mm3d.Mesh(comm, scheme="1d", **ways)
        model, other = (mm3d.GPT(mesh, zero=int("data" in ways), **sizes) for _ in range(2))
        pipeline = mm3d.Pipeline(mesh, "1f1b", 1, **sizes)
        optimizer = mm3d.AdamW(other, lr=1)
        other.free()
        pipeline.free()
        for use in (lambda: other.step(tokens, tokens), lambda: other.evaluate(tokens, tokens),
                    other.state, lambda: mm3d.save(tmp_path, other, step=0), optimizer.step,
                    lambda: pipeline.step(None, None), lambda: pipeline.forward(None, None)):
            with all_refuse(comm, "^the model was freed: a new grid, mesh or model", RuntimeError):
                use()
        mesh.free()
        for use in (lambda: model.step(tokens, tokens), lambda: model.evaluate(tokens, tokens),
                    model.state, lambda: mm3d.save(tmp_path, model, step=0),
                    lambda: mm3d.AdamW(model, lr=1), lambda: mm3d.GPT(mesh, **sizes)):
            with all_refuse(comm, "^the mesh was freed: a new grid, mesh or model", RuntimeError):
                use()
        for one in (model, other, pipeline, model, other, mesh, mesh.scheme.grid):
            one.free()
        with pytest.raises(RuntimeError, match="^the mesh was freed"):
            copy.copy(mesh.comm).size
        assert "rank" in repr(mesh)
        assert not mesh.scheme.grid.traffic() and not hasattr(mesh.scheme.grid, "other")
    scheme = mm3d.scheme("3d", comm, grid=(1, 1, comm.size))
    model, line, a = mm3d.Transformer(scheme, **sizes), scheme.grid.z, np.zeros(4)
    x = model.random("input")
    for _ in range(2):
        scheme.grid.free()
    for use in (lambda: model.forward(x), *[lambda: line.all_reduce(a)][:comm.size - 1],
                model.state):
        with all_refuse(comm, "was freed: a new grid", RuntimeError):
            use()


@pytest.mark.ranks(2)
def test_what_is_no_array_and_no_dimension_of_one_are_refused(comm):
    with on_grid(comm, x=2) as grid:
        x, a = grid.x, np.ones((2, 4))
        for call, one, dim in (*product((x.all_gather, x.reduce_scatter), [a], (2, [0])),
                               (x.all_gather, [1, 2], 0)):
            with all_refuse(comm, "dim=.* along x: an array, and one of its dimensions, would"):
                call(one, dim)
        for call in (x.all_reduce, lambda one: x.reduce(one, 0), lambda one: x.broadcast(one, 1)):
            with all_refuse(comm, "^list along x: an array"):
                call([1.0])


# --- Collectives ---------------------------------------------------------------------------
# Rank r holds integers(shape, seed=r): every rank can tell what any other one holds.

@LINES
def test_all_gather_joins_the_blocks_in_order(comm):
    with on_grid(comm, comm.size) as grid:
        for (shape, dim), dtype in zip(CASES, cycle(DTYPES)):
            dealt = block_lengths(shape[dim], comm.size)
            for counts in dealt, dealt[::-1], None:
                whole = integers(shape, 0, dtype)
                mine = pieces(whole, dim, counts or dealt)[comm.rank]
                for a in (mine.copy(), strided(mine)):
                    got = grid.x.all_gather(a, dim, counts)
                    assert np.array_equal(got, whole) and got.dtype == dtype
                    assert got.shape == shape and np.array_equal(a, mine), (shape, dim)


@LINES
def test_reduce_scatter_leaves_each_rank_its_block_of_the_sum(comm):
    with on_grid(comm, comm.size) as grid:
        for (shape, dim), dtype in zip(CASES, cycle(DTYPES)):
            dealt = block_lengths(shape[dim], comm.size)
            for counts in dealt, dealt[::-1], None:
                terms = [integers(shape, r, dtype) for r in range(comm.size)]
                expected = pieces(sum(terms), dim, counts or dealt)[comm.rank]
                for a in (terms[comm.rank].copy(), strided(terms[comm.rank])):
                    got = grid.x.reduce_scatter(a, dim, counts)
                    assert np.array_equal(got, expected) and got.dtype == dtype, (shape, dim)
                    assert np.array_equal(a, terms[comm.rank])


@LINES
def test_all_reduce_reduce_and_broadcast(comm):
    """Of one number, of fewer than ranks, and of none; and to and from each rank."""
    with on_grid(comm, comm.size) as grid:
        for shape, dtype in zip([(16,), (2, 3, 5), (1,), (0, 3)], DTYPES):
            terms = [integers(shape, r, dtype) for r in range(comm.size)]
            mine, roots = terms[comm.rank], sorted({0, comm.size // 2, comm.size - 1})
            for make, root in product((np.copy, strided), roots):
                a = make(mine)    # a broadcast is received in place
                got = grid.x.all_reduce(a)
                assert np.array_equal(got, sum(terms)) and got.dtype == dtype
                got = grid.x.reduce(a, root)
                assert (got is None) == (comm.rank != root)
                assert got is None or (np.array_equal(got, sum(terms)) and got.dtype == dtype)
                assert np.array_equal(a, mine)
                got = grid.x.broadcast(a, root)
                assert np.array_equal(got, terms[root]) and got.dtype == dtype


@LINES
def test_a_split_broadcasts_and_reduces_blocks_of_any_length(comm):
    """The block of the root has the root's length, whatever the others hold."""
    whole = integers((3, 2 * comm.size - 1), 0)
    with on_grid(comm, comm.size) as grid:
        split = Split(grid.x, 1, whole.shape[1])
        parts = pieces(whole, 1, split.counts)
        for root in range(comm.size):
            got = split.broadcast(parts[comm.rank].copy(), root)
            assert np.array_equal(got, parts[root])
            terms = [integers(parts[root].shape, r) for r in range(comm.size)]
            got = split.reduce(terms[comm.rank], root)
            assert got is None if comm.rank != root else np.array_equal(got, sum(terms))
        assert np.array_equal(split.all_gather(parts[comm.rank]), whole)
        assert np.array_equal(split.reduce_scatter(whole), comm.size * parts[comm.rank])


def test_along_a_direction_of_one_rank_arrays_pass_untouched():
    with on_grid(mm3d.grid.grid.MPI.COMM_SELF, 1) as grid:
        a = strided(integers((3, 4), 0))
        for got in (grid.x.all_gather(a, 1), grid.x.reduce_scatter(a, 1), grid.x.all_reduce(a),
                    grid.x.broadcast(a, 0), grid.x.reduce(a, 0),
                    grid.x.all_to_all(a, [4], [4], 1)):
            assert got is a
        assert grid.traffic() == {}


def uneven_counts(ranks: int, seed: int) -> np.ndarray:
    """How many rows each rank sends to each: all different, some none, one rank nothing at all."""
    counts = np.random.default_rng(seed).integers(0, 4, (ranks, ranks))
    counts[ranks // 2] = 0
    counts[0, -1] = 5
    return counts


@LINES
def test_an_all_to_all_brings_each_rank_its_rows(comm):
    """By counts that differ by pair of ranks; along both dimensions; small and large arrays."""
    n, me = comm.size, comm.rank
    sizes = ("float64", 3), ("float16", 3), ("float32", 4001)
    with on_grid(comm, n) as grid:
        for (dtype, columns), (turn, dim) in product(sizes, enumerate((0, 1, -1))):
            counts = uneven_counts(n, turn)
            wholes = [integers((counts[rank].sum(), columns), rank, dtype) for rank in range(n)]
            parts = [pieces(whole, 0, counts[rank]) for rank, whole in enumerate(wholes)]
            expected = np.concatenate([parts[source][me] for source in range(n)])
            a = wholes[me] if dim == 0 else strided(wholes[me].T)
            sends, receives = counts[me].tolist(), counts[:, me].tolist()
            grid.reset_traffic()
            got = grid.x.all_to_all(a, sends, receives, dim)
            assert got.dtype == dtype and (got is a if n == 1 else got.flags.c_contiguous)
            assert np.array_equal(got if dim == 0 else got.T, expected)
            away = [count for rank, count in enumerate(sends) if rank != me]
            words = columns * sum(away)
            assert grid.traffic() == ({} if n == 1 else {("x", "all_to_all"): Traffic(
                1, np.count_nonzero(away), words, words * np.dtype(dtype).itemsize)})


@pytest.mark.ranks(2)
def test_the_self_test_names_a_collective_that_is_wrong(comm, transport, monkeypatch):
    """Whichever it is; a prefetch, and begun ones of a root, where they differ from others."""
    def spoiled(call):
        def one_more(*arguments):
            found = call(*arguments)
            a = found.wait() if isinstance(found, Pending) else found
            a = None if a is None else a + 1
            return Pending(a) if isinstance(found, Pending) else a
        return one_more

    begun = ("prefetch", "begin_broadcast", "begin_reduce") if transport == "mpi" else ()
    with on_grid(comm, x=2) as grid:
        for name in (*COLLECTIVES, "begin_reduce_scatter", *begun):
            with monkeypatch.context() as patch:
                patch.setattr(grid.x, name, spoiled(getattr(grid.x, name)))
                found = failed_collectives(grid, (2,), ("float32",))
            assert found and all(text.startswith(f"{name} of ") for text in found), found
        assert not failed_collectives(grid, (2,), ("float32",))


@pytest.mark.ranks(3)
def test_counts_that_do_not_fit_are_refused(comm):
    with on_grid(comm, 3) as grid:
        a, ones = integers((3, 2), 0), [1] * 3
        for sends, receives in (([1, 1, 2], [1, 1, 2]), ([1, 2], [1, 2]), ([3, 0, 0], [0, 3, 3]),
                                (ones, [1, 1])):
            with pytest.raises(ValueError, match="does not fit|cannot come"):
                grid.x.all_to_all(a, sends, receives)
        assert np.array_equal(grid.x.all_to_all(a, ones, ones),
                              np.concatenate([a[comm.rank:comm.rank + 1]] * 3))


# --- What they count -----------------------------------------------------------------------

@LINES
def test_traffic_of_one_call_each(comm):
    """Of rows x 5 words, n parts: all but the own block; an all-reduce counts as two passes."""
    n, me, root = comm.size, comm.rank, comm.size - 1
    with on_grid(comm, n) as grid:
        for rows, dtype in ((8, "float64"), (11, "float32"), (3, "float16")):
            whole, counts = integers((rows, 5), 0, dtype), block_lengths(rows, n)
            own, flat = 5 * counts[me], block_lengths(5 * rows, n)[me]
            size, other = 5 * rows, int(me != root)
            grid.reset_traffic()
            grid.x.all_gather(pieces(whole, 0, counts)[me], 0, counts)
            grid.x.reduce_scatter(whole, 0, counts)
            grid.x.all_reduce(whole)
            grid.x.broadcast(whole, root)
            grid.x.reduce(whole, root)
            expected = {"all_gather": (n - 1, size - own), "reduce_scatter": (n - 1, size - own),
                        "all_reduce": (2 * (n - 1), 2 * (size - flat)),
                        "broadcast": (other, other * size), "reduce": (other, other * size)}
            assert grid.traffic() == ({} if n == 1 else {
                ("x", kind): Traffic(1, messages, words, words * np.dtype(dtype).itemsize)
                for kind, (messages, words) in expected.items()})


# --- Memory --------------------------------------------------------------------------------

def address(a: np.ndarray) -> int:
    return a.__array_interface__["data"][0]


def test_the_pool_lends_storage_again_only_when_its_last_view_has_gone():
    pool, shape, dtype = Pool(), (8, 128), np.dtype("float64")
    a = pool.take(shape, dtype)
    a[...] = 7
    where, row = address(a), a[3:5].T.reshape(-1)[::2]
    view = a.reshape(-1).view("int64")[100:200]
    del a, row
    gc.collect()
    other = pool.take(shape, dtype)
    other[...] = 0
    assert address(other) != where
    assert (view.view("float64") == 7).all()
    assert pool.in_use == pool.reserved == 2 * 8 * 1024
    del view
    gc.collect()
    assert pool.in_use == 8 * 1024
    assert address(pool.take(shape, dtype)) == where
    assert pool.reserved == 2 * 8 * 1024


def test_the_pool_counts_what_is_lent_and_the_most_that_ever_was():
    pool, byte = Pool(), np.dtype("uint8")
    a, b = pool.take((Pool.granularity + 1,), byte), pool.take((0, 5), byte)
    assert (a.shape, a.dtype, b.shape) == ((Pool.granularity + 1,), byte, (0, 5))
    assert pool.in_use == pool.peak == 3 * Pool.granularity    # two of them for a, one for b
    del a
    small = pool.take((1,), byte)
    assert (pool.in_use, pool.peak) == (2 * Pool.granularity, 3 * Pool.granularity)
    del small
    pool.reset_peak()
    assert pool.peak == Pool.granularity
    c = pool.take((2 * Pool.granularity,), byte)               # the storage that a had
    assert (pool.peak, pool.reserved) == (3 * Pool.granularity, 4 * Pool.granularity)
    d = pool.take((3, 5), np.dtype("float32"))
    assert pool.reserved == 4 * Pool.granularity and d.flags.c_contiguous and d.flags.writeable
    assert len(c) == 2 * Pool.granularity


def test_arrays_lent_at_the_same_time_share_nothing():
    pool, rng = Pool(), np.random.default_rng(0)
    lent = []
    for step in range(300):
        if lent and rng.random() < 0.45:
            a, value = lent.pop(rng.integers(len(lent)))
            assert (a == value).all()
            del a
        else:
            a = pool.take(tuple(rng.integers(0, 40, 2)), np.dtype("float64"))
            a[...] = step
            lent.append((a, step))
    assert all((a == value).all() for a, value in lent)
    assert pool.reserved < 300 * 4096


@pytest.mark.ranks(8)
def test_collectives_reuse_their_memory(comm, no_backends):
    """A second round of the same collectives takes nothing new from the system.

    The memory is this test's own: other tests' may go back to the system in any round.
    """
    with on_grid(comm, 2, 2, 2) as grid:
        whole = integers((6, 7), 0)

        def round_of_all():
            for axis in grid.axes.values():
                axis.all_reduce(axis.all_gather(axis.reduce_scatter(whole, 1), 1, [4, 3]))
        round_of_all()
        before = grid.backend.memory()
        for _ in range(5):
            round_of_all()
        assert grid.backend.memory() == before
