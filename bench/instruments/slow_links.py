"""Time messages between nodes, and find a node whose link is much slower than the others'.

Ranks that meet in collectives all take the time of the slowest: their own times do not say which
node it is.  Here each node exchanges messages with its two neighbours in a ring, a pair at a time,
and its rate is that of the faster exchange: with three nodes or more, one slow node leaves every
other node a fast neighbour.
"""
from __future__ import annotations

import socket
from typing import Any

import numpy as np
from mpi4py import MPI

from mm3d.transport.nodes import create_node_communicator

SIZES = tuple(2 ** power for power in (16, 18, 20, 22, 24, 26))    # bytes of a message
ENOUGH = 0.02       # seconds of an exchange, beside which delays in programs hardly count
REPETITIONS = 2     # of each exchange; the faster counts
SLOW = 3.0          # a slow node is this many times slower than the median node


def find_slow_nodes(comm: MPI.Intracomm) -> list[str]:
    """Exchange messages between nodes, and return a line for each node that is slow twice.

    All ranks call it, and get the same.  On one or two nodes nothing is exchanged: a slow exchange
    of two does not say which one is slow.
    """
    own = create_node_communicator(comm)
    first = comm.Split(0 if own.rank == 0 else MPI.UNDEFINED, comm.rank)
    own.Free()
    found = None
    if first != MPI.COMM_NULL:
        if first.size > 2:
            found = _slow_in_both(first)
        first.Free()
    return comm.bcast(found) or []


def _slow_in_both(first: MPI.Intracomm) -> list[str]:
    """Tell of the nodes that are slow in two measurements, on the first rank of each node."""
    hosts = first.allgather(socket.gethostname())
    rates = _measure_rates(first)
    if not slow_nodes(rates):
        return []
    again = _measure_rates(first)    # another program may have been in the way
    return [f"slow: node {node} ({hosts[node]}) exchanges {again[node] * 8e-6:.3g} Mbit/s with "
            f"its neighbours, the median node {np.median(again) * 8e-6:.3g} Mbit/s: every "
            f"collective across nodes waits for it"
            for node in slow_nodes(rates) if node in slow_nodes(again)]


def slow_nodes(rates: np.ndarray) -> list[int]:
    """List the nodes whose rate is less than the median of all over `SLOW`."""
    return np.flatnonzero(rates * SLOW < np.median(rates)).tolist()


def _measure_rates(comm: Any) -> np.ndarray:
    """Return the rate of each node in bytes a second, for `comm` of one rank a node.

    Messages become longer until a typical exchange takes `ENOUGH`.
    """
    for size in SIZES:
        seconds = _exchange_with_neighbours(comm, size)
        if np.median(seconds) >= ENOUGH:
            break
    return size / np.minimum(seconds, np.roll(seconds, 1))


def _exchange_with_neighbours(comm: Any, size: int) -> np.ndarray:
    """Return the seconds in which each node and the next one exchange messages of `size` bytes.

    A node is in one exchange at a time, so that they do not share its link.
    """
    count, seconds = comm.size, np.full(comm.size, np.inf)
    out, into = np.zeros(size, np.int8), np.empty(size, np.int8)
    pairs = [[pair for pair in range(count - count % 2) if pair % 2 == which]
             for which in range(2)] + [[count - 1]] * (count % 2)
    for _ in range(REPETITIONS):
        for together in pairs:
            comm.Barrier()
            for pair in together:
                ends = pair, (pair + 1) % count
                if comm.rank in ends:
                    partner = ends[ends[0] == comm.rank]
                    begun = MPI.Wtime()
                    comm.Sendrecv(out, partner, recvbuf=into, source=partner)
                    seconds[pair] = min(seconds[pair], MPI.Wtime() - begun)
    seconds[np.isinf(seconds)] = 0
    comm.Allreduce(MPI.IN_PLACE, seconds, MPI.MAX)    # at the end that has waited longer
    return seconds
