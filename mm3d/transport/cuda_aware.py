"""Find out whether this MPI can move device arrays.

An MPI's own statement is only a hint: one that wrongly claims CUDA support crashes the program.
So a small job of its own, `mm3d.selftest`, tries it.
"""

import ctypes
import functools
import shlex
import sys
from typing import Callable

from mpi4py import MPI

from mm3d import child_process, launcher


def claims_cuda_support() -> bool | None:
    """Return whether this MPI claims to read device memory; None if it does not say."""
    for name, ask in (("MPIX_Query_cuda_support", lambda f: bool(f())),
                      ("MPIX_GPU_query_support", _ask_mpich)):
        for library in (MPI.__file__, None):
            function = getattr(ctypes.CDLL(library), name, None)
            if function is not None:
                return ask(function)
    return None


def _ask_mpich(function) -> bool:
    """Call MPICH's query for CUDA support."""
    answer = ctypes.c_int(0)
    function(ctypes.c_int(0), ctypes.byref(answer))    # 0: CUDA
    return bool(answer.value)


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
