"""Carry out collectives of ranks on several nodes: in shared memory inside a node, then in lanes.

The ranks of a node hold an array that all of them need once, in shared memory, and add their
terms there before a sum leaves the node.  Between nodes `mm3d.transport.lanes` sends each block
once to each node that needs it: no node receives more than it must.  MPI's own algorithms may
ignore nodes, and send more.

Arrays in shared memory hold the blocks of one node after those of another.  A sum adds the terms
of a node's ranks in their order, and then the sums of the nodes: in the order of the nodes, but
for one root in cyclic order, beginning with the node after it.  Numbers of 16 bits are added, and
cross nodes, in float32, and the sum is rounded once.

Arrays of up to `MAX_MPI_BYTES` go by MPI, which adds in an order of its own: the time of a small
collective is that of its successive messages, not of its words.  All all-to-alls go by MPI, too:
no two ranks need the same block, and none can be summed before it leaves its node.
"""

import math
from typing import Any, Iterable

import numpy as np
from mpi4py import MPI

from mm3d.arrays.backend import Array, Backend
from mm3d.arrays.blocks import block_bounds, block_indices, resized_shape
from mm3d.transport import sums
from mm3d.transport.barrier import (ALL_GATHER, ALL_REDUCE, BROADCAST, REDUCE, REDUCE_SCATTER,
                                    encode_call)
from mm3d.transport.communicators import create
from mm3d.transport.lanes import Lane, share
from mm3d.transport.mpi import MpiTransport
from mm3d.transport.pending import Pending
from mm3d.transport.segments import SharedMemory, join_blocks, read_only_view

MAX_MPI_BYTES = 1 << 16    # of a whole array that goes by MPI, in fewer successive messages


class HierarchicalTransport(MpiTransport):
    """Carry out collectives in shared memory inside nodes, and in lanes between them.

    What is gathered or broadcast lies in memory that the ranks of a node share, as with
    `mm3d.transport.shared_memory.SharedTransport`, if it is in the order of the nodes.  All ranks
    complete the collectives that they have begun in the same order.  `nodes` are those of the
    ranks, two or more.  Raises OSError on all ranks alike when those of a node share no memory.
    """

    name = "hierarchical"
    mpi_bytes = MAX_MPI_BYTES
    nonblocking_rooted = False    # they pass through the memory of a node

    def __init__(self, comm: MPI.Intracomm, backend: Backend, nodes: list[int]) -> None:
        super().__init__(comm, backend)
        numbers = list(dict.fromkeys(nodes))
        self.members = [[rank for rank, node in enumerate(nodes) if node == number]
                        for number in numbers]
        self.node = numbers.index(nodes[self.rank])
        self.lanes = min(map(len, self.members))    # ranks of the smallest node
        self.in_order = sum(self.members, []) == list(range(comm.size))
        self.inside = create(comm.Split, self.node, self.rank)
        self.index = self.inside.rank
        carries = self.index < self.lanes
        self.across = create(comm.Split, self.index if carries else MPI.UNDEFINED, self.node)
        self.lane = Lane(self.across) if carries else None
        self.memory = self._share_memory()

    def _share_memory(self) -> SharedMemory:
        """Make the memory that the ranks of this node share; all ranks fail if one does."""
        memory, problem = None, ""
        try:
            memory = SharedMemory(self.inside)
        except OSError as error:
            problem = str(error)
        problem = next(filter(None, self.comm.allgather(problem)), "")
        if memory is None or problem:
            self._free_communicators()
            raise OSError(problem)
        return memory

    def _free_communicators(self) -> None:
        self.inside.Free()
        if self.across != MPI.COMM_NULL:
            self.across.Free()

    def free(self) -> None:
        self.memory.synchronize()
        self._free_communicators()

    def all_gather(self, a: Array, dim: int, counts: list[int]) -> Array:
        if math.prod(resized_shape(a.shape, dim, sum(counts))) * a.dtype.itemsize <= MAX_MPI_BYTES:
            return super().all_gather(a, dim, counts)
        return self.begin_all_gather(a, dim, counts).wait()

    def begin_all_gather(self, a: Array, dim: int, counts: list[int]) -> Pending:
        dim %= a.ndim
        shape = resized_shape(a.shape, dim, sum(counts))
        if math.prod(shape) * a.dtype.itemsize <= MAX_MPI_BYTES:
            return super().begin_all_gather(a, dim, counts)
        blocks, nodes = self._arrange(shape, dim, counts)
        whole = self._take((math.prod(shape),), a.dtype)
        self._copy(a, whole[blocks[self.rank]].reshape(a.shape))
        self.memory.synchronize(encode_call(ALL_GATHER, a.dtype, shape, dim, tuple(counts)))
        if self.lane is None:
            request = None
        else:
            parts = [whole[part] for part in self._shares(nodes)]
            request = self._exchange_with_nodes([parts[self.node]] * len(parts), parts)
        if self._is_ordered(shape, dim):
            out = read_only_view(whole.reshape(shape))
            return Pending(out, self.memory.synchronize, request, (whole,))
        out = self.backend.empty(shape, a.dtype)

        def unpack() -> None:
            self.memory.synchronize()
            join_blocks((whole[block] for block in blocks), out, dim, counts)
            self._moved += out.size
        return Pending(out, unpack, request, (whole,))

    def reduce_scatter(self, a: Array, dim: int, counts: list[int]) -> Array:
        if a.nbytes <= MAX_MPI_BYTES:
            return super().reduce_scatter(a, dim, counts)
        return self.begin_reduce_scatter(a, dim, counts).wait()

    def begin_reduce_scatter(self, a: Array, dim: int, counts: list[int]) -> Pending:
        if a.nbytes <= MAX_MPI_BYTES:
            return super().begin_reduce_scatter(a, dim, counts)
        dim %= a.ndim
        blocks, nodes = self._arrange(a.shape, dim, counts)
        terms = self._take((self.inside.size, a.size), a.dtype)
        self._pack(a, terms[self.index], dim, counts, blocks)
        self.memory.synchronize(encode_call(REDUCE_SCATTER, a.dtype, a.shape, dim, tuple(counts)))
        start, length = nodes[self.node]
        total = self._take((length,), a.dtype)    # the blocks of this node
        own = blocks[self.rank]
        out = total[own.start - start:own.stop - start].reshape(
            resized_shape(a.shape, dim, counts[self.rank]))
        if self.lane is None:
            return Pending(out, self.memory.synchronize, None, (terms, total))
        shares = self._shares(nodes)
        request, sums_of_nodes = self._exchange_sums(terms, shares)
        mine = shares[self.node]

        def add() -> None:
            self._add(sums_of_nodes, total[mine.start - start:mine.stop - start])
            self.memory.synchronize()
        return Pending(out, add, request, (terms, total))

    def all_reduce(self, a: Array) -> Array:
        if a.nbytes <= MAX_MPI_BYTES:
            return super().all_reduce(a)
        terms, total = self._take((self.inside.size, a.size), a.dtype), self._take(
            (a.size,), a.dtype)
        self._copy(a, terms[self.index].reshape(a.shape))
        self.memory.synchronize(encode_call(ALL_REDUCE, a.dtype, a.shape))
        if self.lane is not None:
            nodes = len(self.members)
            parts = self._shares(block_bounds(a.size, nodes, node) for node in range(nodes))
            request, sums_of_nodes = self._exchange_sums(terms, parts)
            request.Wait()
            self._add(sums_of_nodes, total[parts[self.node]])
            sums_of_parts = [total[part] for part in parts]
            own = sums_of_parts[self.node]
            self._exchange_with_nodes([own] * len(parts), sums_of_parts).Wait()
        self.memory.synchronize()
        return self._copy(total.reshape(a.shape), self.backend.empty(a.shape, a.dtype))

    def broadcast(self, a: Array, root: int) -> Array:
        if a.nbytes <= MAX_MPI_BYTES:
            return super().broadcast(a, root)
        call = encode_call(BROADCAST, a.dtype, a.shape, root)
        whole = self._take((a.size,), a.dtype)
        source = self._node_of(root)
        if self.rank == root:
            self._copy(a, whole.reshape(a.shape))
        if self.node == source:
            self.memory.synchronize(call)
        if self.lane is not None:
            part = whole[share(0, a.size, self.lanes, self.index)]
            self.lane.broadcast(part, source)
            self._moved += part.size * (self.node != source)
        if self.node != source:
            self.memory.synchronize(call)
        return a if self.rank == root else read_only_view(whole.reshape(a.shape))

    def reduce(self, a: Array, root: int) -> Array | None:
        if a.nbytes <= MAX_MPI_BYTES:
            return super().reduce(a, root)
        call = encode_call(REDUCE, a.dtype, a.shape, root)
        terms, at = self._take((self.inside.size, a.size), a.dtype), self._node_of(root)
        self._copy(a, terms[self.index].reshape(a.shape))
        self.memory.synchronize(call)
        if self.lane is not None:
            part = share(0, a.size, self.lanes, self.index)
            total = self._sum_of_node(terms, part)
            self._moved += self.lane.reduce(total, at)
            if self.node == at and total.dtype != terms.dtype:
                terms[0, part] = total
        if self.node == at:
            self.memory.synchronize()
        return terms[0].reshape(a.shape) if self.rank == root else None

    def _node_of(self, rank: int) -> int:
        """Return the number of the node of a rank."""
        return next(node for node, ranks in enumerate(self.members) if rank in ranks)

    def _arrange(self, shape: tuple[int, ...], dim: int,
                 counts: list[int]) -> tuple[list[slice], list[tuple[int, int]]]:
        """Place blocks along `dim` of an array of `shape`, those of a node together.

        Returns the place of each rank's block; start and length of each node's blocks.
        """
        unit = math.prod(shape) // max(1, shape[dim])
        blocks, nodes, start = [slice(0)] * len(counts), [], 0
        for ranks in self.members:
            first = start
            for rank in ranks:
                blocks[rank] = slice(start, start + counts[rank] * unit)
                start = blocks[rank].stop
            nodes.append((first, start - first))
        return blocks, nodes

    def _shares(self, nodes: Iterable[tuple[int, int]]) -> list[slice]:
        """Return the share that this rank carries of each node's part, by start and length."""
        return [share(start, length, self.lanes, self.index) for start, length in nodes]

    def _is_ordered(self, shape: tuple[int, ...], dim: int) -> bool:
        """Return whether blocks placed by node make up the array in its own order."""
        return self.in_order and math.prod(shape[:dim]) <= 1

    def _take(self, shape: tuple[int, ...], dtype: Any) -> Array:
        """Allocate an array that the ranks of this node share; all of them call this."""
        region, place = self.memory.take(math.prod(shape) * np.dtype(dtype).itemsize)
        whole = np.ndarray(shape, dtype, *place)
        self.backend.pool.lend(whole, whole.nbytes // self.inside.size, self.memory.give_back,
                               region)
        return whole

    def _pack(self, a: Array, flat: Array, dim: int, counts: list[int],
              blocks: list[slice]) -> None:
        """Copy each block of `a` to its place in `flat`."""
        if self._is_ordered(a.shape, dim):
            self._copy(a, flat.reshape(a.shape))
            return
        for part, index in zip(blocks, block_indices(a.ndim, dim, counts)):
            self._copy(a[index], flat[part].reshape(a[index].shape))

    def _exchange_with_nodes(self, sends: list[Array], receives: list[Array]) -> Any:
        """Start the exchange of an array with every node in this lane; return the request."""
        self._moved += sum(a.size for node, a in enumerate(receives) if node != self.node)
        return self.lane.exchange(sends, receives)

    def _exchange_sums(self, terms: Array, parts: list[slice]) -> tuple[Any, list[Array]]:
        """Sum a part for each node over this node's ranks, and start to exchange the sums.

        Returns the requests to wait for, and then this node's part, summed over each node.
        """
        sends = [self._sum_of_node(terms, part) for part in parts]
        own = sends[self.node]
        received = [own if node == self.node else self.backend.empty(own.shape, own.dtype)
                    for node in range(len(parts))]
        return self._exchange_with_nodes(sends, received), received

    def _sum_of_node(self, terms: Array, part: slice) -> Array:
        """Sum a part of the terms of this node's ranks, in place or in float32."""
        first, *others = (term[part] for term in terms)
        total = sums.widen(first)
        if others:
            sums.add_terms([total, *others], total)
        self._moved += len(others) * total.size
        return total

    def _add(self, terms: list[Array], out: Array) -> None:
        """Sum the terms in their order, rounded once to `out`."""
        sums.add_terms(terms, out)
        self._moved += (len(terms) - 1) * out.size
