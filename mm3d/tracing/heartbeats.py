"""Exchange the state of ranks between nodes by datagram, beside MPI.

A rank cannot use MPI while it waits in a collective for a rank that never comes.  A datagram may
be lost; the next one follows.
"""
from __future__ import annotations

import secrets
import socket
import struct
from typing import Any, Iterator

import numpy as np

NUMBERS_PER_RANK = 8
# What they are: a rank's process id; the times when its thread last looked, when it last made
# progress, and when it last used its processor; the number of times that it has entered or left a
# collective, and whether it is in one.  Times are in nanoseconds of the node's monotonic clock.
PROCESS, *TIMES, EVENTS, INSIDE = range(6)
BEAT, MOVED, WORKED = TIMES
HEADER = struct.Struct(f"<Qi{NUMBERS_PER_RANK}q")    # the job, the rank, and its numbers
MAX_DATAGRAM_BYTES = 4096


class HeartbeatChannel:
    """Send the row of numbers of this rank to the ranks of other nodes, and receive theirs.

    All ranks of `comm` make it together.
    """

    def __init__(self, comm: Any, nodes: list[int]) -> None:
        self.rank, self._socket, self._others = comm.rank, None, []
        if len(set(nodes)) == 1:
            return
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind(("", 0))
        self._socket.setblocking(False)
        self._job = comm.bcast(secrets.randbits(64))
        host = socket.gethostname()
        places = comm.allgather((host, self._socket.getsockname()[1]))
        addresses = {name: _find_address(name, host) for name in {name for name, _ in places}}
        self._others = [(addresses[name], port) for (name, port), node in zip(places, nodes)
                        if node != nodes[comm.rank] and addresses[name]]

    def send(self, numbers: np.ndarray, now: int, texts: bytes = b"") -> None:
        """Send this rank's row, and texts, to the ranks of other nodes, with times as ages.

        This node's clock is at `now` nanoseconds.
        """
        if self._socket is None:
            return
        row = numbers.tolist()
        for field in TIMES:
            row[field] = now - row[field] if row[field] > 0 else -1
        message = HEADER.pack(self._job, self.rank, *row) + texts
        for place in self._others:
            try:
                self._socket.sendto(message, place)
            except OSError:    # a full queue, or a lost node: a later one may arrive
                continue

    def receive(self, now: int) -> Iterator[tuple[int, list[int], bytes]]:
        """Iterate over the rows that have arrived: rank, numbers, and texts.

        Ages are converted to times on this node's clock, which is at `now` nanoseconds.
        """
        while self._socket is not None:
            try:
                message = self._socket.recv(MAX_DATAGRAM_BYTES)
            except BlockingIOError:
                return
            except OSError:
                continue
            if len(message) < HEADER.size:
                continue
            job, rank, *row = HEADER.unpack_from(message)
            if job != self._job:
                continue
            for field in TIMES:
                row[field] = now - row[field] if row[field] >= 0 else -1
            yield rank, row, message[HEADER.size:]

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()


def _find_address(name: str, own_host: str) -> str | None:
    """Return the address of the host of that name; None if it has none."""
    try:
        return "127.0.0.1" if name == own_host else socket.gethostbyname(name)
    except OSError:
        return None
