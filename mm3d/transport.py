"""How the bytes of a collective travel.

A transport moves flat, contiguous buffers between the ranks of one communicator; the shapes,
the counting and the order of the blocks are `mm3d.grid.Axis`'.  `Transport` hands the arrays
themselves to MPI.  `StagedTransport` carries arrays that MPI cannot read through copies in host
memory, explicitly.
"""

import itertools

import numpy as np

from mm3d.backend import Array, Backend


class Transport:
    """MPI's own collectives on the arrays where they lie.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        The ranks.
    """

    def __init__(self, comm) -> None:
        self.comm = comm

    def all_gather(self, send: Array, recv: Array, lengths: list[int]) -> None:
        """Fill `recv` with the blocks of all ranks, `lengths` elements each, in rank order."""
        if len(set(lengths)) == 1:
            self.comm.Allgather(send, recv)
        else:
            self.comm.Allgatherv(send, [recv, (lengths, _offsets(lengths))])

    def reduce_scatter(self, send: Array, recv: Array, lengths: list[int]) -> None:
        """Fill `recv` with this rank's block of the sum of `send` over the ranks."""
        if len(set(lengths)) == 1:
            self.comm.Reduce_scatter_block(send, recv)
        else:
            self.comm.Reduce_scatter(send, recv, lengths)

    def all_reduce(self, send: Array, recv: Array) -> None:
        """Fill `recv` with the sum of `send` over the ranks."""
        self.comm.Allreduce(send, recv)

    def broadcast(self, buffer: Array, root: int) -> None:
        """Fill `buffer` with that of the rank `root`."""
        self.comm.Bcast(buffer, root)

    def reduce(self, send: Array, recv: Array | None, root: int) -> None:
        """Fill `recv` on the rank `root` with the sum of `send` over the ranks."""
        self.comm.Reduce(send, recv, root=root)


class StagedTransport(Transport):
    """The same collectives through host memory, for arrays out of MPI's reach."""

    def __init__(self, comm, backend: Backend) -> None:
        super().__init__(comm)
        self.backend = backend

    def _host(self, a: Array) -> np.ndarray:
        return np.ascontiguousarray(self.backend.to_host(a))

    def _like(self, a: Array) -> np.ndarray:
        return np.empty(tuple(a.shape), host_dtype(a))

    def _deliver(self, host: np.ndarray, a: Array) -> None:
        a[...] = self.backend.asarray(host)

    def all_gather(self, send: Array, recv: Array, lengths: list[int]) -> None:
        host = self._like(recv)
        super().all_gather(self._host(send), host, lengths)
        self._deliver(host, recv)

    def reduce_scatter(self, send: Array, recv: Array, lengths: list[int]) -> None:
        host = self._like(recv)
        super().reduce_scatter(self._host(send), host, lengths)
        self._deliver(host, recv)

    def all_reduce(self, send: Array, recv: Array) -> None:
        host = self._like(recv)
        super().all_reduce(self._host(send), host)
        self._deliver(host, recv)

    def broadcast(self, buffer: Array, root: int) -> None:
        host = self._host(buffer).copy()
        super().broadcast(host, root)
        self._deliver(host, buffer)

    def reduce(self, send: Array, recv: Array | None, root: int) -> None:
        host = None if recv is None else self._like(recv)
        super().reduce(self._host(send), host, root)
        if recv is not None:
            self._deliver(host, recv)


def transport_for(backend: Backend, comm) -> Transport:
    """The transport for arrays of `backend` between the ranks of `comm`."""
    return Transport(comm) if backend.host_buffers else StagedTransport(comm, backend)


def host_dtype(a: Array) -> np.dtype:
    """The NumPy dtype of the elements of `a`, found without looking at them."""
    return np.dtype(str(a.dtype).rpartition(".")[2])  # a library may call it "library.float32"


def _offsets(lengths: list[int]) -> list[int]:
    """Where each block starts when they lie one after another."""
    return [0, *itertools.accumulate(lengths[:-1])]
