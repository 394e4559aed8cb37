"""Blocks in memory that ranks share: no copies, no races, nothing left behind."""
import errno
import os
import random
import re
import resource
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.grid.split import Split
from mm3d.transport.barrier import SLOTS
from mm3d.transport.nodes import own_node
from mm3d.transport.segments import (MAX_RETURNED, MAX_TAKEN, MESSAGE_BYTES, SEGMENT_BYTES,
                                     SharedMemory)
from models import SIZES, data, differences, random_state, serial, train
from reference import integers, on_grid
from support import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"),
                                reason="this system has no memfd_create")
EVEN = SIZES["even"]
few_turns = pytest.mark.parametrize("turns", [300, pytest.param(1500, marks=pytest.mark.slow)])


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    """The transport of this module, also for programs that a test starts."""
    monkeypatch.setenv("MM3D_TRANSPORT", "shared")


class Counting:
    """A transport that counts its gathers and sums of what had to be copied."""

    def __init__(self, transport, copied) -> None:
        self.transport, self.copied = transport, copied

    def __getattr__(self, name):
        return getattr(self.transport, name)

    def all_gather(self, a, dim, counts):
        whole = self.transport.all_gather(a, dim, counts)
        self.copied["all_gather"] += self.transport.take_moved() > 0
        return whole

    def reduce_scatter(self, a, dim, counts):
        part = self.transport.reduce_scatter(a, dim, counts)
        read = (self.transport.size - 1) * part.size
        self.copied["reduce_scatter"] += self.transport.take_moved() > read
        return part


@pytest.mark.ranks(8)
@pytest.mark.parametrize("options, gathers", [({}, 1), ({"rows": "positions"}, 1 + 2)])
def test_products_copy_nothing(comm, options, gathers):
    """But what the caller brings, dy, and keys and values, which are a part of a block.

    Vectors are copied too, all of a layer at once: their blocks lie on the diagonal only.
    """
    scheme, copied = mm3d.scheme("3d", comm, **options), Counter()
    model = mm3d.Transformer(scheme, layers=1, hidden=24, heads=4, batch=8, seq=4)
    x, dy = model.random("x"), model.random("dy")
    for axis in scheme.grid.axes.values():
        assert axis.transport.name == "shared"
        axis.transport = Counting(axis.transport, copied)
    model.backward(dy, model.forward(x)[1])
    assert copied == {"all_gather": 1 + gathers, "reduce_scatter": 1}


@pytest.mark.ranks(4, slow=(8,))
@pytest.mark.limit(300)
@few_turns
@pytest.mark.parametrize("columns", [3, MESSAGE_BYTES // 16 + 1])
def test_every_collective_is_exact_whoever_is_late(comm, turns, columns):
    """In random order with random delays, in both ways: handed to all, and in regions."""
    late, order = random.Random(comm.rank), random.Random(comm.size)
    n = 2 * comm.size + 1
    numbers = integers((turns + n * (comm.size + columns),), 0)
    with on_grid(comm, x=comm.size) as grid:
        mine = Split(grid.x, 0, n)
        cut = np.cumsum([0, *mine.counts])[comm.rank:comm.rank + 2]
        for turn in range(turns):
            kind, root = order.randrange(5), order.randrange(comm.size)
            terms = [numbers[turn + rank * n:][:n * columns].reshape(n, columns)
                     for rank in range(comm.size)]
            total, own = sum(terms), terms[comm.rank].copy()
            if late.random() < 0.1:
                time.sleep(late.random() / 300)
            if kind == 0:
                found, expected = mine.all_gather(own[slice(*cut)]), np.concatenate(
                    [term[start:stop] for term, start, stop in zip(
                        terms, np.cumsum([0, *mine.counts]), np.cumsum(mine.counts))])
            elif kind == 1:
                found, expected = mine.reduce_scatter(own), total[slice(*cut)]
            elif kind == 2:
                found, expected = grid.x.all_reduce(own), total
            elif kind == 3:
                found, expected = grid.x.broadcast(own, root), terms[root]
            else:
                found = grid.x.reduce(own, root)
                expected = total if comm.rank == root else found
            # What a rank has given is its own again, whatever the others are doing.
            if found is not own:
                own[...] = 99
            if late.random() < 0.1:
                time.sleep(late.random() / 300)
            assert found is expected is None or np.array_equal(found, expected), (turn, kind)


@pytest.mark.ranks(4)
def test_who_alone_has_something_to_say_waits_for_nobody(comm):
    """Until its mail is full; and who has something for one rank waits for none of the others."""
    segments = SharedMemory(comm)
    for way in (segments.broadcast, segments.gather):
        comm.Barrier()
        ahead = comm.rank == 0 if way == segments.broadcast else comm.rank != 0
        if ahead:
            for turn in range(SLOTS - 1):
                way(np.full(3, turn), 0)
        comm.Barrier()
        if not ahead:
            for turn in range(SLOTS - 1):
                found = np.concatenate([way(np.full(3, turn), 0)]).reshape(-1, MESSAGE_BYTES // 8)
                assert (found[:, :3] == turn).all()
        segments.synchronize()


@pytest.mark.ranks(4)
@pytest.mark.parametrize("way", ["mpi", "shared"])
def test_no_object_is_pickled_after_the_start(comm, monkeypatch, way):
    """A step of training sends arrays only."""
    monkeypatch.setenv("MM3D_TRANSPORT", way)
    scheme = mm3d.scheme("3d", comm, grid=(1, 2, 2))
    model = mm3d.Transformer(scheme, layers=1, hidden=8, heads=2, batch=4, seq=2)
    x, dy = model.random("x"), model.random("dy")

    def refuse(*args):
        raise AssertionError("an object was pickled")

    MPI.pickle.__init__(refuse, refuse)
    try:
        with pytest.raises(AssertionError, match="pickled"):
            MPI.COMM_SELF.bcast(0)
        model.backward(dy, model.forward(x)[1])
    finally:
        MPI.pickle.__init__()


@pytest.mark.ranks(4)
def test_regions_are_used_again_once_all_ranks_have_given_them_back(comm):
    segments = SharedMemory(comm)
    first, _ = segments.take(100)
    second, _ = segments.take(100)
    assert second != first
    if comm.rank != 2:
        segments.give_back(first)
    segments.synchronize()
    assert segments.take(100)[0] not in (first, second)     # rank 2 still has the first
    if comm.rank == 2:
        segments.give_back(first)
    assert segments.take(100)[0] != first     # which the others do not know yet
    segments.synchronize()
    assert segments.take(100)[0] == first
    segments.synchronize()


@pytest.mark.ranks(4)
def test_each_rank_accounts_for_its_share(comm, no_backends):
    """A gathered array is there once for all ranks, a term once for each.

    The memory is this test's own: what others held may be given back at any time.
    """
    with on_grid(comm, x=comm.size) as grid:
        before = grid.backend.memory()["in_use"]
        split = Split(grid.x, 0, 40)
        whole = split.all_gather(split.empty((10, 7), np.float64))
        assert grid.backend.memory()["in_use"] == before + 40 * 7 * 8 // comm.size
        term = split.term((40, 7), np.float64)
        terms = 40 * 7 * 8
        assert grid.backend.memory()["in_use"] == before + terms + 40 * 7 * 8 // comm.size
        grid.backend.release_idle_memory()
        assert grid.backend.memory()["reserved"] == grid.backend.memory()["in_use"]
        del whole, term
        segments = grid.backend.memory()
        assert segments["in_use"] == segments["reserved"] == before


@pytest.mark.ranks(4)
def test_more_regions_than_one_meeting_can_hear_of_are_used_again(comm):
    segments = SharedMemory(comm)
    regions = [segments.take(100)[0] for _ in range(3 * MAX_RETURNED)]
    assert len(set(regions)) == 3 * MAX_RETURNED
    for region in regions:
        segments.give_back(region)
    for _ in range(3):
        segments.synchronize()
    assert {segments.take(100)[0] for _ in regions} == set(regions)
    segments.synchronize()


@pytest.mark.ranks(4)
def test_memory_does_not_grow_where_ranks_never_meet_otherwise(comm):
    """Blocks made and dropped without ever being gathered."""
    with on_grid(comm, x=comm.size) as grid:
        split = Split(grid.x, 0, comm.size)
        places = {split.empty((1,), np.float64).base.__array_interface__["data"]
                  for _ in range(1000)}
        assert len(places) <= 2 * MAX_TAKEN


@pytest.mark.ranks(8)
def test_descriptors_are_closed(comm):
    """However many arrays are shared, few files are open."""
    def descriptors():
        return len(os.listdir("/proc/self/fd"))

    before = descriptors()
    with on_grid(comm, x=comm.size) as grid:
        split = Split(grid.x, 0, comm.size)
        kept = [split.all_gather(split.empty((1,), np.float64)) for _ in range(200)]
        assert descriptors() < before + 20
        assert len({a.__array_interface__["data"] for a in kept}) == 200
    assert descriptors() <= before + 3      # what MPI opened for the communicator


def lock_out(patch, step: str) -> None:
    """Let the system refuse one step of sharing memory: "make" or "open"."""
    opened = os.open

    def refuse(path, *rest):
        if step == "open" and not str(path).startswith("/proc/"):
            return opened(path, *rest)
        raise PermissionError(errno.EPERM, "no")
    patch.setattr(os, "memfd_create" if step == "make" else "open", refuse)


# Who has no memory: the rank that makes it, or one that opens it, itself or another.
without_memory = pytest.mark.parametrize("rank, step", [(0, "make"), (0, "open"), (2, "open")])


@pytest.mark.ranks(8)
@pytest.mark.parametrize("step, without", [("make", "xz"), ("open", "xyz")])
def test_all_ranks_of_a_grid_hear_of_one_without_memory(comm, monkeypatch, step, without):
    """Also those of other lines, where sharing was asked for; else only its own go by MPI."""
    if comm.rank == 2:    # the first of its lines along x and z
        lock_out(monkeypatch, step)
    message = "the ranks of this node cannot share memory (Operation not permitted): set "
    with pytest.raises(OSError, match=re.escape(message + "MM3D_TRANSPORT=mpi")):
        mm3d.Grid(comm, x=2, y=2, z=2)
    monkeypatch.delenv("MM3D_TRANSPORT")
    with on_grid(comm, x=2, y=2, z=2) as grid:
        for name, axis in grid.axes.items():
            line = axis.comm.allgather(comm.rank)
            alone = 2 in line and name in without
            assert axis.transport.name == ("mpi" if alone else "shared"), name
            assert axis.all_gather(np.full(1, comm.rank)).tolist() == line
            assert axis.all_reduce(np.ones(3)).tolist() == [2] * 3


@pytest.mark.ranks(4)
@without_memory
def test_all_ranks_learn_that_there_is_no_more_memory(comm, monkeypatch, rank, step):
    """Beyond the first segment, and until one rank's trouble is over."""
    memory_of_all = SharedMemory(comm)
    with monkeypatch.context() as patch:
        if comm.rank == rank:
            lock_out(patch, step)
        for _ in range(3):
            with pytest.raises(OSError, match="cannot share memory .*set MM3D_TRANSPORT=mpi"):
                memory_of_all.take(SEGMENT_BYTES + 1)
    segment, start = memory_of_all.take(SEGMENT_BYTES + 1)[1]
    end = np.frombuffer(segment, np.int64, 1, start + SEGMENT_BYTES - 8)
    if comm.rank == 0:
        end[0] = 7
    memory_of_all.synchronize()
    assert end[0] == 7


@pytest.mark.ranks(4)
def test_memory_of_another_process_of_that_number_is_not_taken(comm, monkeypatch, tmp_path):
    """In a container of its own a rank finds there, if anything, what is not meant."""
    path = tmp_path / "other"
    path.write_bytes(b"not meant")
    with monkeypatch.context() as patch:
        if comm.rank == 1:
            patch.setattr(os, "open", lambda _, *rest, opened=os.open: opened(path, *rest))
        with pytest.raises(OSError, match="No such file"):
            SharedMemory(comm)


@pytest.mark.ranks(4)
def test_a_limit_on_the_size_of_files_is_known_at_the_start(comm):
    """What `ulimit -f` sets counts for memory, too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if comm.rank == 0:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26, before[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            SharedMemory(comm)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("wrong", ["0", "-1", "two", "²"])
def test_a_wrong_node_size_is_refused(comm, monkeypatch, wrong):
    monkeypatch.setenv("MM3D_NODE_SIZE", wrong)
    with pytest.raises(ValueError, match=f"MM3D_NODE_SIZE='{wrong}': give the number of ranks"):
        own_node(comm)


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
        # but for what a stand-in for a GPU's driver makes in another run of the tests
        return {path.name for path in Path("/dev/shm").glob("*mm3d*")
                if "standin" not in path.name}

    before = names()
    assert run_ranks(8, str(program)).returncode != 0
    assert names() <= before    # what another run of the tests had may be gone


# --- The model, step after step, whoever is late --------------------------------------------

@pytest.mark.ranks(8)
@pytest.mark.parametrize("node_size", [3, *(pytest.param(n, marks=pytest.mark.slow)
                                            for n in (2, 4))])
@pytest.mark.parametrize("grid, options", [
    ((2, 2, 2), {}), *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        ((2, 2, 2), {"overlap": True}), ((4, 2, 1), {"keep": "both"}),
        ((1, 4, 2), {"rows": "positions"})))])
def test_a_step_on_several_nodes_equals_serial(comm, monkeypatch, node_size, grid, options):
    """Some lines share memory and some go by MPI, of one direction or of several."""
    monkeypatch.setenv("MM3D_NODE_SIZE", str(node_size))
    scheme = mm3d.scheme("3d", comm, grid, "numpy", **options)
    names = {axis.transport.name for axis in scheme.grid.axes.values() if axis.size > 1}
    assert set.union(*comm.allgather(names)) == {"mpi", "shared"}
    model = mm3d.Transformer(scheme, **SIZES["uneven"], dtype="float64", causal=True)
    results = train(model, *data(**SIZES["uneven"]), steps=1)
    assert not differences(model, results, serial("uneven", True, 1), 1e-12, 1e-11)


def trained(comm, monkeypatch, grid: tuple[int, int, int], backward: bool,
            late: bool) -> list[np.ndarray]:
    """Outputs and gradients of a model whose weights change in place after each pass.

    Its products are `late` at random, differently on each rank, or else all ranks wait for each
    other before and after each change.
    """
    scheme, chance, found = mm3d.scheme("3d", comm, grid, "numpy"), random.Random(comm.rank), []
    model = mm3d.Transformer(scheme, **EVEN, dtype="float64")
    x, dy, state = model.random("x"), model.random("dy"), random_state(EVEN["layers"],
                                                                       EVEN["hidden"])

    def gemm(*arrays, multiply=scheme.grid.backend.gemm):
        if late and chance.random() < 0.3:
            time.sleep(chance.random() / 100)
        return multiply(*arrays)

    with monkeypatch.context() as patch:
        patch.setattr(scheme.grid.backend, "gemm", gemm, raising=False)
        for step in range(8):
            y, saved = model.forward(x)
            found.append(y.copy())
            if backward:
                found.append(model.backward(dy, saved).copy())
            late or comm.Barrier()
            if backward:
                for p in model.parameters:
                    p.value -= 0.01 * p.grad
            else:
                model.load({name: (step + 2) * a for name, a in state.items()})
            late or comm.Barrier()
    found += [p.grad.copy() for p in model.parameters]
    return found


@pytest.mark.ranks(8)
@pytest.mark.parametrize("grid", [(2, 2, 2), pytest.param((8, 1, 1), marks=pytest.mark.slow)])
@pytest.mark.parametrize("backward", [True, False])
def test_no_weight_changes_before_all_have_read_it(comm, monkeypatch, grid, backward):
    """A rank that is done changes its blocks, which others multiply with where they lie: the same
    bits whoever is late.

    After forward alone, the ranks that read a weight meet when others are loaded.
    """
    expected = trained(comm, monkeypatch, grid, backward, late=False)
    found = trained(comm, monkeypatch, grid, backward, late=True)
    assert all(map(np.array_equal, found, expected))


@pytest.mark.ranks(4)
def test_a_fork_takes_nothing_with_it(comm):
    """A child that drops all its arrays and ends does not give them back for its parent."""
    with on_grid(comm, x=comm.size) as grid:
        split = Split(grid.x, 0, comm.size)
        block = split.empty((1,), np.float64)
        block[...] = comm.rank
        whole = split.all_gather(block)
        child = os.fork()
        if child == 0:
            del block, whole
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        for turn in range(20):
            other = split.empty((1,), np.float64)
            other[...] = -1
            split.all_gather(other)
        assert np.array_equal(whole, range(comm.size))
        del block, whole, other


@pytest.mark.ranks(4)
def test_an_error_on_all_ranks_leaves_the_memory_in_order(comm):
    """Nothing is left half done by a collective that refuses its arguments."""
    with on_grid(comm, x=comm.size) as grid:
        split = Split(grid.x, 0, 2 * comm.size)
        for turn in range(100):
            term = split.term((2 * comm.size, 3), np.float64)
            with pytest.raises(ValueError, match="does not fit"):
                split.reduce_scatter(term[1:])
            block = split.empty((2, 3), np.float64)
            block[...] = turn
            with pytest.raises(ValueError, match="does not fit"):
                split.all_gather(block[1:])
            assert (split.all_gather(block) == turn).all()


@pytest.mark.ranks(8)
@pytest.mark.parametrize("options", [{"keep": "both", "rows": "positions"},
                                     pytest.param({}, marks=pytest.mark.slow)])
def test_steps_after_the_second_make_no_new_region(comm, options):
    """What was given back in one is taken again in the next."""
    scheme = mm3d.scheme("3d", comm, backend="numpy", **options)
    model = mm3d.Transformer(scheme, **EVEN)
    x, dy = model.random("x"), model.random("dy")
    memories = [axis.transport.memory for axis in scheme.grid.axes.values()]
    regions = []
    for _ in range(5):
        model.backward(dy, model.forward(x)[1])
        regions.append([len(memory.regions) for memory in memories])
    assert min(regions[1]) > 0 and regions[1:] == regions[1:2] * 4
