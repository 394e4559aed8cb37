"""A watchdog: it ends a job that no longer makes progress, and says where each rank is.

A rank that is stopped, or whose node is lost, makes all others wait for ever in their next
collective.  A thread of each rank looks now and then whether its rank has entered or left a
collective, and says so on a board that the ranks of a node share; ranks of other nodes hear it by
datagram.  What a stopped rank did last stays on the board.
"""
from __future__ import annotations

import contextlib
import mmap
import os
import signal
import tempfile
import threading
import time
from typing import Any, Callable, Iterator

import numpy as np

from mm3d.tracing.events import Collective, Event, Layer, Observer, Recomputation
from mm3d.tracing.heartbeats import Hearsay
from mm3d.tracing.observe import observed
from mm3d.transport.nodes import node_of

# Of each rank: its process; when its thread last looked, when it last made progress, and when it
# last used its processor; how many collectives it has entered and left, and whether it is in one.
PROCESS, BEAT, MOVED, WORKED, EVENTS, INSIDE = range(6)
TEXT = 96                 # bytes for the name of a layer, and for that of a collective
ROW = 64 + 2 * TEXT
GRACE = 2.0               # seconds in which the launcher passes on what was written
WORKING = 0.05            # of the time, that who computes uses its processor at least


class Board:
    """What the ranks know of each other.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        All ranks, which make it together.
    """

    def __init__(self, comm: Any) -> None:
        self.size, self.rank = comm.size, comm.rank
        node = node_of(comm)
        self.nodes = comm.allgather(node)
        near = comm.Split(node, comm.rank)
        path = file = None
        if near.rank == 0:
            file, path = tempfile.mkstemp(prefix="mm3d-watchdog-")
            os.ftruncate(file, self.size * ROW)
        path = near.bcast(path)
        if file is None:
            file = os.open(path, os.O_RDWR)
        self.memory = mmap.mmap(file, self.size * ROW)
        os.close(file)
        near.Barrier()
        if near.rank == 0:
            os.unlink(path)
        near.Free()
        rows = np.frombuffer(self.memory, np.uint8).reshape(self.size, ROW)
        self.numbers = rows[:, :64].view(np.int64)
        self.mine = memoryview(self.memory)[self.rank * ROW:][:64].cast("q")
        self.texts = [slice(self.rank * ROW + 64 + k * TEXT, self.rank * ROW + 64 + (k + 1) * TEXT)
                      for k in (0, 1)]

    def text(self, rank: int) -> str:
        """What a rank does, or did last."""
        place = rank * ROW + 64
        layer, collective = (bytes(self.memory[begin:begin + TEXT]).rstrip(b"\0").decode(
            errors="replace") for begin in (place, place + TEXT))
        if not collective:
            return "before its first collective under watch"
        entered = "in" if self.numbers[rank, INSIDE] else "last entered"
        return f"{entered} {collective}{f' of {layer}' if layer else ''}"


class Position(Observer):
    """Writes on the board where this rank is."""

    kinds = (Layer, Recomputation, Collective)
    sizes = False

    def __init__(self, board: Board) -> None:
        self.board, self.entered = board, []
        self.names: dict[tuple[str, str, str], bytes] = {}

    def enter(self, event: Event, barrier: Callable[[], None] | None = None) -> None:
        """A layer, its recomputation, or a collective begins."""
        board = self.board
        if isinstance(event, (Layer, Recomputation)):
            text = _padded(event.name)
            board.memory[board.texts[0]] = text
            self.entered.append(text)
            return
        key = event.kind, event.direction, self.operand
        text = self.names.get(key)
        if text is None:
            text = self.names[key] = _padded(collective_name(*key))
        board.memory[board.texts[1]] = text
        board.mine[EVENTS] += 1
        board.mine[INSIDE] = 1
        self.entered.append(None)

    def leave(self) -> None:
        """What was entered last has ended."""
        board = self.board
        if self.entered.pop() is None:
            board.mine[EVENTS] += 1
            board.mine[INSIDE] = 0


class Watchdog:
    """Ends the job of all ranks when it makes no progress for some time.

    It does when nothing is heard of a rank for so long, because it is stopped, swapped out, or its
    node is lost; and when ranks wait in collectives under watch (`attached`) for so long, and none
    of the others works.  A rank that computes for longer than that is left alone.  One of another
    node of which nothing was ever heard, as where datagrams between nodes are blocked, may
    compute, too: it is not missed, and no waiting for it ends the job.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        All ranks of the job, which make it together.
    seconds : float
        Without progress after which the job ends.
    period : float, optional
        Seconds between two looks (default: a tenth, at most 5).

    Raises
    ------
    ValueError
        When `seconds` is no positive number.

    Examples
    --------
    >>> with Watchdog(comm, 120) as watchdog, watchdog.attached(model.grid, model):
    ...     train(model)
    """

    def __init__(self, comm: Any, seconds: float, period: float | None = None) -> None:
        if not 0 < seconds < float("inf"):
            raise ValueError(f"a watchdog of {seconds} seconds: give a positive number, such as "
                             "120")
        self.comm, self.seconds = comm.Dup(), seconds
        self.period = period or min(5.0, seconds / 10)
        self.board = Board(self.comm)
        self.hearsay = Hearsay(self.comm, self.board.nodes)
        self.board.mine[PROCESS] = os.getpid()
        self._events = self._used = 0
        self._since = self._looked = time.monotonic_ns()
        self.look()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="mm3d watchdog")

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *failure: Any) -> None:
        """Watch no longer; a rank that leaves so is not missed.

        All ranks do it, or the job fails.  One that leaves by an exception may be alone and frees
        no communicator, for which it might wait for the others.
        """
        self._over.set()
        self._thread.join()
        self.board.mine[BEAT] = -1
        self.hearsay.tell(self.board.numbers[self.board.rank], time.monotonic_ns())
        self.hearsay.close()
        if not any(failure):
            self.comm.Free()

    @contextlib.contextmanager
    def attached(self, grid: Any, model: Any = None) -> Iterator[None]:
        """Know meanwhile in which collective of `grid`, and layer of `model`, this rank is."""
        with observed(grid, Position(self.board), model):
            try:
                yield
            finally:
                self.board.mine[INSIDE] = 0

    def _run(self) -> None:
        while not self._over.wait(self.period):
            self.look()
            states = self.states()
            speaks = next((rank for rank, state in enumerate(states)
                           if state not in ("silent", "left", "unknown")), None)
            if stalled(states) and speaks == self.board.rank:
                self.end(states)
                return

    def look(self) -> None:
        """Note on the board that this rank is alive, and whether it has done something."""
        now, used, mine = time.monotonic_ns(), time.process_time_ns(), self.board.mine
        if now - self._looked > 1e9 * (self.seconds / 2 + self.period):
            self._since = now    # this rank was stopped itself, perhaps with all others
        if mine[EVENTS] != self._events or not mine[MOVED]:
            self._events, mine[MOVED] = mine[EVENTS], now
        if used - self._used > WORKING * (now - self._looked):
            mine[WORKED] = now
        self._looked, self._used, mine[BEAT] = now, used, now
        self.hearsay.tell(self.board.numbers[self.board.rank], now,
                          self.board.memory[self.board.texts[0].start:self.board.texts[1].stop])
        for rank, numbers, texts in self.hearsay.heard(now):
            self.board.numbers[rank] = numbers
            if texts:
                place = rank * ROW + 64
                self.board.memory[place:place + 2 * TEXT] = texts

    def states(self) -> list[str]:
        """Of each rank what it does: "silent", "left", "unknown", "waiting", "working", "idle"."""
        now, least = time.monotonic_ns(), 1e9 * self.seconds
        found = []
        for row in self.board.numbers.tolist():
            def old(field: int) -> bool:
                return now - max(row[field], self._since) > least
            found.append("left" if row[BEAT] < 0 else "unknown" if not row[BEAT]
                         else "silent" if old(BEAT) else "working" if not old(MOVED)
                         else "waiting" if row[INSIDE] else "idle" if old(WORKED) else "working")
        return found

    def report(self, states: list[str]) -> str:
        """What is to be said of each rank."""
        now = time.monotonic_ns()
        missing = [rank for rank, state in enumerate(states) if state == "silent"]
        said: dict[str, list[int]] = {}
        for rank, state in enumerate(states):
            row = self.board.numbers[rank]
            text = {"silent": f"silent for {(now - row[BEAT]) / 1e9:.0f} s"
                              f"{self._process(rank)}; ",
                    "left": "has left; ", "unknown": "never heard of; "}.get(state, "")
            said.setdefault(f"{text}{self.board.text(rank)}", []).append(rank)
        why = (f"nothing is heard of {ranks(missing)}" if missing else
               f"{ranks(_of(states, 'waiting'))} wait, and nobody works")
        return "\n".join([f"watchdog: no progress for {self.seconds:g} s, {why}; the job ends", *(
            f"  {ranks(which)}: {text}" for text, which in said.items())])

    def _process(self, rank: int) -> str:
        """What has become of the process of a rank of this node, as far as Linux tells."""
        if self.board.nodes[rank] != self.board.nodes[self.board.rank]:
            return ", on another node"
        process = int(self.board.numbers[rank, PROCESS])
        try:
            with open(f"/proc/{process}/stat") as file:
                state = file.read().rpartition(")")[2].split()[0]
        except OSError:
            return f", process {process} is gone"
        return f", process {process} is {'stopped' if state in 'Tt' else f'in state {state}'}"

    def end(self, states: list[str]) -> None:
        """Say where all ranks are, and end the job."""
        os.write(2, f"\n{self.report(states)}\n".encode())
        # Should MPI not manage, the launcher sees this rank die.
        timer = threading.Timer(5 * GRACE, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
        time.sleep(GRACE)
        self.comm.Abort(1)


def stalled(states: list[str]) -> bool:
    """Whether ranks in these states will never go on."""
    return "silent" in states or ("waiting" in states
                                  and not {"working", "unknown"}.intersection(states))


def collective_name(kind: str, direction: str, operand: str) -> str:
    """Such as "all-gather A along y"."""
    return " ".join(filter(None, (kind.replace("_", "-"), operand, f"along {direction}")))


def ranks(numbers: list[int]) -> str:
    """Such as "ranks 0 to 3, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    text = ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}, {run[-1]}" if len(run) == 2
                     else f"{run[0]} to {run[-1]}" for run in runs)
    return f"rank{'s' * (len(numbers) > 1)} {text}"


def _of(states: list[str], wanted: str) -> list[int]:
    return [rank for rank, state in enumerate(states) if state == wanted]


def _padded(text: str) -> bytes:
    return text.encode()[:TEXT].ljust(TEXT, b"\0")
