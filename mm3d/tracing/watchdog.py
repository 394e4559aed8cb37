"""End a job that no longer makes progress, and report where each rank is.

A rank that is stopped, or whose node is lost, makes all others wait for ever in their next
collective.  A thread of each rank checks periodically whether its rank has entered or left a
collective, and writes that to a board that the ranks of a node share; ranks of other nodes are
told by datagram.  The last state of a stopped rank stays on the board.
"""
from __future__ import annotations

import contextlib
import faulthandler
import os
import threading
import time
from typing import Any, Iterator

import numpy as np

from mm3d.arrays.plain_numbers import is_number
from mm3d.console import complain
from mm3d.grid.agreement import format_ranks
from mm3d.guard import FLUSH_SECONDS
from mm3d.tracing.status_board import (BEAT, EVENTS, INSIDE, MOVED, PROCESS, WORKED,
                                       HeartbeatChannel, PositionObserver, StatusBoard)
from mm3d.tracing.observe import observed
from mm3d.transport.communicators import create

MIN_WORKING_SHARE = 0.05    # of the time, in which a rank that computes uses its processor


class Watchdog:
    """End the job of all ranks when it makes no progress for some time.

    It does so when no sign of a rank comes for `seconds`, because it is stopped, swapped out, or
    its node is lost; and when ranks wait in observed collectives (`attached`) for `seconds` while
    no other rank works.  A rank that only computes for longer than that is left alone.  A rank of
    another node that was never heard of, as where datagrams between nodes are blocked, may be
    computing, too: neither its silence nor waiting for it ends the job.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        All ranks of the job, which make it together.
    seconds : float
        Seconds without progress after which the job ends.

    Raises
    ------
    ValueError
        When `seconds` is no positive number.

    Examples
    --------
    >>> with Watchdog(comm, 120) as watchdog, watchdog.attached(model.grid, model):
    ...     train(model)
    """

    def __init__(self, comm: Any, seconds: float) -> None:
        if not is_number(seconds) or not 0 < seconds < float("inf"):
            raise ValueError(f"a watchdog of {seconds!r} seconds: give a positive number, such as "
                             "120")
        self.comm, self.seconds = create(comm.Dup), seconds
        self.period = min(5.0, seconds / 10)    # between two checks
        self.board = StatusBoard(self.comm)
        self.heartbeats = HeartbeatChannel(self.comm, self.board.nodes)
        self.board.mine[PROCESS] = os.getpid()
        self._events = self._used = 0
        self._since = self._looked = time.monotonic_ns()
        self.update_board()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="mm3d watchdog")

    def __repr__(self) -> str:
        return f"Watchdog({self.seconds:g} s, rank {self.comm.rank} of {self.comm.size})"

    def __enter__(self) -> "Watchdog":
        self._thread.start()
        return self

    def __exit__(self, *failure: Any) -> None:
        """Stop watching; this rank's silence no longer ends the job.

        All ranks do this, or the job fails.  A rank that leaves by an exception may be the only
        one, so it frees no communicator, for which it might wait for the others.
        """
        self._over.set()
        self._thread.join()
        self.board.mine[BEAT] = -1
        self.heartbeats.send(self.board.numbers[self.board.rank], time.monotonic_ns())
        self.heartbeats.close()
        if not any(failure):
            self.comm.Free()

    @contextlib.contextmanager
    def attached(self, grid: Any, model: Any = None) -> Iterator[None]:
        """Observe within the block the collectives of `grid` and the layers of `model`."""
        with observed(grid, PositionObserver(self.board), model):
            try:
                yield
            finally:
                self.board.mine[INSIDE] = 0

    def _run(self) -> None:
        """Check periodically; the first rank that is alive ends a stalled job."""
        while not self._over.wait(self.period):
            self.update_board()
            states = self.rank_states()
            first_alive = next((rank for rank, state in enumerate(states)
                                if state not in ("silent", "left", "unknown")), None)
            if is_stalled(states) and first_alive == self.board.rank:
                self.end_job(states)
                return

    def update_board(self) -> None:
        """Write to the board that this rank is alive, and whether it has made progress."""
        now, used, mine = time.monotonic_ns(), time.process_time_ns(), self.board.mine
        if now - self._looked > 1e9 * (self.seconds / 2 + self.period):
            self._since = now    # this rank was stopped itself, perhaps with all others
        if mine[EVENTS] != self._events or not mine[MOVED]:
            self._events, mine[MOVED] = mine[EVENTS], now
        if used - self._used > MIN_WORKING_SHARE * (now - self._looked):
            mine[WORKED] = now
        self._looked, self._used, mine[BEAT] = now, used, now
        board = self.board
        self.heartbeats.send(board.numbers[board.rank], now, board.texts[board.rank].tobytes())
        for rank, numbers, texts in self.heartbeats.receive(now):
            board.numbers[rank] = numbers
            if texts:
                board.texts[rank] = np.frombuffer(texts, board.texts.dtype)

    def rank_states(self) -> list[str]:
        """Return "silent", "left", "unknown", "waiting", "working" or "idle" for each rank."""
        now, least = time.monotonic_ns(), 1e9 * self.seconds
        found = []
        for row in self.board.numbers.tolist():
            def is_old(field: int) -> bool:
                return now - max(row[field], self._since) > least
            found.append("left" if row[BEAT] < 0 else "unknown" if not row[BEAT]
                         else "silent" if is_old(BEAT) else "working" if not is_old(MOVED)
                         else "waiting" if row[INSIDE] else "idle" if is_old(WORKED)
                         else "working")
        return found

    def format_report(self, states: list[str]) -> str:
        """Format the reason why the job ends, and the position of each rank."""
        now = time.monotonic_ns()
        silent, waiting = ([rank for rank, state in enumerate(states) if state == wanted]
                           for wanted in ("silent", "waiting"))
        ranks_by_text: dict[str, list[int]] = {}
        for rank, state in enumerate(states):
            row = self.board.numbers[rank]
            text = {"silent": f"silent for {(now - row[BEAT]) / 1e9:.0f} s"
                              f"{self._describe_process(rank)}; ",
                    "left": "has left; ", "unknown": "never heard of; "}.get(state, "")
            ranks_by_text.setdefault(f"{text}{self.board.text(rank)}", []).append(rank)
        reason = (f"nothing is heard of {format_ranks(silent)}" if silent else
                  f"{format_ranks(waiting)} wait, and nobody works")
        return "\n".join([f"watchdog: no progress for {self.seconds:g} s, {reason}; the job ends",
                          *(f"  {format_ranks(which)}: {text}"
                            for text, which in ranks_by_text.items())])

    def _describe_process(self, rank: int) -> str:
        """Describe the state of a rank's process, as far as Linux tells on this node."""
        if self.board.nodes[rank] != self.board.nodes[self.board.rank]:
            return ", on another node"
        process = int(self.board.numbers[rank, PROCESS])
        try:
            with open(f"/proc/{process}/stat", "rb") as file:
                state = os.fsdecode(file.read()).rpartition(")")[2].split()[0]
        except OSError:
            return f", process {process} is gone"
        return f", process {process} is {'stopped' if state in 'Tt' else f'in state {state}'}"

    def end_job(self, states: list[str]) -> None:
        """Print the report, and end the job."""
        complain(f"\n{self.format_report(states)}")
        # If MPI does not end the job, as where the launcher is not reached, this rank ends itself.
        # Abort holds Python's lock meanwhile, so that no thread of Python could do it.
        nothing = open(os.devnull, "wb")
        faulthandler.dump_traceback_later(5 * FLUSH_SECONDS, exit=True, file=nothing)
        time.sleep(FLUSH_SECONDS)
        self.comm.Abort(1)


def is_stalled(states: list[str]) -> bool:
    """Return whether ranks in these states will never make progress."""
    return "silent" in states or ("waiting" in states
                                  and not {"working", "unknown"}.intersection(states))
