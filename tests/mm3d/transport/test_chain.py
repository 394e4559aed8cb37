"""Broadcasts and reductions from node to node, and sums in the order of the ranks."""
import numpy as np
import pytest

from mm3d.arrays import backend
from mm3d.selftest import failed_collectives
from mm3d.transport import lanes
from mm3d.transport.lanes import MAX_MPI_BYTES, chunk_bytes
from mm3d.transport.ordered import OrderedTransport
from reference import integers, on_grid
from rounded import dtype_of, ml_dtypes


LARGE = MAX_MPI_BYTES    # words; a rank passes on as much in several chunks


@pytest.fixture(autouse=True)
def nodes_of_one_rank(monkeypatch):
    """Each rank counts as a node."""
    monkeypatch.delenv("MM3D_TRANSPORT", raising=False)
    monkeypatch.setenv("MM3D_NODE_SIZE", "1")


@pytest.mark.ranks(4)
def test_every_collective_is_right(comm):
    with on_grid(comm, x=comm.size) as grid:
        assert grid.x.transport.name == "chain"
        assert not failed_collectives(grid, (1, LARGE // 4), ("float16", "int64"))


@pytest.mark.ranks(4)
def test_a_sum_is_rounded_once_in_cyclic_order(comm):
    """Terms stay as they were, and float16 is added in float32."""
    with on_grid(comm, x=comm.size) as grid:
        terms = np.random.default_rng(0).standard_normal((comm.size, 3, LARGE // 3), "f4")
        for root in range(comm.size):
            expected = 0
            for step in range(1, comm.size + 1):
                expected = expected + terms[(root + step) % comm.size]
            own = terms[comm.rank].copy()
            found = grid.x.reduce(own, root)
            assert (found is None) == (comm.rank != root)
            assert found is None or np.array_equal(found, expected)
            assert np.array_equal(own, terms[comm.rank])
            first = (root + 1) % comm.size
            large = np.full(LARGE, 2048 if comm.rank == first else 1, "f2")
            rounded = grid.x.reduce(large, root)
            assert rounded is None or (rounded == np.float16(2047 + comm.size)).all()


@pytest.mark.ranks(8)
def test_a_link_carries_an_array_once(comm):
    """A rank receives the words counted, and passes them on to one other."""
    sent = []

    class Sends:
        def __init__(self, lane_comm):
            self.lane_comm = lane_comm

        def __getattr__(self, name):
            return getattr(self.lane_comm, name)

        def Isend(self, buffer, target):
            sent.append((target, buffer.nbytes))
            return self.lane_comm.Isend(buffer, target)

    with on_grid(comm, x=comm.size) as grid:
        x, a = grid.x, integers((5, LARGE), 0)
        x.transport.lane.comm = Sends(x.transport.lane.comm)
        for root in (0, comm.size - 1):
            for kind, last in (("broadcast", (root - 1) % comm.size), ("reduce", root)):
                sent.clear()
                x.traffic.clear()
                getattr(x, kind)(a, root)
                into_next = [] if comm.rank == last else [(comm.rank + 1) % comm.size]
                assert sorted({target for target, _ in sent}) == into_next
                assert sum(length for _, length in sent) == a.nbytes * len(into_next)
                chunks = -(-a.nbytes // chunk_bytes(a.nbytes, comm.size))
                assert len(sent) == len(into_next) * chunks
                received = comm.rank != (root if kind == "broadcast" else (root + 1) % comm.size)
                assert x.traffic[kind].moved == a.size * received


@pytest.mark.parametrize("nodes", [3, 4, 16])
def test_chunks_make_a_chain_shortest(nodes):
    """Of all numbers of chunks, with the cost of a chunk."""
    length = 2 ** 20

    def took(chunk: float) -> float:
        return (length / chunk + nodes - 2) * (chunk + lanes.CHUNK_COST)
    best = min((length / count for count in range(1, 500)), key=took)
    assert took(chunk_bytes(length, nodes)) <= 1.001 * took(best)
    assert chunk_bytes(2 ** 30, nodes) == chunk_bytes(length, 2) == lanes.MOST_CHUNK_BYTES


@pytest.mark.ranks(4)
def test_a_sum_in_the_order_of_the_ranks_has_the_same_bits_when_it_is_begun_early(comm):
    """Also onto one rank: MPI would add in the order of a tree."""
    transport = OrderedTransport(comm, backend.get("numpy"))
    terms = np.random.default_rng(0).standard_normal((comm.size, 1000)).astype(np.float32)
    expected = terms[0]
    for term in terms[1:]:
        expected = expected + term
    for root in range(comm.size):
        for found in (transport.begin_reduce(terms[comm.rank], root).take(),
                      transport.reduce(terms[comm.rank], root)):
            assert (found is None) == (comm.rank != root)
            assert found is None or np.array_equal(found, expected)
    whole, narrow = integers((1000,), comm.rank), dtype_of("bfloat16" if ml_dtypes else "float16")
    found = transport.reduce(whole.astype(narrow), 1)
    assert found is None or np.array_equal(found, sum(
        integers((1000,), rank) for rank in range(comm.size)).astype(narrow))
    counts = [250] * comm.size
    own = slice(250 * comm.rank, 250 * (comm.rank + 1))
    for found in (transport.begin_reduce_scatter(terms[comm.rank], 0, counts).take(),
                  transport.reduce_scatter(terms[comm.rank], 0, counts)):
        assert np.array_equal(found, expected[own])
