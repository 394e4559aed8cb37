"""Ranks that give copies of what others have placed, or make different calls, in shared memory."""
import os
from itertools import product

import numpy as np
import pytest

import mm3d
from mm3d.grid.split import Split
from mm3d.transport import barrier
from mm3d.transport.segments import MESSAGE_BYTES, SEGMENT_BYTES
from reference import integers, on_grid

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"),
                                reason="this system has no memfd_create")
SMALL, LARGE = 3, MESSAGE_BYTES // 8 + 1    # columns: rows that fit in a message, and do not


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    monkeypatch.setenv("MM3D_TRANSPORT", "shared")


def placed(comm, made, values: np.ndarray, copying: set[int], turn: int) -> np.ndarray:
    """An array made by `made` with these values, or on some ranks a copy: of it, or alone."""
    a = made(values.shape, values.dtype)
    a[...] = values
    if comm.rank not in copying:
        return a
    copy = a.copy()
    if turn % 2:
        a[...] = 99    # what was placed and not given is not looked at
    return copy


@pytest.mark.ranks(2, 8)
def test_ranks_may_give_copies_of_what_others_have_placed(comm):
    """Whoever does, and whether the copy's original lives on; uneven blocks, exact integers."""
    length, mine = 2 * comm.size + 1, comm.rank
    several = [{0}, {comm.size - 1}, set(range(1, comm.size)), set(), set(range(comm.size))]
    with on_grid(comm, x=comm.size) as grid:
        for columns, dim in product((SMALL, LARGE), (0, 1)):
            split = Split(grid.x, dim, length)
            cut = [slice(None)] * 2
            cut[dim] = slice(sum(split.counts[:mine]), sum(split.counts[:mine + 1]))
            shape = (length, columns) if dim == 0 else (columns, length)
            for turn, copying in enumerate(several * 2):
                whole = integers(shape, turn)
                block = placed(comm, split.empty, whole[tuple(cut)], copying, turn)
                assert np.array_equal(split.all_gather(block), whole), (turn, copying)
                term = placed(comm, split.term, whole * (mine + 1), copying, turn)
                part = split.reduce_scatter(term)
                assert np.array_equal(part, whole[tuple(cut)] * sum(range(comm.size + 1))), turn
            del block, term, part
            books = grid.x.transport.memory.regions
            assert len(set(comm.allgather((len(books), books.in_use)))) == 1


@pytest.mark.ranks(4)
@pytest.mark.parametrize("columns", [SMALL, LARGE])
def test_lengths_on_which_two_ranks_do_not_agree_are_refused_on_all(comm, columns):
    with on_grid(comm, x=4) as grid:
        a, ones = integers((4, columns), 0), [1] * 4
        wrong = [1, 2, 1, 1] if comm.rank == 2 else ones
        with pytest.raises(ValueError, match="rank 1 sends a block of 1 to rank 2 of this line, "
                                             "which is to receive 2"):
            grid.x.all_to_all(a, ones, wrong)
        got = grid.x.all_to_all(a, ones, ones)
        assert np.array_equal(got, np.concatenate([a[comm.rank:comm.rank + 1]] * 4))
        with pytest.raises(ValueError, match="different calls"):
            if comm.rank == 1:
                grid.x.all_gather(a[:1], 0, ones)
            else:
                grid.x.all_to_all(a, ones, ones)


@pytest.mark.ranks(4)
def test_copies_are_made_where_there_is_no_room_left(comm):
    """In another segment, which all ranks open together."""
    with on_grid(comm, x=comm.size) as grid:
        memory, split, kept = grid.x.transport.memory, Split(grid.x, 0, comm.size), []
        length = SEGMENT_BYTES
        while (length := length // 2) > 1 << 19:    # one MiB is left; no page is touched
            memory.take(length)
        for turn in range(12):
            block = placed(comm, split.empty, np.full((1, LARGE * 4), comm.rank + turn * 1.0),
                           {turn % comm.size} if turn % 3 else set(range(comm.size)), 0)
            kept.append(split.all_gather(block))
            assert (kept[-1] == np.arange(comm.size)[:, None] + turn).all()
            term, root = np.full((comm.size, LARGE), turn), turn % comm.size
            kept.append(split.reduce_scatter(term))
            assert (kept[-1] == turn * comm.size).all()
            if (total := grid.x.reduce(term, root)) is not None:
                assert (total == turn * comm.size).all() and comm.rank == root
                kept.append(total)
            kept.append(grid.x.broadcast(term + comm.rank, root))
            assert (kept[-1] == turn + root).all()
        del kept, block, term, total


DIFFERENT = {
    "dtype": lambda axis, odd, n: axis.all_gather(np.ones((2, n), "float32" if odd else "int32")),
    "dim": lambda axis, odd, n: axis.all_gather(np.ones((2, n)), int(odd), [2 + odd * (n - 2)] *
                                                axis.size),
    "shape": lambda axis, odd, n: axis.all_gather(np.ones((2, n + odd)), 0, [2] * axis.size),
    "counts": lambda axis, odd, n: axis.reduce_scatter(
        np.ones((2 * axis.size, n)), 0, [1 + 2 * (odd != (rank % 2)) if rank < 2 else 2
                                         for rank in range(axis.size)]),
    "rows of terms": lambda axis, odd, n: axis.reduce_scatter(np.ones((axis.size + odd, n))),
    "call": lambda axis, odd, n: (axis.all_reduce if odd else axis.reduce_scatter)(
        np.ones((2 * axis.size, n))),
    "size, and so the way": lambda axis, odd, n: axis.all_reduce(
        np.ones(n if odd else 2 * MESSAGE_BYTES)),
    "placed": lambda axis, odd, n: axis.all_gather(Split(axis, 0, 2 * axis.size).empty(
        (2, n), "float32" if odd else "int32"), 0, [2] * axis.size),
}


@pytest.mark.ranks(4)
@pytest.mark.parametrize("columns", [SMALL, LARGE])
def test_different_calls_are_an_error_on_all_ranks(comm, columns):
    """The same on all, which names them; and the next right call finds all in order."""
    with on_grid(comm, x=comm.size) as grid:
        odd = comm.rank == comm.size - 1
        for turn, (what, call) in enumerate(2 * [*DIFFERENT.items()]):
            with pytest.raises(ValueError, match="ranks of this line make different calls") as e:
                call(grid.x, odd, columns)
            assert len(set(comm.allgather(str(e.value)))) == 1, what
            assert f"rank {comm.size - 1}: " in str(e.value), what
            assert grid.x.all_gather(np.full((1, columns), turn)).shape == (comm.size, columns)
            assert grid.x.all_reduce(np.ones((2, columns))).max() == comm.size


@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", ["root of a broadcast", "root of a sum", "what is placed"])
def test_what_nobody_waits_for_is_an_error_when_all_meet(comm, way):
    """No rank gets on beyond that with what it was never sent."""
    odd = comm.rank == 3
    grid = mm3d.Grid(comm, x=comm.size)
    try:
        if way == "root of a broadcast":
            grid.x.broadcast(np.ones(SMALL), 3 if odd else 0)
        elif way == "root of a sum":
            grid.x.reduce(np.ones(SMALL), 3 if odd else 2)
    except ValueError as error:
        assert "different calls" in str(error)
    if way == "what is placed" and odd:
        Split(grid.x, 0, 4).empty((1, SMALL), "float64")
    for _ in range(2):
        with pytest.raises(ValueError, match="before this call .* different ones: all ranks") as e:
            grid.x.all_gather(np.ones((1, SMALL)), 0, [1] * 4)
        assert len(set(comm.allgather(str(e.value)))) == 1
    for axis in grid.axes.values():
        axis.comm.Free()
    grid.axes.clear()


@pytest.mark.parametrize("name", ["float64", "float16", "int32", "bool", "bfloat16"])
def test_a_call_names_its_dtype(name):
    """Also one that NumPy does not know by its letter."""
    if name == "bfloat16":
        dtype = np.dtype(pytest.importorskip("ml_dtypes").bfloat16)
    else:
        dtype = np.dtype(name)
    one, other = (barrier.encode_call(barrier.ALL_REDUCE, dtype, shape)
                  for shape in ((3,), (4,)))
    assert barrier.format_call(one) == f"all-reduce of (3,) in {name}"
    message = barrier.format_call_difference([(0, one), (1, other)])
    assert f"rank 1: all-reduce of (4,) in {name}" in message


@pytest.mark.ranks(2)
@pytest.mark.parametrize("cores, looks", [(1, 0), (2, barrier.OWN_CORE_LOOKS)])
def test_ranks_look_longer_before_they_sleep_where_each_has_a_core(comm, monkeypatch, have_cores,
                                                                   cores, looks):
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    monkeypatch.delenv("SLURM_CPUS_ON_NODE", raising=False)
    have_cores(cores)
    with on_grid(comm, x=2) as grid:
        assert grid.x.transport.memory.barrier.looks == looks
