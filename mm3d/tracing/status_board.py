"""Share the state of each rank with others: of its node in memory, of other nodes by datagram.

A rank cannot use MPI while it waits in a collective for a rank that never comes.  A datagram may
be lost; the next one follows.
"""

from __future__ import annotations

import mmap
import os
import secrets
import socket
import struct
import tempfile
from typing import Any, Callable, Iterator

import numpy as np

from mm3d.tracing.events import Collective, Event, LayerEvent, Observer, Recomputation
from mm3d.transport.communicators import create
from mm3d.transport.nodes import own_node

NUMBERS_PER_RANK = 8
# What they are: a rank's process id; the times when its thread last looked, when it last made
# progress, and when it last used its processor; the number of times that it has entered or left a
# collective, and whether it is in one.  Times are in nanoseconds of the node's monotonic clock.
PROCESS, *TIMES, EVENTS, INSIDE = range(6)
BEAT, MOVED, WORKED = TIMES
HEADER = struct.Struct(f"<Qi{NUMBERS_PER_RANK}q")    # the job, the rank, and its numbers
MAX_DATAGRAM_BYTES = 4096
NUMBERS_BYTES = 8 * NUMBERS_PER_RANK    # of the numbers of a row
TEXT_BYTES = 96    # of the name of a layer or a collective
ROW_BYTES = NUMBERS_BYTES + 2 * TEXT_BYTES


class StatusBoard:
    """Hold a table in memory that the ranks of a node share, with a row for each rank of the job.

    All ranks of `comm` make it together.  A rank writes its own row; rows of ranks on other nodes
    are copied from their messages.  `numbers` has the numbers of all, int64, with a column for
    each field, and `texts` the names of their layers and collectives; `own_texts` says where those
    of this rank are in `memory`.
    """

    def __init__(self, comm: Any) -> None:
        self.size, self.rank = comm.size, comm.rank
        node = own_node(comm)
        self.nodes = comm.allgather(node)
        local = create(comm.Split, node, comm.rank)
        path = file = None
        if local.rank == 0:
            file, path = tempfile.mkstemp(prefix="mm3d-watchdog-")
            os.ftruncate(file, self.size * ROW_BYTES)
        path = local.bcast(path)
        if file is None:
            file = os.open(path, os.O_RDWR)
        self.memory = mmap.mmap(file, self.size * ROW_BYTES)
        os.close(file)
        local.Barrier()
        if local.rank == 0:
            os.unlink(path)
        local.Free()
        rows = np.frombuffer(self.memory, np.uint8).reshape(self.size, ROW_BYTES)
        self.numbers = rows[:, :NUMBERS_BYTES].view(np.int64)
        self.texts = rows[:, NUMBERS_BYTES:].view(f"S{TEXT_BYTES}")
        start = self.rank * ROW_BYTES
        self.mine = memoryview(self.memory)[start:start + NUMBERS_BYTES].cast("q")
        starts = start + NUMBERS_BYTES, start + NUMBERS_BYTES + TEXT_BYTES
        self.own_texts = [slice(begin, begin + TEXT_BYTES) for begin in starts]

    def text(self, rank: int) -> str:
        """Describe the collective and the layer that a rank is in, or entered last."""
        layer, collective = (text.decode(errors="replace") for text in self.texts[rank])
        if not collective:
            return "before its first collective under watch"
        entered = "in" if self.numbers[rank, INSIDE] else "last entered"
        return f"{entered} {collective}{f' of {layer}' if layer else ''}"


class PositionObserver(Observer):
    """Write the layer and the collective that this rank is in to the board."""

    kinds = (LayerEvent, Recomputation, Collective)
    sizes = False

    def __init__(self, board: StatusBoard) -> None:
        self.board, self.entered = board, []
        self.names: dict[tuple[str, str, str], bytes] = {}

    def enter(self, event: Event, barrier: Callable[[], None] | None = None) -> None:
        """Enter a layer, its recomputation, or a collective."""
        board = self.board
        if isinstance(event, (LayerEvent, Recomputation)):
            text = _pad_text(event.name)
            board.memory[board.own_texts[0]] = text
            self.entered.append(text)
            return
        key = event.kind, event.direction, self.operand
        text = self.names.get(key)
        if text is None:
            words = event.kind.replace("_", "-"), self.operand, f"along {event.direction}"
            text = self.names[key] = _pad_text(" ".join(filter(None, words)))
        board.memory[board.own_texts[1]] = text
        board.mine[EVENTS] += 1
        board.mine[INSIDE] = 1
        self.entered.append(None)

    def leave(self) -> None:
        """Leave the layer or collective that was entered last."""
        board = self.board
        if self.entered.pop() is None:
            board.mine[EVENTS] += 1
            board.mine[INSIDE] = 0


def _pad_text(text: str) -> bytes:
    """Encode a text in `TEXT_BYTES` bytes."""
    return text.encode()[:TEXT_BYTES].ljust(TEXT_BYTES, b"\0")


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
