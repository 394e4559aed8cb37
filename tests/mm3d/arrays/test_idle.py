"""Memory that nobody uses is used again by arrays of other sizes, or goes back to the system."""
import errno
import mmap
import os
import random
import re
import time
from pathlib import Path

import numpy as np
import pytest

from mm3d.arrays.pool import (GRANULARITY_BYTES, MIN_BOUND_BYTES, MIN_HUGE_BYTES, WINDOW_PIECES,
                              IdleMemory, Pool, size_class)
from mm3d.grid.split import Split
from reference import integers, on_grid

proc = pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="no /proc/self/smaps")
MiB = 1 << 20


def held(pattern: str, field: str) -> int:
    """Bytes of this process' memory whose mappings have a name that matches."""
    total, name = 0, ""
    # Line by line: all of them at once would take megabytes, which count next time.
    with Path("/proc/self/smaps").open() as file:
        for line in file:
            key, *rest = line.split()
            if re.match("[0-9a-f]+-[0-9a-f]+$", key):
                name = rest[4] if len(rest) > 4 else ""
            elif key == f"{field}:" and re.search(pattern, name):
                total += 1024 * int(rest[0])
    return total


def test_size_classes_are_few_and_less_than_an_eighth_too_large():
    lengths = range(0, 400 * GRANULARITY_BYTES, GRANULARITY_BYTES // 4)
    classes = [size_class(n) for n in lengths]
    for length, size in zip(lengths, classes):
        exact = max(1, -(-length // GRANULARITY_BYTES)) * GRANULARITY_BYTES
        assert exact <= size < exact * 9 / 8 and size % GRANULARITY_BYTES == 0
        assert size == exact or length > 16 * GRANULARITY_BYTES
        assert size_class(size) == size
    assert classes == sorted(classes) and len({n for n in classes if n > 2 ** 20}) <= 8
    assert len({size_class(n) for n in range(1, 1 << 30, 99_999)}) < 200


def test_what_has_lain_idle_longest_goes_first():
    """Of sizes in tenths of the least bound."""
    found, part = IdleMemory(), MIN_BOUND_BYTES // 10
    for size, piece in ((4, "a"), (2, "b"), (4, "c"), (3, "d")):
        found.put(size * part, piece)
    assert found.bytes == 13 * part and found.bound == MIN_BOUND_BYTES
    assert found.take_surplus() == ["a"] and found.take_surplus() == []
    assert found.bytes == 9 * part
    number, piece = found.get(4 * part)
    assert piece == "c" and found.get(4 * part) is None and found.get(5) is None
    found.undo_get(4 * part, (number, piece))
    found.put(8 * part, "e")
    assert found.take_surplus() == ["b", "c", "d"] and found.bytes == 8 * part
    found.note_in_use(9 * part)
    assert found.bound == 18 * part


def test_the_bound_follows_what_is_used_of_late():
    found, bounds = IdleMemory(), []
    for turn in range(6 * WINDOW_PIECES):
        found.put(1, turn)
        found.get(1)
        found.note_in_use(MIN_BOUND_BYTES * (3 if turn < 1.6 * WINDOW_PIECES else 1))
        bounds.append(found.bound // MIN_BOUND_BYTES)
    assert bounds[int(1.6 * WINDOW_PIECES)] == 6 and bounds[-1] == 2
    assert bounds == sorted(bounds, reverse=True)


@proc
def test_the_pool_holds_no_more_than_it_says_whatever_the_sizes():
    """600 MiB of 120 sizes one after another, counted by the system."""
    pool, before = Pool(), held("^$", "Rss")
    kept = pool.take((2 * MiB,), np.dtype("uint8"))
    kept[...] = 1
    for turn in range(120):
        for times in (1, 3):    # some larger ones, of which the most are alive at one time
            a = pool.take((turn * 40_000 + times * MiB,), np.dtype("uint8"))
            a[...] = 1
            assert pool.bytes <= max(MIN_BOUND_BYTES, 2 * pool.peak)
            assert pool.reserved <= pool.in_use * 9 / 8 + max(MIN_BOUND_BYTES, 2 * pool.peak)
            del a
    kept_too = pool.take((1,), np.dtype("uint8"))
    assert pool.bytes <= max(MIN_BOUND_BYTES, 2 * pool.peak) < 21 * MiB
    assert held("^$", "Rss") - before <= pool.reserved + 2 * MiB < 26 * MiB
    del kept, kept_too
    pool.clear()
    assert pool.reserved == 0 and held("^$", "Rss") - before <= 2 * MiB


class Ending(Pool):
    """A pool in which an array ends while memory for another one is made."""

    def _allocate(self, size):
        ending.clear()
        return super()._allocate(size)


ending: list[np.ndarray] = []


def test_an_array_that_ends_while_another_one_is_taken_is_counted():
    """Its memory is idle at once, and taken next; no byte is counted twice."""
    pool, byte, unit = Ending(), np.dtype("uint8"), GRANULARITY_BYTES
    ending.append(pool.take((2 * unit - 1,), byte))
    address = ending[0].ctypes.data
    a = pool.take((3 * unit,), byte)
    assert (pool.in_use, pool.bytes, pool.reserved) == (3 * unit, 2 * unit, 5 * unit)
    b = pool.take((unit + 1,), byte)
    assert b.ctypes.data == address and (pool.in_use, pool.bytes) == (5 * unit, 0)
    del a, b
    assert (pool.in_use, pool.bytes, pool.peak) == (0, 5 * unit, 5 * unit)


class Deaf(mmap.mmap):
    """Memory of a kernel that takes no advice about it, such as one without large pages."""

    def madvise(self, *advice):
        asked.append(advice)
        raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))


asked: list[tuple] = []


def test_a_kernel_without_large_pages_gives_memory_all_the_same(monkeypatch):
    monkeypatch.setattr(mmap, "mmap", Deaf)
    asked.clear()
    a = Pool().take((MIN_HUGE_BYTES,), np.dtype("uint8"))
    a[...] = 1
    assert a.sum() == MIN_HUGE_BYTES and asked == [(mmap.MADV_HUGEPAGE,)]


@pytest.mark.ranks(2)
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd_create")
def test_ranks_go_on_where_the_kernel_takes_no_shared_memory_back(comm, monkeypatch):
    """It stays what it was: regions beyond the bound are used again, with what lies in them."""
    monkeypatch.setenv("MM3D_TRANSPORT", "shared")
    monkeypatch.setattr(mmap, "mmap", Deaf)
    asked.clear()
    with on_grid(comm, x=2) as grid:
        for turn in range(24):
            block = np.full((1, (turn + 8) * MiB // 64), turn + comm.rank)
            assert (grid.x.all_gather(block) == [[turn], [turn + 1]]).all()
        assert comm.allgather(bool(asked)) == [True, False]
        assert {advice[0] for advice in asked} <= {mmap.MADV_REMOVE}


@proc
@pytest.mark.ranks(4)
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd_create")
def test_ranks_hold_no_more_shared_memory_than_they_say_whatever_the_sizes(comm, monkeypatch):
    """Some hundred MiB of many sizes, 3 MiB alive, counted by the system over all ranks."""
    monkeypatch.setenv("MM3D_TRANSPORT", "shared")

    def shared():
        return comm.allreduce(held("memfd:mm3d", "Pss"))

    with on_grid(comm, x=comm.size) as grid:
        books = grid.x.transport.memory.regions
        before = shared()
        alive = grid.x.all_gather(np.full((1, 3 * MiB // comm.size // 8), comm.rank + 1.0))
        most = 0
        for turn in range(50):
            split = Split(grid.x, 0, comm.size)
            columns = (MiB + turn * 50_000) // comm.size // 8
            block = split.empty((1, columns), "float64")
            most = max(most, books.in_use)
            whole = split.all_gather(block)
            term = split.term((comm.size, columns), "float64")
            term[...] = turn
            most = max(most, books.in_use)
            part = split.reduce_scatter(term)
            assert (part == turn * comm.size).all()
            del block, whole, term, part
            assert books.idle.bytes <= max(MIN_BOUND_BYTES, 2 * most)
        for _ in range(3):
            grid.x.transport.barrier()
        assert books.in_use == size_class(alive.nbytes)
        assert books.idle.bytes <= books.idle.bound <= max(MIN_BOUND_BYTES, 2 * most)
        assert shared() - before <= books.in_use + books.idle.bound + MiB
        assert sum(books._sizes) > 3 * books.idle.bound    # what would be held otherwise
        assert (alive == np.arange(1, comm.size + 1)[:, None]).all()
        assert len(set(comm.allgather((len(books), books.idle.bytes, books.in_use)))) == 1
        del alive


class NothingIdle(IdleMemory):
    """Memory that goes back to the system as soon as nobody uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self.bound = -1

    def note_in_use(self, in_use):
        """Leave the bound as it is: all is too much."""

    def put(self, size, piece):
        super().put(size, piece)
        self.sizes.append(size)

    def take_surplus(self):
        sizes, self.sizes = self.sizes, []
        return [found[1] for size in sizes if (found := self.get(size))]


@pytest.mark.ranks(4, slow=(8,))
@pytest.mark.limit(300)
@pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="this system has no memfd_create")
def test_no_memory_is_taken_away_from_who_uses_it(comm, monkeypatch):
    """All goes back at each meeting; random sizes, delays and lifetimes, exact integers."""
    monkeypatch.setenv("MM3D_TRANSPORT", "shared")
    late, order = random.Random(comm.rank), random.Random(comm.size)
    kept, emptied = [], 0
    with on_grid(comm, x=comm.size) as grid:
        regions = grid.x.transport.memory.regions
        regions.idle = NothingIdle()
        for turn in range(300):
            split = Split(grid.x, 0, comm.size)
            whole = integers((comm.size, order.choice((900, 1000, 3000, 9000))), turn)
            block = split.empty((1, whole.shape[1]), whole.dtype)
            block[...] = whole[comm.rank]
            kept.append((split.all_gather(block), whole))
            if late.random() < 0.1:
                time.sleep(late.random() / 300)
            term = split.term(whole.shape, whole.dtype)
            term[...] = whole
            assert np.array_equal(split.reduce_scatter(term), whole[comm.rank:comm.rank + 1]
                                  * comm.size), turn
            for old, was in kept:
                assert np.array_equal(old, was), turn
            kept = kept[order.randrange(4):][-4:]
            emptied += len(regions.emptied)
        assert emptied > 100 and len(regions) < 100
        kept.clear()
        del block, term, old
