"""Choose the transport of a grid's arrays: the user's, or one that is proven to work here.

Each *line*, the ranks along one direction, has the first transport of this list that fits:

- `silent` in a dry run, for ranks that do not exist
- `nccl`, `device`, `staged`: arrays on a device; what ``MM3D_TRANSPORT`` names, or works first
- `shared`: all ranks of the line are on one node
- `ordered`: terms must be added in the order of the ranks; data parallelism wants this, so that an
  element has the same bits in whatever array it is summed
- `hierarchical`: some ranks of the line share a node, others do not
- `chain`: each rank is on a node of its own, on three or more nodes
- `mpi`: the line has one rank, or one rank on each of two nodes

``MM3D_TRANSPORT=mpi`` rules out `shared`, `hierarchical` and `chain`, and so does a system other
than Linux on x86-64; ``shared`` rules out the latter two; ``hierarchical`` takes the place of
`chain` and, between two nodes, of `mpi`.
"""

import os
import platform
import sys
from importlib import import_module
from typing import Mapping

from mpi4py import MPI

from mm3d.arrays.backend import Backend, setting
from mm3d.transport.communicators import DryCommunicator
from mm3d.transport.mpi import MpiTransport
from mm3d.transport.nodes import emulated_node_size, gather_nodes

# The file and the class of each transport, by its name; imported when it is chosen.
TRANSPORTS = {
    "mpi": "mpi.MpiTransport", "shared": "shared_memory.SharedTransport",
    "hierarchical": "hierarchical.HierarchicalTransport", "chain": "lanes.ChainTransport",
    "ordered": "ordered.OrderedTransport", "silent": "silent.SilentTransport",
    "device": "device.DeviceTransport", "staged": "device.StagedTransport",
    "nccl": "nccl.NcclTransport"}
HOST_TRANSPORTS = ("mpi", "shared", "hierarchical")    # values of MM3D_TRANSPORT
DEVICE_TRANSPORTS = ("device", "staged", "nccl")
IN_NODES = ("shared", "hierarchical")    # kinds with which lines inside a node share memory
LEAST_NODES = 3    # of a chain; between two nodes MPI's tree is a chain


def choose_transport(comm: MPI.Intracomm | DryCommunicator, backend: Backend) -> str:
    """Choose the kind of transport for arrays of `backend` on a grid of `comm`, before its lines.

    It is what ``MM3D_TRANSPORT`` names; without it "hierarchical" for arrays in host memory, with
    which each line gets what suits it.  It is "none" where one rank is alone.  All ranks call
    this, and get the same name.  Raises ValueError when the setting does not carry such arrays, or
    ``MM3D_NODE_SIZE`` is no positive integer.
    """
    known, others = HOST_TRANSPORTS, DEVICE_TRANSPORTS
    if not backend.host_buffers:
        known, others = others, known
    alone = isinstance(comm, DryCommunicator) or comm.size == 1
    if alone and os.environ.get("MM3D_TRANSPORT") in others:
        return "none"
    wanted = setting("MM3D_TRANSPORT", known, f" for arrays of backend {backend.name!r}")
    if alone:
        return "none"
    emulated_node_size()    # raises its error first, the same on every rank
    if backend.host_buffers:
        return wanted or "hierarchical"
    return import_module("mm3d.transport.on_devices").prove_transport(comm, backend, wanted)


def choose_device(comm: MPI.Intracomm, backend: Backend) -> None:
    """Let each rank have the device of its number on its node; all ranks of `comm` call it."""
    if backend.has_device:
        import_module("mm3d.transport.on_devices").assign_device(comm, backend)


def create_transports(comm: MPI.Intracomm | DryCommunicator,
                      lines: Mapping[str, MPI.Intracomm | DryCommunicator],
                      backend: Backend, kind: str, node: int = 0,
                      ordered: bool = False) -> dict[str, MpiTransport]:
    """Create the transport of each of a grid's lines, by the rule of this module.

    All ranks of the grid, `comm`, call this; `lines` has the ranks on this rank's line in each
    direction, `kind` is what `choose_transport` returned, and `node` is this rank's, from
    `mm3d.transport.nodes.own_node`.  `ordered` says whether arrays in host memory must be summed
    in the order of the ranks.  Ranks that may not open each other's memory use MPI; with
    ``MM3D_TRANSPORT`` set to share it, OSError is raised on every rank of `comm` alike.
    """
    found, problem = {}, ""
    for name, line in lines.items():
        try:
            found[name] = _create_transport(line, backend, kind, node, ordered)
        except OSError as error:
            if kind not in IN_NODES:
                raise
            found[name] = _create_transport(line, backend, "mpi", node, ordered)
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
    if line.size > 1 and kind in DEVICE_TRANSPORTS:
        return transport_class(kind)(line, backend)
    name = "ordered" if ordered else "mpi"
    if line.size > 1 and kind in IN_NODES and _can_share_memory():
        nodes, wanted = gather_nodes(line, node), os.environ.get("MM3D_TRANSPORT")
        count = len(set(nodes))
        if count == 1:
            name = "shared"
        elif not ordered and (wanted == "hierarchical" or not wanted and count < len(nodes)):
            return transport_class("hierarchical")(line, backend, nodes)
        elif not ordered and not wanted and count >= LEAST_NODES:
            name = "chain"
    return transport_class(name)(line, backend)


def _can_share_memory() -> bool:
    """Return whether this system has what `mm3d.transport.segments` needs."""
    return (sys.platform == "linux" and platform.machine() == "x86_64"
            and hasattr(os, "memfd_create"))


def transport_class(name: str) -> type[MpiTransport]:
    """Return the class of the transport called `name`."""
    file, _, kind = TRANSPORTS[name].partition(".")
    return getattr(import_module(f"mm3d.transport.{file}"), kind)
