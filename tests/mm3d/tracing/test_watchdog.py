"""A job that makes no progress ends and says where its ranks are; one that works goes on."""
import re
import time

import numpy as np
import pytest

import mm3d
from mm3d.grid.agreement import format_ranks
from mm3d.tracing import status_board as board
from mm3d.tracing.watchdog import Watchdog, is_stalled
from support import run_python, run_ranks

# Rank 3 stops itself when it is to gather the input of a layer in the second layer.
STOPS = """
import os, signal, sys
import mm3d
from mpi4py import MPI
comm = MPI.COMM_WORLD
scheme = mm3d.scheme("3d", comm, grid=(1, 2, 2))
model = mm3d.Transformer(scheme, layers=2, hidden=16, heads=4, batch=4, seq=4)
with mm3d.Watchdog(comm, 4) as watchdog, watchdog.attached(model.grid, model):
    x, dy = model.random("input"), model.random("output gradient")
    for step in range(5):
        y, saved = model.forward(x)
        if comm.rank == 3 and step == 2:
            gather = scheme.grid.y.transport._transport.all_gather
            def stop(*arguments):
                if b"layers.1.attention.qkv" in watchdog.board.memory[:]:
                    os.kill(os.getpid(), signal.SIGSTOP)
                return gather(*arguments)
            told = scheme.grid.y.transport
            told.all_gather = told._report_collective("all_gather", stop)
        model.backward(dy, saved)
print("nobody stopped", flush=True)
"""


@pytest.mark.slow_but_first
@pytest.mark.parametrize("variables, where", [
    ({}, r"process \d+ is stopped"),
    pytest.param({"MM3D_NODE_SIZE": "2"}, "on another node", marks=pytest.mark.slow)])
def test_a_rank_that_is_stopped_is_named_with_its_layer_and_collective(variables, where):
    """By ranks of its node, and by datagram by those of another, which rank 0 is on."""
    begun = time.monotonic()
    done = run_ranks(4, "-c", STOPS, MM3D_TRANSPORT="mpi", timeout=90, **variables)
    text = done.stdout + done.stderr
    assert done.returncode != 0 and "killed: did not end" not in text, text
    assert time.monotonic() - begun < 90 and "nobody stopped" not in text
    assert text.count("watchdog: ") == 1, text
    assert "no progress for 4 s, nothing is heard of rank 3; the job ends" in text
    # A datagram comes with what was so when its sender last looked, perhaps before it began.
    place = (r"in all-gather A along y of layers\.1\." if not variables else
             r"((in|last entered) .* along [yz] of layers\.|before its first collective)")
    assert re.search(rf"  rank 3: silent for \d+ s, {where}; {place}", text), text
    waiting = re.findall(r"^  ranks? ([\d, to]+): in \S+ .*along [yz] of layers\.1\.", text, re.M)
    assert waiting and "3" not in "".join(waiting), text


# MPI cannot reach the launcher, and Abort waits for it for ever, with Python's lock.
WAITS = """
import ctypes
from mpi4py import MPI
from mm3d.tracing import watchdog
watchdog.FLUSH_SECONDS = 0.2
watchdog.Watchdog.format_report = lambda self, states: "the report"
watchdog.Watchdog.comm = property(lambda self: type(self), lambda self, comm: None)
watchdog.Watchdog.Abort = lambda status: ctypes.PyDLL(None).sleep(60)
watchdog.Watchdog.end_job(object.__new__(watchdog.Watchdog), [])
"""


@pytest.mark.slow
def test_a_rank_ends_although_mpi_does_not_end_the_job():
    begun = time.monotonic()
    done = run_python("-c", WAITS, timeout=90)
    assert done.returncode == 1 and done.stderr == "\nthe report\n"
    assert time.monotonic() - begun < 50


@pytest.mark.ranks(1, 2)
def test_states(comm, monkeypatch):
    """What is on the board, and how long ago, tells waiting from working."""
    dog = Watchdog(comm, 60)    # much longer than the test, on a busy machine too
    now = time.monotonic_ns()
    dog._since = now - int(1e12)
    row = dog.board.numbers[0]
    past, lately = now - int(120e9), now - int(1e9)
    for (beat, moved, worked, inside), state in {
            (past, lately, lately, 1): "silent", (lately, lately, past, 1): "working",
            (lately, past, lately, 1): "waiting", (lately, past, lately, 0): "working",
            (lately, past, past, 0): "idle", (-1, past, past, 1): "left",
            (0, 0, 0, 0): "unknown"}.items():
        comm.Barrier()
        row[board.BEAT], row[board.MOVED] = beat, moved
        row[board.WORKED], row[board.INSIDE] = worked, inside
        assert dog.rank_states()[0] == state
        comm.Barrier()
    # Who has been stopped with all others, as by Ctrl-Z, finds them silent, and gives them time.
    row[board.BEAT] = past
    dog._looked = past
    dog.update_board()
    assert dog._since > now and dog.rank_states()[0] == "working"
    comm.Barrier()
    dog.board.mine[board.WORKED] = 0    # a rank that computes is waited for
    dog._used = -10 ** 12
    dog.update_board()
    assert dog.board.mine[board.WORKED]


@pytest.mark.parametrize("states, ends", [
    (["waiting", "silent", "working"], True), (["waiting", "idle"], True),
    (["waiting", "waiting"], True), (["waiting", "left"], True), (["waiting", "working"], False),
    (["waiting", "waiting", "unknown"], False), (["silent", "unknown"], True),
    (["idle", "idle"], False), (["working"], False), (["left", "unknown"], False)])
def test_what_ends_a_job(states, ends):
    assert is_stalled(states) is ends


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.ranks(1, 4)
def test_nothing_is_changed_by_being_watched(comm, transport, recompute):
    """The same bits; every collective is noted on entering and leaving; all is put back."""
    scheme = mm3d.scheme("3d", comm, grid=(1, comm.size // 2 or 1, min(comm.size, 2)))
    model = mm3d.Transformer(scheme, layers=1, hidden=8, heads=4, batch=4, seq=4,
                             recompute=recompute)
    x, dy = model.random("input"), model.random("output gradient")

    def step():
        model.zero_gradients()
        scheme.grid.reset_traffic()
        y, saved = model.forward(x)
        return [y.copy(), model.backward(dy, saved).copy()]
    before, transports = step(), [axis.transport for axis in scheme.grid.axes.values()]
    calls = sum(traffic.calls for traffic in scheme.grid.traffic().values())
    with Watchdog(comm, 100) as dog, dog.attached(scheme.grid, model):
        after = step()
    assert not dog.comm    # it has been freed
    assert all(map(np.array_equal, before, after))
    assert [axis.transport for axis in scheme.grid.axes.values()] == transports
    mine = dog.board.mine
    assert mine[board.EVENTS] == 2 * calls and not mine[board.INSIDE]
    assert (" of layers.0." in dog.board.text(comm.rank)) == (comm.size > 1)


@pytest.mark.slow
def test_a_row_is_watched_where_it_is_counted_and_timed(tmp_path):
    """Also one that recomputes; it is measured all the same."""
    source = """
import sys
from bench import __main__ as bench
from bench.experiments.rows import row as run
from mm3d.tracing.status_board import PositionObserver
counted, enter, where, told = run.run_counted_step, PositionObserver.enter, ["timed"], set()
def step(*arguments):
    where.append("counted")
    found = counted(*arguments)
    where.pop()
    return found
def entered(*arguments):
    told.add(where[-1])
    enter(*arguments)
run.run_counted_step, PositionObserver.enter = step, entered
status = bench.main(sys.argv[1:])
print("told of", sorted(told), flush=True)
sys.exit(status)
"""
    done = run_python("-c", source, "run", "--preset", "tiny", "--scheme", "serial", "--table",
                      "weak", "--out", str(tmp_path), "--repetitions", "2", "--max-repetitions",
                      "2", "--recompute", "full", "--stall", "60", timeout=90)
    text = done.stdout + done.stderr
    assert done.returncode == 0 and "told of ['counted', 'timed']" in done.stdout, text


@pytest.mark.parametrize("seconds", [0, -1, float("nan"), float("inf"), "12", None])
def test_a_time_that_cannot_be_meant(seconds):
    with pytest.raises(ValueError, match="give a positive number"):
        Watchdog(None, seconds)


def test_ranks_are_named_in_runs():
    assert format_ranks([3]) == "rank 3" and format_ranks([0, 1]) == "ranks 0, 1"
    assert format_ranks([0, 1, 2, 4, 6, 7]) == "ranks 0 to 2, 4, 6, 7"
