"""Estimate whether nodes have the memory for a row, before it is measured on processors."""

import math
from dataclasses import dataclass, replace

from mpi4py import MPI

from bench.cases.case import Case, row_stack
from bench.cases.variants import itemsize
from bench.errors import LeftOut
from bench.instruments.available_memory import available_memory, release_heap
from bench.prediction import memory_fit
from mm3d.arrays.backend import Backend
from mm3d.model import cost
from mm3d.transport.nodes import create_node_communicator


@dataclass(frozen=True)
class NodeMemory:
    """A node of a job: its ranks, and the bytes available for arrays, infinite if unknown.

    It `checks` if it has rank 0, which computes the serial model.
    """

    ranks: int
    checks: bool
    available: float


@dataclass(frozen=True)
class MemoryNeed:
    """The memory of a row in bytes, beyond that of idle processes.

    It leaves out the buffers of MPI and the memory that pools hold for reuse.  Rows measured on 8
    to 64 ranks of one node took 1.1 to 1.3 times as much.  `rank` is the peak of a step on rank 0,
    which has the most; `check` what rank 0 adds to compare the results with the serial scheme.
    """

    rank: float
    check: float

    def on(self, node: NodeMemory) -> float:
        """Return the bytes that the row needs on `node`."""
        return node.ranks * self.rank + node.checks * self.check


def list_nodes(comm: MPI.Intracomm, limit: float | None = None) -> list[NodeMemory]:
    """List the nodes of a job; the same on every rank; each must call this.

    `limit` is the bytes for arrays on each, instead of those that its system has available.
    """
    node = create_node_communicator(comm)
    seen = available_memory() if limit is None else limit
    first, ranks = node.bcast(comm.rank), node.size
    node.Free()
    least: dict[int, NodeMemory] = {}
    for number, count, room in comm.allgather((first, ranks, math.inf if seen is None else seen)):
        before = least.get(number, NodeMemory(count, number == 0, math.inf))
        least[number] = replace(before, available=min(before.available, room))
    return list(least.values())


def estimate_by_dry_runs(one: Case, grid: tuple[int, ...], recompute: str,
                         block: int) -> MemoryNeed:
    """Estimate the memory of a row by dry runs, with elementwise work in blocks of `block`."""
    how, sizes = one.variant, one.verified
    stack = row_stack(how, one.sizes, recompute)
    # Rank 0 collects output and gradients, each whole.
    collected = cost.parameters(sizes) + 2 * sizes.tokens * sizes.hidden
    return MemoryNeed(
        memory_fit.predict_peak(one.row.scheme, grid, stack, how, block),
        memory_fit.predict_peak("serial", (1,), row_stack(how, sizes), block=block)
        + collected * itemsize(how.dtype))


def explain_shortage(one: Case, grid: tuple[int, ...], recompute: str, nodes: list[NodeMemory],
                     block: int) -> str | None:
    """Name the node that lacks memory for a row, and a policy that fits; None if no node does."""
    need = estimate_by_dry_runs(one, grid, recompute, block)
    worst = max(nodes, key=lambda node: need.on(node) - node.available)
    if need.on(worst) <= worst.available:
        return None
    line = (f"needs about {memory_fit.format_gib(need.on(worst))} by an estimate on a node of "
            f"{worst.ranks} rank{'s' * (worst.ranks > 1)}, which has "
            f"{memory_fit.format_gib(worst.available)} for it; ")
    for name in memory_fit.list_policies(one.variant.keep):
        other = estimate_by_dry_runs(one, grid, name, block)
        if all(other.on(node) <= node.available for node in nodes):
            return (f"{line}--recompute {name} would fit, with "
                    f"{memory_fit.format_gib(other.on(worst))}; --node-memory none tries in any "
                    f"case")
    return f"{line}no policy of recomputation fits; --node-memory none tries in any case"


def check_row_fits(one: Case, grid: tuple[int, ...], recompute: str, backend: Backend,
                   comm: MPI.Intracomm, limit: float | None = None) -> None:
    """Raise LeftOut on every rank when a node lacks memory for a row, before it is allocated.

    Each rank must call this.  The memory of devices is not checked.  `limit` is the bytes of a
    node for the row, instead of those available there; infinite for no limit.
    """
    if not backend.host_buffers or limit == math.inf:
        return

    def find_shortage() -> str | None:
        nodes, problem = list_nodes(comm, limit), None
        if comm.rank == 0:
            try:
                problem = explain_shortage(one, grid, recompute, nodes, backend.block)
            except ValueError:
                pass    # no sizes of a model: its constructor raises, on every rank
        return comm.bcast(problem)

    problem = find_shortage()
    if problem and limit is None:
        # The C library may still hold the small arrays of the row before.
        release_heap()
        problem = find_shortage()
    if problem:
        raise LeftOut(problem)
