"""Estimate, before a row is measured on processors, whether its nodes have the memory."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from mpi4py import MPI

import mm3d
from bench.cases.case import Case
from bench.cases.variants import itemsize
from bench.errors import LeftOut
from bench.instruments.available_memory import available_memory, release_heap
from bench.prediction import memory_fit
from mm3d.arrays.backend import Backend
from mm3d.model import cost
from mm3d.transport.nodes import physical_node


class Node(NamedTuple):
    """A node of a job.

    Attributes
    ----------
    ranks : int
        How many of the job's ranks are on it.
    checks : bool
        Whether rank 0 is one of them, which computes the serial model.
    available : float
        Bytes that its arrays can have; infinite where that is not known.
    """

    ranks: int
    checks: bool
    available: float


@dataclass(frozen=True)
class Need:
    """The memory that a row asks of its nodes, in bytes, beyond that of idle processes.

    It is rather less than what is taken: on 8 to 64 ranks of one node, rows have been seen to take
    1.1 to 1.3 times as much, with what MPI needs and what is held to be used again.

    Attributes
    ----------
    rank : float
        The peak of a step on rank 0, which has the most.
    check : float
        What rank 0 needs beyond that to compare the results with the serial scheme's.
    """

    rank: float
    check: float

    def of(self, node: Node) -> float:
        """Bytes that `node` needs."""
        return node.ranks * self.rank + node.checks * self.check


def nodes_of(comm: MPI.Intracomm, limit: float | None = None) -> list[Node]:
    """List the nodes of a job; the same on every rank, each of which must call this.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    limit : float, optional
        Bytes that arrays may have on each node, instead of what its system has available.
    """
    node = physical_node(comm)
    seen = available_memory() if limit is None else limit
    first, ranks = node.bcast(comm.rank), node.size
    node.Free()
    least: dict[int, Node] = {}
    for number, count, room in comm.allgather((first, ranks, math.inf if seen is None else seen)):
        before = least.get(number, Node(count, number == 0, math.inf))
        least[number] = before._replace(available=min(before.available, room))
    return list(least.values())


def closed_form(one: Case, grid: tuple[int, ...], recompute: str) -> Need:
    """Estimate by closed forms, at once; see `bench.prediction.memory_fit.estimate`."""
    how, serial = one.variant, one.verified
    return Need(
        memory_fit.estimate(one.row.scheme, grid, how.dtype, recompute, one.sizes, how.keep),
        memory_fit.estimate("serial", (1,), how.dtype, "none", serial) + _collected(one))


def dry(one: Case, grid: tuple[int, ...], recompute: str, block: int) -> Need:
    """Estimate by dry runs, with elementwise work in blocks of `block` elements."""
    how = one.variant
    return Need(
        memory_fit.peak(one.row.scheme, grid, how.dtype, recompute, one.sizes, how, block),
        memory_fit.peak("serial", (1,), how.dtype, "none", one.verified, block=block)
        + _collected(one))


def _collected(one: Case) -> int:
    """Bytes of the output and the gradients that come to rank 0, each whole and once."""
    sizes = one.verified
    words = (cost.parameters(mm3d.describe(sizes))
             + 2 * sizes.batch * sizes.seq * sizes.hidden)
    return words * itemsize(one.variant.dtype)


def shortage(one: Case, grid: tuple[int, ...], recompute: str, nodes: list[Node],
             block: int) -> str | None:
    """Say which node lacks memory for a row, and what would fit; None where all have enough.

    Parameters
    ----------
    one : Case
        The row.
    grid : tuple of int
        Sizes of its grid.
    recompute : str
        Its policy of recomputation.
    nodes : list of Node
        See `nodes_of`.
    block : int
        Elements that elementwise work handles at a time.

    Notes
    -----
    Dry runs are made only where closed forms do not leave most of the memory free.
    """
    guess = closed_form(one, grid, recompute)
    if all(memory_fit.SURE * guess.of(node) <= node.available for node in nodes):
        return None
    need = dry(one, grid, recompute, block)
    worst = max(nodes, key=lambda node: need.of(node) - node.available)
    if need.of(worst) <= worst.available:
        return None
    line = (f"needs about {memory_fit.gib(need.of(worst))} by an estimate on a node of "
            f"{worst.ranks} rank{'s' * (worst.ranks > 1)}, which has "
            f"{memory_fit.gib(worst.available)} for it; ")
    for name in memory_fit.policies(one.variant.keep):
        other = dry(one, grid, name, block)
        if all(other.of(node) <= node.available for node in nodes):
            return (f"{line}--recompute {name} would fit, with "
                    f"{memory_fit.gib(other.of(worst))}; --memory none tries in any case")
    return f"{line}no policy of recomputation fits; --memory none tries in any case"


def check(one: Case, grid: tuple[int, ...], recompute: str, backend: Backend,
          comm: MPI.Intracomm, limit: float | None = None) -> None:
    """Refuse a row that the nodes of `comm` have no memory for, before any large array is made.

    Arrays on a device are not looked at.

    Parameters
    ----------
    one, grid, recompute
        See `shortage`.
    backend : Backend
        The array library.
    comm : mpi4py.MPI.Intracomm
        The ranks; each must call this.
    limit : float, optional
        Bytes that a node has for the row, instead of what is available there; infinite for no
        limit.

    Raises
    ------
    LeftOut
        The same on every rank.
    """
    if not backend.host_buffers or limit == math.inf:
        return

    def lacking() -> str | None:
        nodes, problem = nodes_of(comm, limit), None
        if comm.rank == 0:
            try:
                problem = shortage(one, grid, recompute, nodes, backend.block)
            except ValueError:
                pass    # sizes that make no model; building it says so, on every rank
        return comm.bcast(problem)

    problem = lacking()
    if problem and limit is None:
        # Small arrays of the last row may still be held for the next ones.
        release_heap()
        problem = lacking()
    if problem:
        raise LeftOut(problem)
