"""What each transport states that it moved, held against the calls and copies that it makes."""
import math
from itertools import chain

import numpy as np
import pytest

import fakecupy
import mm3d
from bench.cases.selection import select_rows
from bench.experiments.rows.row import run_counted_step
from bench.records import model_run, run_file
from bench.records.model_run import traffic_group
from bench.records.notes import MOVES, words_note
from bench.reports import merit
from bench.reports.formats import render
from mm3d.arrays.blocks import block_lengths
from mm3d.grid.axis import COLLECTIVES
from mm3d.transport import choice, device
from records import made_up
from reference import on_grid

ODD = 3     # columns, so that blocks along the last dimension lie in pieces
LONG = 2 * device.MAX_GATHERED_ELEMENTS
LENGTHS = (5, 9, LONG)    # on 3 ranks, uneven and even


class Calls:
    """A communicator that counts the elements which its calls bring to this rank from others."""

    def __init__(self, comm) -> None:
        self.comm, self.received, self.sums = comm, 0, []

    def __getattr__(self, name):
        called = getattr(self.comm, name)
        found = getattr(self, f"_{name.lower().removeprefix('i')}", None)

        def told(*arguments, **more):
            found(*arguments, **more)
            return called(*arguments, **more)
        return told if found else called

    def _allgather(self, send, *recv):
        if recv:    # of arrays, not of what Python pickles
            self.received += recv[0].size - send.size

    def _allgatherv(self, send, recv):
        self.received += sum(recv[1][0]) - send.size

    def _alltoallv(self, send, recv):
        lengths, _ = recv[1]
        self.received += sum(lengths) - lengths[self.comm.rank]

    def _recv(self, buffer, peer):
        self.received += buffer.size * (peer != self.comm.rank)

    def _bcast(self, buffer, root):
        self.received += buffer.size * (root != self.comm.rank)

    def _reduce_scatter_block(self, send, recv):
        self.sums.append(send.size - recv.size)

    def _reduce_scatter(self, send, recv, lengths):
        self.sums.append(sum(lengths) - lengths[self.comm.rank])

    def _allreduce(self, send, recv):
        own = block_lengths(send.size, self.comm.size)[self.comm.rank]
        self.sums.append(2 * (send.size - own))

    def _reduce(self, send, recv, root):
        self.sums.append(send.size * (self.comm.rank != root))


def collectives(axis, length, dtype="float32"):
    """Every collective of arrays of `length` rows, even or not: its name and what carries it out.
    """
    made, counts = axis.backend.empty, block_lengths(length, axis.size)
    mine = counts[axis.rank]
    for dim, whole, part in ((0, (length, ODD), (mine, ODD)), (1, (ODD, length), (ODD, mine))):
        yield "all_gather", lambda: axis.all_gather(made(part, dtype), dim, counts)
        yield "reduce_scatter", lambda: axis.reduce_scatter(made(whole, dtype), dim, counts)
        yield "reduce_scatter", lambda: axis.begin_reduce_scatter(made(whole, dtype), dim,
                                                                  counts).wait()
        if axis.transport.nonblocking:
            yield "all_gather", lambda: axis.prefetch(made(part, dtype), dim, counts).wait()
    yield "all_reduce", lambda: axis.all_reduce(made((length,), dtype))
    yield "broadcast", lambda: axis.broadcast(made((length,), dtype), 1)
    yield "reduce", lambda: axis.reduce(made((length,), dtype), 1)
    yield "all_to_all", lambda: axis.all_to_all(made((length,), dtype), counts, [mine] * axis.size)


def counted(axis, name, run):
    """What `Axis` counts of one collective."""
    axis.traffic.clear()
    run()
    assert axis.traffic.keys() == {name}
    return axis.traffic[name]


@pytest.mark.ranks(3)
def test_mpi_is_handed_what_is_counted(comm, monkeypatch):
    """Gathers bring just the words counted; of sums MPI says nothing, and is given these."""
    monkeypatch.setenv("MM3D_TRANSPORT", "mpi")
    with on_grid(comm, x=comm.size) as grid:
        for name, run in chain.from_iterable(collectives(grid.x, length) for length in LENGTHS):
            calls = grid.x.transport.comm = Calls(grid.x.comm)
            found = counted(grid.x, name, run)
            if name in ("all_gather", "broadcast"):
                assert found.moved == calls.received == found.words and not calls.sums
            elif name == "all_to_all":    # what a rank receives; sent is what the others receive
                assert found.moved == calls.received and not calls.sums
                assert comm.allreduce(int(found.moved)) == comm.allreduce(found.words)
            else:
                assert math.isnan(found.moved) and [found.words] == calls.sums


@pytest.mark.ranks(3, slow=(8,))
@pytest.mark.parametrize("kind", ["staged", "device"])
def test_exchanges_bring_what_the_transport_states(comm, cupy, monkeypatch, kind):  # noqa: F811
    monkeypatch.setattr(fakecupy.Memory, "open", kind == "device")
    monkeypatch.setenv("MM3D_TRANSPORT", kind)
    grid, large = mm3d.Grid(comm, "cupy", x=comm.size), False
    for length in LENGTHS:
        for name, run in collectives(grid.x, length):
            calls = grid.x.transport.comm = Calls(grid.x.comm)
            found = counted(grid.x, name, run)
            assert found.moved == calls.received and not calls.sums, name
            if name in ("all_gather", "reduce_scatter", "broadcast", "all_to_all"):
                # Sent and received differ where blocks do; over all ranks they are the same.
                assert comm.allreduce(int(found.moved)) == comm.allreduce(found.words)
            elif name == "all_reduce" and length < LONG:
                assert found.moved == (comm.size - 1) * length
            elif name == "all_reduce":
                assert found.moved == pytest.approx(found.words, rel=1e-3)
                large = True
    assert large


class Received:
    """An NCCL group that counts the bytes which arrive; sums are its own business."""

    def __init__(self, group, rank) -> None:
        self.group, self.rank, self.bytes, self.sums = group, rank, 0, 0

    def __getattr__(self, name):
        def told(*arguments):
            if name == "allGather":
                self.bytes += arguments[2] * (self.group.comm.size - 1)
            elif name == "broadcast":
                self.bytes += arguments[2] * (arguments[4] != self.rank)
            elif name == "recv":
                self.bytes += arguments[1] * (arguments[3] != self.rank)
            elif name != "send":
                self.sums += 1
            return getattr(self.group, name)(*arguments)
        return told


@pytest.mark.ranks(3)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_nccl_states_what_arrives_but_of_its_sums(comm, cupy, monkeypatch, dtype):  # noqa: F811
    monkeypatch.setenv("MM3D_TRANSPORT", "nccl")
    grid = mm3d.Grid(comm, "cupy", x=comm.size)
    group, summed = grid.x.transport.group, 0
    for length in LENGTHS:
        for name, run in collectives(grid.x, length, dtype):
            calls = grid.x.transport.group = Received(group, comm.rank)
            found = counted(grid.x, name, run)
            if calls.sums:
                assert math.isnan(found.moved) and dtype == "float32"
            else:
                assert found.moved * np.dtype(dtype).itemsize == calls.bytes
            summed += calls.sums
    assert bool(summed) == (dtype == "float32")
    grid.x.transport.group = group


@pytest.mark.ranks(3)
def test_shared_memory_states_its_copies_and_sums(comm, monkeypatch):
    """Words written by copying, and those of the two other terms that are read to be summed: a
    small array is handed to all as a whole, of a large one each rank sums its own part."""
    monkeypatch.setenv("MM3D_TRANSPORT", "shared")
    with on_grid(comm, x=3) as grid:
        for length in LENGTHS:
            own, at_root = block_lengths(length, 3)[comm.rank], comm.rank == 1
            part, whole = own * ODD, length * ODD
            expected = {"all_to_all": 2 * 3 + length + 3 * own} | ({
                "all_gather": part, "reduce_scatter": whole + 2 * part,
                "all_reduce": 2 * length + 2 * own, "broadcast": length * at_root,
                "reduce": length + 2 * own} if length == LONG else {
                "all_gather": part + whole, "reduce_scatter": whole + 2 * part,
                "all_reduce": 3 * length, "broadcast": length,
                "reduce": length + 2 * length * at_root})
            for name, run in collectives(grid.x, length):
                assert counted(grid.x, name, run).moved == expected[name], (name, length)


@pytest.mark.ranks(8)
@pytest.mark.parametrize("kind", ["mpi", "shared"])
def test_a_run_records_what_its_transport_moved(comm, monkeypatch, tmp_path, kind):
    """Of every collective as the grid says, in a file and in what is printed of it."""
    monkeypatch.setenv("MM3D_TRANSPORT", kind)
    scheme = mm3d.scheme("3d", comm, (1, 1, comm.size))
    model = mm3d.Transformer(scheme, layers=1, hidden=64, heads=8, batch=8, seq=8)
    *_, found = run_counted_step(model, model.random("x"), model.random("dy"))
    everyone = np.stack(comm.allgather(found), axis=2)
    run = made_up(select_rows("weak", "3d")[0])
    run.configuration["transport"] = kind
    traffic = dict(zip((*model_run.TRAFFIC_COUNTS, "moved"), everyone))
    run.groups["traffic"] = traffic_group(traffic, traffic["words"].sum(axis=1), model_run.AXES)
    read = run_file.read_run(run_file.write_run(run, tmp_path, "a"))
    assert all(np.array_equal(read.traffic[name], run.traffic[name], equal_nan=True)
               for name in run.traffic)
    sums = [COLLECTIVES.index(kind) for kind in ("reduce_scatter", "all_reduce", "reduce")]
    moved, words = (read.traffic[name][:, :, model_run.AXES.index("z")]
                    for name in ("moved", "words"))
    assert words[..., sums].sum() > 0
    if kind == "mpi":
        calls = read.traffic["calls"][:, :, model_run.AXES.index("z")]
        assert np.array_equal(np.isnan(moved), np.isin(np.arange(6), sums) & (calls > 0))
        assert np.array_equal(np.delete(moved, sums, -1), np.delete(words, sums, -1))
    else:
        assert 0 < moved.sum() != words.sum()
    text = render(merit.run_parts(read), "text")
    assert f"moved by transport {kind}" in text and f"What it moves, {kind}: " in text


def test_every_transport_has_its_note():
    assert MOVES.keys() == choice.TRANSPORTS.keys()
    assert len({*MOVES.values()}) == len(MOVES) - 1    # two move alike
    assert all(f"{name}: {note}" in words_note([name]) for name, note in MOVES.items())
    assert "it moves" not in words_note(["none"])
