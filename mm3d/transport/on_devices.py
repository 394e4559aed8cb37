"""Choose each rank's device, and the transport of arrays on devices."""

import math
import warnings

from mpi4py import MPI

from mm3d.arrays.backend import Backend
from mm3d.transport import cuda_aware
from mm3d.transport.nodes import create_node_communicator


def assign_device(comm: MPI.Intracomm, backend: Backend) -> None:
    """Let each rank have the device of its number on its node; all ranks of `comm` call it.

    Before MPI starts only the launcher can tell that number, and not every launcher does.  Raises
    ValueError on every rank alike, when one has arrays on another device.
    """
    node = create_node_communicator(comm)
    number = node.rank
    node.Free()
    counted = math.inf if comm.size == MPI.COMM_WORLD.size else comm.size
    problem = ""
    try:
        backend.choose_device(number, counted)
    except ValueError as error:
        problem = f"rank {comm.rank}: {error}"
    problems = list(filter(None, comm.allgather(problem)))    # so that no rank goes on alone
    if problems:
        raise ValueError(problems[0])


def prove_transport(comm: MPI.Intracomm, backend: Backend, wanted: str) -> str:
    """Return the transport that is `wanted`, or the first that is proven to work; all call it.

    NCCL is chosen if it is installed and every rank has a GPU to itself, else a CUDA-aware MPI
    ("device") if a small separate job shows that it works, else copies in host memory ("staged").
    Raises ValueError when NCCL is wanted and cannot serve these ranks.
    """
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
    wrong = comm.bcast(cuda_aware.find_problem() if comm.rank == 0 else None)
    if wrong and comm.rank == 0:
        warnings.warn(f"arrays travel through copies in host memory (MM3D_TRANSPORT=staged): "
                      f"{problem}; {wrong}", RuntimeWarning, stacklevel=3)
    return "staged" if wrong else "device"


def _nccl_problem(devices: list, installed: list[bool]) -> str:
    """Explain why NCCL cannot serve ranks on these devices; "" if it can."""
    if not all(installed):
        return f"{installed.count(False)} of {len(installed)} ranks have no NCCL"
    gpus = len(set(devices))
    if None in devices or gpus < len(devices):
        return f"NCCL needs a GPU for each rank, and {len(devices)} ranks have {gpus}"
    return ""
