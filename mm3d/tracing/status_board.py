"""Share the state of each rank with the other ranks of its node, in memory."""
from __future__ import annotations

import mmap
import os
import tempfile
from typing import Any, Callable

import numpy as np

from mm3d.tracing.events import Collective, Event, Layer, Observer, Recomputation
from mm3d.tracing.heartbeats import EVENTS, INSIDE, NUMBERS_PER_RANK
from mm3d.transport.communicators import create
from mm3d.transport.nodes import own_node

NUMBERS_BYTES = 8 * NUMBERS_PER_RANK    # of the numbers of a row
TEXT_BYTES = 96    # of the name of a layer or a collective
ROW_BYTES = NUMBERS_BYTES + 2 * TEXT_BYTES


class StatusBoard:
    """Hold a table in memory that the ranks of a node share, with a row for each rank of the job.

    All ranks of `comm` make it together.  A rank writes its own row.  Rows of ranks on other nodes
    are copied from their messages.

    Attributes
    ----------
    memory : mmap
        The rows, each of `ROW_BYTES`.
    numbers : ndarray of int64
        The numbers of all rows, a column for each field.
    texts : list of slice
        Where this rank's layer and collective are in `memory`.
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
        self.mine = memoryview(self.memory)[self.rank * ROW_BYTES:][:NUMBERS_BYTES].cast("q")
        starts = [self.texts_start(self.rank) + k * TEXT_BYTES for k in (0, 1)]
        self.texts = [slice(start, start + TEXT_BYTES) for start in starts]

    def texts_start(self, rank: int) -> int:
        """Return the byte at which the texts of a rank begin."""
        return rank * ROW_BYTES + NUMBERS_BYTES

    def text(self, rank: int) -> str:
        """Describe the collective and the layer that a rank is in, or entered last."""
        start = self.texts_start(rank)
        layer, collective = (bytes(self.memory[begin:begin + TEXT_BYTES]).rstrip(b"\0").decode(
            errors="replace") for begin in (start, start + TEXT_BYTES))
        if not collective:
            return "before its first collective under watch"
        entered = "in" if self.numbers[rank, INSIDE] else "last entered"
        return f"{entered} {collective}{f' of {layer}' if layer else ''}"


class PositionObserver(Observer):
    """Write the layer and the collective that this rank is in to the board."""

    kinds = (Layer, Recomputation, Collective)
    sizes = False

    def __init__(self, board: StatusBoard) -> None:
        self.board, self.entered = board, []
        self.names: dict[tuple[str, str, str], bytes] = {}

    def enter(self, event: Event, barrier: Callable[[], None] | None = None) -> None:
        """Enter a layer, its recomputation, or a collective."""
        board = self.board
        if isinstance(event, (Layer, Recomputation)):
            text = _pad_text(event.name)
            board.memory[board.texts[0]] = text
            self.entered.append(text)
            return
        key = event.kind, event.direction, self.operand
        text = self.names.get(key)
        if text is None:
            words = event.kind.replace("_", "-"), self.operand, f"along {event.direction}"
            text = self.names[key] = _pad_text(" ".join(filter(None, words)))
        board.memory[board.texts[1]] = text
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
