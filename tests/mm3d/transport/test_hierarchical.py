"""Collectives across nodes: exact, in a fixed order, and no block crosses a link twice."""
import math
import os

import numpy as np
import pytest

import mm3d
from mm3d.arrays.blocks import block_lengths
from mm3d.grid.axis import COLLECTIVES
from mm3d.selftest import failed_collectives
from mm3d.transport import lanes
from mm3d.transport.hierarchical import MAX_MPI_BYTES
from mm3d.transport.nodes import number_nodes, words_into_nodes
from models import passes
from reference import on_grid

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"),
                                reason="this system has no memfd_create")
LARGE = MAX_MPI_BYTES // 12    # words of a block; three of them are too large for MPI alone


@pytest.fixture(autouse=True)
def hierarchical(monkeypatch):
    """The transport of this module."""
    monkeypatch.setenv("MM3D_TRANSPORT", "hierarchical")


def of_nodes(monkeypatch, size: int) -> None:
    monkeypatch.setenv("MM3D_NODE_SIZE", str(size))


# On 4 ranks 3 + 1, 2 x 2 and 4 x 1; on 8 also 3 + 3 + 2, 4 x 2, 2 x 4 and 5 + 3.
@pytest.mark.ranks(4, slow=(8,))
@pytest.mark.parametrize("size, dtype", [(3, "float16"), *(
    pytest.param(*one, marks=pytest.mark.slow) for one in (
        (1, "float32"), (2, "int64"), (3, "float64"), (4, "float32"), (4, "float16"),
        (5, "float64"), (5, "float16")))])
def test_every_collective_is_right(comm, monkeypatch, size, dtype):
    """Even blocks, uneven ones and empty ones, also two of them in flight, small and large."""
    of_nodes(monkeypatch, size)
    with on_grid(comm, x=comm.size) as grid:
        assert grid.x.transport.name == ("hierarchical" if size < comm.size else "shared")
        assert not failed_collectives(grid, (1, 2 * LARGE + 3), (dtype,))


@pytest.mark.ranks(8)
@pytest.mark.parametrize("size", [5, pytest.param(4, marks=pytest.mark.slow)])
def test_lines_take_their_ranks_from_nodes_in_any_order(comm, monkeypatch, size):
    """Blocks that do not lie in a row on their node, and others that are not of its ranks."""
    of_nodes(monkeypatch, size)
    mixed = comm.Split(0, comm.rank % 3)
    with on_grid(mixed, x=8) as grid:
        assert not grid.x.transport.in_order
        assert not failed_collectives(grid, (LARGE // 5,), ("float32",))
    mixed.Free()


class Arrivals:
    """A lane's communicator that counts the bytes which its messages bring to this rank."""

    def __init__(self, comm) -> None:
        self.comm, self.bytes = comm, 0

    def __getattr__(self, name):
        return getattr(self.comm, name)

    def Irecv(self, buffer, source):
        self.bytes += buffer.nbytes
        return self.comm.Irecv(buffer, source)

    def Bcast(self, buffer, root):
        self.bytes += buffer.nbytes * (self.comm.rank != root)
        self.comm.Bcast(buffer, root)


@pytest.mark.ranks(8, slow=(4,))
@pytest.mark.parametrize("size", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_a_node_receives_what_it_must_and_no_more(comm, monkeypatch, size):
    """The closed form, word by word, of every collective and root."""
    of_nodes(monkeypatch, size)
    nodes = number_nodes(comm)
    with on_grid(comm, x=comm.size) as grid:
        if max(nodes) == 0:
            return
        x, lane = grid.x, grid.x.transport.lane
        arrivals = Arrivals(lane.comm) if lane else None
        counts = [LARGE + 7 * (rank % 3) for rank in range(comm.size)]
        part, whole = np.ones(counts[comm.rank], "f4"), np.ones(sum(counts), "f4")
        calls = {"all_gather": lambda root: x.all_gather(part, 0, counts),
                 "reduce_scatter": lambda root: x.reduce_scatter(whole, 0, counts),
                 "all_reduce": lambda root: x.all_reduce(whole),
                 "broadcast": lambda root: x.broadcast(whole, root),
                 "reduce": lambda root: x.reduce(whole, root)}
        for kind, root in ((kind, root) for kind in calls for root in (0, comm.size - 1)):
            if lane:
                arrivals.bytes, lane.comm = 0, arrivals
            calls[kind](root)
            found = comm.allgather(arrivals.bytes if lane else 0)
            into = [sum(words for words, at in zip(found, nodes) if at == node) // 4
                    for node in range(max(nodes) + 1)]
            expected = words_into_nodes(kind, counts, nodes)
            if kind in ("broadcast", "reduce"):    # the root's node, or the next one, has none
                expected = expected[-nodes[root]:] + expected[:-nodes[root]]
            assert into == expected, (kind, root)
            if lane:
                lane.comm = arrivals.comm


def test_words_into_nodes():
    """By hand, of 2 + 1 ranks with blocks of 1, 2 and 4 words."""
    found = {kind: words_into_nodes(kind, [1, 2, 4], [0, 0, 1]) for kind in COLLECTIVES}
    assert found == {"all_gather": [4, 3], "reduce_scatter": [3, 4], "all_reduce": [3 + 4, 4 + 3],
                     "broadcast": [0, 7], "reduce": [7, 0], "all_to_all": [3, 2 * 4]}
    assert words_into_nodes("reduce", [1] * 4, [0, 0, 0, 0]) == [0]
    assert words_into_nodes("broadcast", [1] * 4, [0, 1, 2, 2]) == [0, 4, 4]


@pytest.mark.ranks(8)
def test_sums_are_made_in_the_order_that_is_stated(comm, monkeypatch):
    """First of a node's ranks, then of the nodes; to one root in cyclic order."""
    of_nodes(monkeypatch, 3)
    terms = np.random.default_rng(0).standard_normal((8, 6 * LARGE), "f4")
    own = terms[comm.rank]
    nodes = [(terms[0] + terms[1]) + terms[2], (terms[3] + terms[4]) + terms[5],
             terms[6] + terms[7]]
    total, counts = (nodes[0] + nodes[1]) + nodes[2], block_lengths(6 * LARGE, 8)
    mine = slice(sum(counts[:comm.rank]), sum(counts[:comm.rank + 1]))
    with on_grid(comm, x=8) as grid:
        assert np.array_equal(grid.x.reduce_scatter(own, 0, counts), total[mine])
        assert np.array_equal(grid.x.begin_reduce_scatter(own, 0, counts).wait(), total[mine])
        assert np.array_equal(grid.x.all_reduce(own), total)
        found = grid.x.reduce(own.copy(), 4)
        assert comm.rank != 4 or np.array_equal(found, (nodes[2] + nodes[0]) + nodes[1])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("words", [2, lanes.DIRECT_BYTES])
def test_a_lane_adds_in_cyclic_order(comm, words):
    """Directly what is small, and in a chain; and what is broadcast arrives everywhere."""
    lane, terms = lanes.Lane(comm), np.random.default_rng(0).standard_normal((4, words), "f4")
    for root in range(4):
        order = [terms[(root + step) % 4] for step in (1, 2, 3, 4)]
        own = terms[comm.rank].copy()
        lane.reduce(own, root)
        assert comm.rank != root or np.array_equal(own, sum(order[1:], order[0]))
        own = terms[comm.rank].copy()
        lane.broadcast(own, root)
        assert np.array_equal(own, terms[root])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sums_of_16_bits_are_rounded_once(comm, monkeypatch, dtype):
    """Rounded after each node, or each term, they would be 2048 or 256."""
    of_nodes(monkeypatch, 2)
    kind = np.dtype(getattr(pytest.importorskip("ml_dtypes"), dtype) if dtype == "bfloat16"
                    else dtype)
    large = 2048 if dtype == "float16" else 256
    with on_grid(comm, x=4) as grid:
        for length in (4, 12 * LARGE):
            a = np.full(length, (large, 1, 1, 0)[comm.rank], kind)
            sums = [grid.x.all_reduce(a), grid.x.reduce_scatter(a), grid.x.reduce(a, 3)]
            for total in sums[:3 if comm.rank == 3 else 2]:
                assert total.dtype == kind and (total.astype("f4") == large + 2).all()
            whole = grid.x.all_gather(a[:1] + kind.type(1), 0, [1] * 4).astype("f4")
            assert np.array_equal(whole[1:], [2, 2, 1])


@pytest.mark.ranks(4)
def test_words_moved_are_counted(comm, monkeypatch):
    """Received for the node, copied, and read to be summed; over all ranks."""
    of_nodes(monkeypatch, 2)
    n = 4 * LARGE
    with on_grid(comm, x=4) as grid:
        part, whole = np.ones(LARGE, "f4"), np.ones(n, "f4")
        grid.x.all_gather(part, 0, [LARGE] * 4)
        grid.x.reduce_scatter(whole)
        grid.x.all_reduce(whole)
        grid.x.broadcast(whole, 0)
        grid.x.reduce(whole, 0)
        moved = {kind: comm.allreduce(traffic.moved)
                 for (_, kind), traffic in grid.traffic().items()}
    assert moved == {"all_gather": n + 2 * n // 2,
                     # terms copied, summed on two nodes, received, and summed again
                     "reduce_scatter": 4 * n + 2 * n + n + n,
                     "all_reduce": 4 * n + 2 * n + n + n + n + 4 * n,
                     "broadcast": n + n, "reduce": 4 * n + 2 * n + n}


@pytest.mark.ranks(4)
def test_small_arrays_go_by_mpi(comm, monkeypatch):
    """As the whole array is, on which all ranks agree, also where blocks are uneven.  MPI moves
    the words that are counted, or does not say."""
    of_nodes(monkeypatch, 2)
    n = MAX_MPI_BYTES // 32    # words; eight parts are the most that goes by MPI
    with on_grid(comm, x=4) as grid:
        x = grid.x
        for more, counts in ((0, [3 * n, 3 * n, n, n]), (1, [3 * n, 3 * n, n, n + 1])):
            part, whole = np.ones(counts[comm.rank], "f4"), np.ones(8 * n + more, "f4")
            root = int(comm.rank == 0)
            for kind, call, expected in (
                    ("all_gather", lambda: x.all_gather(part, 0, counts), 1),
                    ("all_gather", lambda: x.prefetch(part, 0, counts).wait(), 1),
                    ("reduce_scatter", lambda: x.reduce_scatter(whole, 0, counts), 4),
                    ("reduce_scatter", lambda: x.begin_reduce_scatter(whole, 0, counts).wait(), 4),
                    ("all_reduce", lambda: x.all_reduce(whole), 4),
                    ("broadcast", lambda: x.broadcast(whole, 1), 1),
                    ("reduce", lambda: x.reduce(whole, 0), 4 if root else None)):
                x.traffic.clear()
                found = call()
                assert found is expected is None or (found == expected).all()
                moved, words = x.traffic[kind].moved, x.traffic[kind].words
                assert (math.isnan(moved) or moved == words) == (not more), (kind, more)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("size", [2, 4])
def test_what_ranks_have_in_common_cannot_be_written(comm, monkeypatch, size):
    """Also where all are on one node; a part of a sum is the rank's own."""
    of_nodes(monkeypatch, size)
    with on_grid(comm, x=4) as grid:
        a = np.ones(3 * LARGE)
        common = [grid.x.all_gather(a), *[grid.x.broadcast(a, 0)] * comm.rank]
        if size == 2:    # else a gather is not begun early
            common.append(grid.x.prefetch(a, 0, [len(a)] * 4).wait())
        for whole in common:
            with pytest.raises(ValueError, match="read-only"):
                whole[0] = 0
        part = grid.x.reduce_scatter(a)
        part += 1
        assert (part == 5).all()


@pytest.mark.ranks(8)
@pytest.mark.parametrize("setting, size, names", [
    ("", 4, "mpi shared shared hierarchical"), ("", 1, "mpi mpi mpi chain"),
    ("shared", 1, "mpi mpi mpi mpi"), ("shared", 2, "mpi mpi shared mpi"),
    ("shared", 4, "mpi shared shared mpi"), ("shared", 100, "shared shared shared shared"),
    ("hierarchical", 4, "hierarchical shared shared hierarchical"),
    ("hierarchical", 1, "hierarchical hierarchical hierarchical hierarchical")])
def test_lines_of_one_rank_a_node_share_none_unless_told(comm, monkeypatch, setting, size, names):
    """Of a cube, along x, y and z, and of all ranks in a line."""
    of_nodes(monkeypatch, size)
    monkeypatch.setenv("MM3D_TRANSPORT", setting)
    with on_grid(comm, x=2, y=2, z=2) as cube, on_grid(comm, x=8) as line:
        assert [axis.transport.name for grid in (cube, line)
                for axis in grid.axes.values()] == names.split()


@pytest.mark.ranks(4)
def test_a_node_without_shared_memory_is_known_to_all(comm, monkeypatch):
    """Then all go by MPI; where the setting wants shared memory, it is an error on all."""
    def refuse(*arguments):
        raise PermissionError(1, "no")
    of_nodes(monkeypatch, 2)
    if comm.rank == 2:
        monkeypatch.setattr(os, "memfd_create", refuse)
    with pytest.raises(OSError, match="cannot share memory .*set MM3D_TRANSPORT=mpi"):
        mm3d.Grid(comm, x=4)
    monkeypatch.delenv("MM3D_TRANSPORT")
    with on_grid(comm, x=4) as grid:
        assert grid.x.transport.name == "mpi"


@pytest.mark.ranks(4)
def test_different_calls_inside_a_node_are_an_error(comm, monkeypatch):
    of_nodes(monkeypatch, 2)
    grid = mm3d.Grid(comm, x=4)
    with pytest.raises(ValueError, match="different calls"):
        grid.x.all_gather(np.ones(3 * LARGE, "f4" if comm.rank % 2 else "i4"), 0,
                          [3 * LARGE] * 4)


@pytest.mark.ranks(8)
def test_memory_is_used_again(comm, monkeypatch):
    """After the first calls no new region is made, whatever is still in flight."""
    of_nodes(monkeypatch, 4)
    found = []
    with on_grid(comm, x=8) as grid:
        for _ in range(8):
            sums = [grid.x.begin_reduce_scatter(np.ones(8 * LARGE), 0, [LARGE] * 8)
                    for _ in range(2)]
            gathered = grid.x.prefetch(np.ones(LARGE), 0, [LARGE] * 8)
            grid.x.all_reduce(np.ones(2 * LARGE))
            assert all((one.take() == 8).all() for one in sums) and gathered.take().all()
            found.append(len(grid.x.transport.memory.regions))
        del sums, gathered
    assert found[3:] == found[3:4] * 5


@pytest.mark.ranks(8)
@pytest.mark.parametrize("size, grid, options", [
    (2, (1, 4, 2), {"overlap": True}), *(pytest.param(*one, marks=pytest.mark.slow) for one in (
        (4, (8, 1, 1), {}), (5, (2, 2, 2), {"overlap": True}), (2, (4, 2, 1), {"keep": "both"}),
        (3, (1, 4, 2), {"rows": "positions"})))])
def test_a_step_on_several_nodes_is_that_by_mpi(comm, monkeypatch, size, grid, options):
    """Of a model whose activations and weights are too large for MPI alone."""
    sizes, found = dict(layers=1, hidden=96, heads=6, batch=8, seq=32), []
    for kind in ("hierarchical", "mpi"):
        of_nodes(monkeypatch, size)
        monkeypatch.setenv("MM3D_TRANSPORT", kind)
        scheme = mm3d.scheme("3d", comm, grid, "numpy", **options)
        names = {axis.transport.name for axis in scheme.grid.axes.values() if axis.size > 1}
        assert kind in set.union(*comm.allgather(names))
        model = mm3d.Transformer(scheme, **sizes, dtype="float64", causal=True)
        found.append(passes(model, "Fx Dx"))
    for name, a in found[0].items():
        assert np.abs(a - found[1][name]).max(initial=0) <= 1e-12 * np.abs(a).max(initial=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("how", ["Wait", "Test", "broadcast"])
def test_a_shorter_message_from_another_node_is_found(comm, how):
    """By the rank that receives it; rank 1 waits for more than rank 0 sends."""
    lane, n = lanes.Lane(comm), lanes.DIRECT_BYTES    # words, which go in a chain
    a = np.zeros(n + 4 * comm.rank)

    def call() -> None:
        if how == "broadcast":
            return lane.broadcast(a, 0)
        small = np.zeros(n)
        request = lane.exchange([small, small], [a, a])
        while how == "Test" and not request.Test():
            pass
        return request.Wait()

    if comm.rank:
        with pytest.raises(ValueError, match="bytes came from another node where"):
            call()
    else:
        call()
