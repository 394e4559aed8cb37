"""What ranks of different nodes tell each other by datagram, beside MPI.

MPI cannot be asked while it waits for a rank that never comes; a datagram that is lost is
followed by the next.
"""
from __future__ import annotations

import secrets
import socket
import struct
from typing import Any, Iterator

import numpy as np

NUMBERS = 8                                   # of a rank, of which those in TIMES are times
TIMES = (1, 2, 3)
HEAD = struct.Struct(f"<Qi{NUMBERS}q")        # the job, the rank, and its numbers


class Hearsay:
    """The ranks of all nodes, each told of by itself.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        All ranks, which make it together.
    nodes : list of int
        The node of each.
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
        addresses = {name: _address(name, host) for name in {name for name, _ in places}}
        self._others = [(addresses[name], port) for (name, port), node in zip(places, nodes)
                        if node != nodes[comm.rank] and addresses[name]]

    def tell(self, numbers: np.ndarray, now: int, texts: bytes = b"") -> None:
        """Send this rank's row to the ranks of other nodes, times as ages."""
        if self._socket is None:
            return
        row = numbers.tolist()
        for field in TIMES:
            row[field] = now - row[field] if row[field] > 0 else -1
        message = HEAD.pack(self._job, self.rank, *row) + texts
        for place in self._others:
            try:
                self._socket.sendto(message, place)
            except OSError:    # a full queue, or a node that is no more: the next may arrive
                continue

    def heard(self, now: int) -> Iterator[tuple[int, list[int], bytes]]:
        """What has arrived: rank, numbers with times of this node's clock, and texts."""
        while self._socket is not None:
            try:
                message = self._socket.recv(4096)
            except BlockingIOError:
                return
            except OSError:
                continue
            if len(message) < HEAD.size:
                continue
            job, rank, *row = HEAD.unpack_from(message)
            if job != self._job:
                continue
            for field in TIMES:
                row[field] = now - row[field] if row[field] >= 0 else -1
            yield rank, row, message[HEAD.size:]

    def close(self) -> None:
        """Tell, and hear, no more."""
        if self._socket is not None:
            self._socket.close()


def _address(name: str, here: str) -> str | None:
    """Where the host of that name can be reached."""
    try:
        return "127.0.0.1" if name == here else socket.gethostbyname(name)
    except OSError:
        return None
