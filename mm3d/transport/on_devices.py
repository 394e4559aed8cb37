"""Choose each rank's device, and the transport of arrays on devices.

An MPI's own statement that it reads device memory is only a hint: one that is wrong crashes the
program.  So a small job of its own, `mm3d.selftest`, tries it.
"""

import ctypes
import functools
import math
import shlex
import sys
import warnings
from typing import Callable

from mpi4py import MPI

from mm3d import child_process, launcher
from mm3d.arrays.backend import Backend
from mm3d.transport.nodes import create_node_communicator


def assign_device(comm: MPI.Intracomm, backend: Backend) -> None:
    """Let each rank have the device of its number on its node; all ranks of `comm` call it.

    Not every launcher tells that number.  Raises ValueError on every rank alike, when one has
    arrays on another device.
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
    if problem := next(filter(None, comm.allgather(problem)), ""):    # so that none goes on alone
        raise ValueError(problem)


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
    wrong = comm.bcast(find_problem() if comm.rank == 0 else None)
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


def claims_cuda_support() -> bool | None:
    """Return whether this MPI claims to read device memory; None if it does not say."""
    for library in map(ctypes.CDLL, (MPI.__file__, None)):
        if hasattr(library, "MPIX_Query_cuda_support"):
            return bool(library.MPIX_Query_cuda_support())
        if hasattr(library, "MPIX_GPU_query_support"):    # of MPICH
            answer = ctypes.c_int(0)
            library.MPIX_GPU_query_support(0, ctypes.byref(answer))    # 0: CUDA
            return bool(answer.value)
    return None


@functools.cache
def find_problem(seconds: float = 60,
                 claim: Callable[[], bool | None] = claims_cuda_support) -> str:
    """Explain why MPI cannot move device arrays here; "" if it can.

    It cannot if `claim` returns False.  Else a job of two ranks here tries it, which must end with
    status 0 within so many `seconds`.
    """
    if claim() is False:
        return "this MPI says that it does not read device memory"
    try:
        command = launcher.mpirun_command(2, sys.executable, "-m", "mm3d.selftest")
    except FileNotFoundError as error:
        return f"whether MPI reads device memory cannot be tried, as {error}"
    settings = {"MM3D_BACKEND": "cupy", "MM3D_TRANSPORT": "device"}
    variables = launcher.environment_without_launcher() | launcher.mpirun_settings() | settings
    tried = f"a job of two ranks that tries device memory by MPI, {shlex.join(command)},"
    status = child_process.run_child(command, seconds, env=variables).status
    if status is None:
        return f"{tried} did not end within {seconds:g} seconds"
    return f"{tried} ended with status {status}" if status else ""
