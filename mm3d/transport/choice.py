"""Choose the transport of a grid's arrays: the user's, or one that is proven to work here."""

import functools
import os
import warnings
from importlib import import_module
from typing import Mapping

from mpi4py import MPI

from mm3d.arrays.backend import Backend
from mm3d.transport.communicators import DryCommunicator
from mm3d.transport.mpi import MpiTransport
from mm3d.transport.nodes import can_share_memory, node_size, nodes_of_line

# The file and the class of each transport, by its name; imported when it is chosen.
TRANSPORTS = {
    "mpi": "mpi.MpiTransport", "shared": "shared_memory.SharedTransport",
    "hierarchical": "hierarchical.HierarchicalTransport", "chain": "chain.ChainTransport",
    "ordered": "ordered.OrderedTransport", "silent": "silent.SilentTransport",
    "device": "device.DeviceTransport", "staged": "device.StagedTransport",
    "nccl": "nccl.NcclTransport"}
HOST_TRANSPORTS = ("mpi", "shared", "hierarchical")
DEVICE_TRANSPORTS = ("device", "staged", "nccl")
IN_NODES = ("shared", "hierarchical")    # lines inside a node share memory
LEAST_NODES = 3    # of a chain; between two nodes MPI's tree is a chain


def transport_class(name: str) -> type[MpiTransport]:
    """Return the class of the transport called `name`."""
    file, _, kind = TRANSPORTS[name].partition(".")
    return getattr(import_module(f"mm3d.transport.{file}"), kind)


def choose_transport(comm: MPI.Intracomm | DryCommunicator, backend: Backend) -> str:
    """Choose the transport for arrays of `backend` on all lines of a grid of `comm`.

    ``MM3D_TRANSPORT`` decides if it is set: ``mpi``, ``shared`` or ``hierarchical`` for arrays in
    host memory, ``nccl``, ``device`` (a CUDA-aware MPI) or ``staged`` for arrays on a device.
    Otherwise arrays in host memory are shared by the ranks of one node, see
    `create_transports`.  For arrays on a device NCCL is chosen if it is
    installed and every rank has a GPU to itself, else a CUDA-aware MPI if a small separate job
    shows that it works, else copies in host memory.  All ranks of `comm` must call this, and get
    the same name; "none" where one rank is alone.

    Raises
    ------
    ValueError
        When the setting does not carry such arrays, or ``MM3D_NODE_SIZE`` is no positive integer.
    """
    wanted = os.environ.get("MM3D_TRANSPORT", "")
    known = HOST_TRANSPORTS if backend.host_buffers else DEVICE_TRANSPORTS
    single = isinstance(comm, DryCommunicator) or comm.size == 1
    if wanted and wanted not in (known if not single else (*HOST_TRANSPORTS, *DEVICE_TRANSPORTS)):
        raise ValueError(f"MM3D_TRANSPORT={wanted!r} is unknown for arrays of backend "
                         f"{backend.name!r}: choose {', '.join(known[:-1])} or {known[-1]}")
    if single:
        return "none"
    node_size()    # raises its error first, the same on every rank
    if backend.host_buffers:
        return wanted or "hierarchical"
    if wanted and wanted != "nccl":
        return wanted
    devices = comm.allgather(backend.device_location())
    problem = _nccl_problem(devices, comm.allgather(backend.nccl is not None))
    if wanted and problem:
        raise ValueError(f"MM3D_TRANSPORT=nccl: {problem}; choose device or staged")
    if not problem:
        return "nccl"
    if None in devices:
        return "staged"
    wrong = comm.bcast(transport_class("device").find_problem() if comm.rank == 0 else None)
    if wrong and comm.rank == 0:
        warnings.warn(f"arrays travel through copies in host memory (MM3D_TRANSPORT=staged): "
                      f"{problem}; {wrong}", RuntimeWarning, stacklevel=2)
    return "staged" if wrong else "device"


@functools.cache
def in_place_collectives(names: str) -> frozenset[str]:
    """Return the collectives whose results each of these transports leaves in place.

    `names` are one or more transports, such as "shared" or "mpi shared"; see
    `mm3d.transport.mpi.MpiTransport.in_place`.
    """
    kinds = [transport_class(name).in_place if name in TRANSPORTS else frozenset()
             for name in names.split()]
    return frozenset.intersection(*kinds) if kinds else frozenset()


def describe_moved_words(name: str) -> str:
    """Describe how the words that a transport moves differ from those counted; "" if unknown."""
    return transport_class(name).note if name in TRANSPORTS else ""


def _nccl_problem(devices: list, installed: list[bool]) -> str:
    """Explain why NCCL cannot serve ranks on these devices; "" if it can."""
    if not all(installed):
        return f"{installed.count(False)} of {len(installed)} ranks have no NCCL"
    gpus = len(set(devices))
    if None in devices or gpus < len(devices):
        return f"NCCL needs a GPU for each rank, and {len(devices)} ranks have {gpus}"
    return ""


def create_transports(comm: MPI.Intracomm | DryCommunicator,
                      lines: Mapping[str, MPI.Intracomm | DryCommunicator],
                      backend: Backend, kind: str, node: int = 0,
                      ordered: bool = False) -> dict[str, MpiTransport]:
    """Create the transport named by `choose_transport` along each of a grid's directions.

    Ranks of different nodes, as `mm3d.transport.nodes.node_of` numbers them, share no memory.
    They use "hierarchical" where that is set, or where nothing is set and a node has several of
    them; "chain" where nothing is set and they are on three or more nodes, each alone; else MPI.
    Ranks that may not open each other's memory use MPI, unless sharing is set explicitly.  Each
    line decides by itself: all its ranks fail alike, and its collectives concern no other line.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm or DryCommunicator
        All ranks of the grid, which all call this.
    lines : mapping of str to communicator
        For each direction the ranks on this rank's line.
    backend : Backend
        The backend of the arrays.
    kind : str
        The name that `choose_transport` returned.
    node : int
        This rank's node.
    ordered : bool
        Whether arrays in host memory must be summed in the order of the ranks: by
        "shared" inside a node, and else by "ordered".

    Raises
    ------
    OSError
        On every rank of `comm` alike, when ranks of one line may not share memory, and
        ``MM3D_TRANSPORT`` is set to share it.
    """
    found, problem = {}, ""
    for name, line in lines.items():
        try:
            found[name] = _create_transport(line, backend, kind, node, ordered)
        except OSError as error:
            if kind not in IN_NODES:
                raise
            found[name] = transport_class("ordered" if ordered else "mpi")(line, backend)
            problem = str(error)
    if kind in IN_NODES and os.environ.get("MM3D_TRANSPORT"):
        # Ranks of other lines may have no problem, but would wait for the ranks of this line.
        problem = next(filter(None, comm.allgather(problem)), "")
        if problem:
            raise OSError(problem)
    return found


def _create_transport(line: MPI.Intracomm | DryCommunicator, backend: Backend, kind: str,
                      node: int, ordered: bool) -> MpiTransport:
    """Create the transport between the ranks of one line; each calls it."""
    if isinstance(line, DryCommunicator):
        return transport_class("silent")(line, backend, ordered)
    if kind in DEVICE_TRANSPORTS and line.size > 1:
        return transport_class(kind)(line, backend)
    if kind in IN_NODES and line.size > 1 and can_share_memory():
        nodes = nodes_of_line(line, node)
        number = len(set(nodes))
        if number == 1:
            return transport_class("shared")(line, backend)
        several = number < line.size or os.environ.get("MM3D_TRANSPORT")
        if kind == "hierarchical" and several and not ordered:
            return transport_class("hierarchical")(line, backend, nodes)
        if kind == "hierarchical" and number >= LEAST_NODES and not ordered:
            return transport_class("chain")(line, backend)
    return transport_class("ordered" if ordered else "mpi")(line, backend)
