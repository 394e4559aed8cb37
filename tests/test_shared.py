"""Blocks in memory that ranks share: no copies, no races, nothing left behind."""
import os
import random
import time
from pathlib import Path

import numpy as np
import pytest

import mm3d
from mm3d.choice import transport_for
from mm3d.shared import SharedMemory, SharedTransport
from reference import integers, on_grid
from support import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"),
                                reason="this system has no memfd_create")


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    """The transport of this module, also for programs that a test starts."""
    monkeypatch.setenv("MM3D_TRANSPORT", "shared")


@pytest.fixture
def copies(monkeypatch):
    """The axis and kind of every collective that had to copy its operand into shared memory."""
    found = []
    gather, reduce = SharedTransport.all_gather, SharedTransport.reduce_scatter

    def all_gather(self, a, dim, counts):
        found.extend(["all_gather"] * (self._whole(a, dim, list(counts)) is None))
        return gather(self, a, dim, counts)

    def reduce_scatter(self, a, dim, counts):
        terms = []
        with monkeypatch.context() as patch:
            patch.setattr(SharedTransport, "term",
                          lambda self, *args, term=SharedTransport.term:
                          terms.append(args) or term(self, *args))
            out = reduce(self, a, dim, counts)
        found.extend(["reduce_scatter"] * len(terms))
        return out

    monkeypatch.setattr(SharedTransport, "all_gather", all_gather)
    monkeypatch.setattr(SharedTransport, "reduce_scatter", reduce_scatter)
    return found


@pytest.mark.ranks(8)
@pytest.mark.parametrize("options, gathers", [({}, 1), ({"rows": "positions"}, 1 + 2)])
def test_products_copy_nothing(comm, copies, options, gathers):
    """But what the caller brings, dy, and keys and values, which are a part of a block.

    Vectors are copied too: their blocks lie on the diagonal only.
    """
    scheme = mm3d.scheme("3d", comm, **options)
    assert all(axis.transport.name == "shared" for axis in scheme.grid.axes.values())
    model = mm3d.Transformer(scheme, layers=1, hidden=24, heads=4, batch=8, seq=4)
    x, dy = model.random("x"), model.random("dy")
    model.backward(dy, model.forward(x)[1])
    vectors = {"all_gather": 4 + 2 * 2, "reduce_scatter": 4 + 2 * 2}
    assert copies.count("all_gather") == vectors["all_gather"] + gathers
    assert copies.count("reduce_scatter") == vectors["reduce_scatter"]
    scheme.grid.free()


@pytest.mark.ranks(4, 8)
@pytest.mark.limit(300)
def test_no_block_changes_while_another_rank_reads_it(comm):
    """Random delays, random lifetimes that differ between ranks, exact integers."""
    chance = random.Random(comm.rank)
    kept = []
    with on_grid(comm, x=comm.size) as grid:
        split = grid.x.split(0, 3 * comm.size + 1)
        mine = slice(*(sum(split.counts[:n]) for n in (comm.rank, comm.rank + 1)))
        for turn in range(1500):
            expected = integers((split.extent, 5), turn)
            block = split.empty(expected[mine].shape, expected.dtype)
            block[...] = expected[mine]
            whole = split.all_gather(block)
            total = split.term(expected.shape, expected.dtype)
            total[...] = expected * (comm.rank + 1)
            part = split.reduce_scatter(total)
            if chance.random() < 0.05:
                time.sleep(chance.random() / 300)
            assert np.array_equal(whole, expected), turn
            assert np.array_equal(part, expected[mine] * sum(range(comm.size + 1))), turn
            kept.append((whole, expected))
            if chance.random() < 0.3:
                kept = kept[chance.randrange(len(kept)):]
            for old, was in kept[:2]:
                assert np.array_equal(old, was), turn
            kept = kept[-20:]
        kept.clear()


@pytest.mark.ranks(4)
def test_regions_are_used_again_once_all_ranks_have_given_them_back(comm):
    memory = SharedMemory(comm)
    first, _ = memory.take(100)
    second, _ = memory.take(100)
    assert second != first
    comm.Barrier()
    if comm.rank != 2:
        memory.give_back(first)
    comm.Barrier()
    third, _ = memory.take(100)
    assert third not in (first, second)     # rank 2 still has the first
    comm.Barrier()
    if comm.rank == 2:
        memory.give_back(first)
    comm.Barrier()
    assert memory.take(100)[0] == first
    comm.Barrier()
    memory.free()


@pytest.mark.ranks(8)
def test_descriptors_are_closed(comm):
    """However many arrays are shared, few files are open."""
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with on_grid(comm, x=comm.size) as grid:
        split = grid.x.split(0, comm.size)
        kept = [split.all_gather(split.empty((1,), np.float64)) for _ in range(200)]
        assert descriptors() < before + 20
        assert len({a.__array_interface__["data"] for a in kept}) == 200
    assert descriptors() <= before + 3      # what MPI opened for the communicator


@pytest.mark.ranks(1, 8)
def test_the_transport_is_a_setting(comm, monkeypatch):
    monkeypatch.setenv("MM3D_TRANSPORT", "mpi")
    with on_grid(comm, x=comm.size) as grid:
        assert grid.x.transport.name == "mpi"
    monkeypatch.setenv("MM3D_TRANSPORT", "smoke")
    with pytest.raises(ValueError, match="MM3D_TRANSPORT='smoke' is unknown .*: choose mpi or"):
        mm3d.Grid(comm, x=comm.size)


@pytest.mark.ranks(4)
def test_ranks_of_several_nodes_use_mpi(comm, monkeypatch):
    """The first two ranks on one node, the last two on another."""
    node_size = 2

    class Nodes:
        def __init__(self, comm):
            self.comm, self.size = comm, comm.size

        def Split_type(self, kind):
            return self.comm.Split(self.comm.rank // node_size)

        def __getattr__(self, name):
            return getattr(self.comm, name)

    backend = mm3d.Grid(comm, x=comm.size).backend
    assert transport_for(Nodes(comm), backend, "shared").name == "mpi"
    node_size = comm.size
    assert transport_for(Nodes(comm), backend, "shared").name == "shared"


def test_a_crash_leaves_nothing_behind(tmp_path):
    """Memory without a name goes with its processes, however they end."""
    program = tmp_path / "crash.py"
    program.write_text("""
import os, signal, sys
import mm3d
from mpi4py import MPI
comm = MPI.COMM_WORLD
model = mm3d.Transformer(mm3d.scheme("3d", comm), layers=1, hidden=8, heads=2, batch=4, seq=2)
y, saved = model.forward(model.random("x"))
comm.Barrier()
if comm.rank == 3:
    os.kill(os.getpid(), signal.SIGKILL)
comm.Barrier()
""")

    def names():
        return {path.name for path in Path("/dev/shm").iterdir() if "mm3d" in path.name}

    before = names()
    assert run_ranks(8, str(program)).returncode != 0
    assert names() == before
