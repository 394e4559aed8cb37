"""Whether the MPI here moves device arrays.

What an MPI says of itself is a hint.  One that claims to read device memory and does not ends a
program that believes it, so the question is put to a small job of its own, `mm3d.selftest`.
"""

import ctypes
import functools
import os
import shlex
import signal
import subprocess
import sys

from mpi4py import MPI

from mm3d import launcher


def claimed() -> bool | None:
    """What the MPI says of itself: whether it reads device memory; None if it does not say."""
    for name, ask in (("MPIX_Query_cuda_support", lambda f: bool(f())),
                      ("MPIX_GPU_query_support", _mpich_claims)):
        for library in (MPI.__file__, None):
            function = getattr(ctypes.CDLL(library), name, None)
            if function is not None:
                return ask(function)
    return None


def _mpich_claims(function) -> bool:
    answer = ctypes.c_int(0)
    function(ctypes.c_int(0), ctypes.byref(answer))    # 0: CUDA
    return bool(answer.value)


@functools.cache
def problem(seconds: float = 60) -> str:
    """Why MPI cannot carry device arrays here; empty when it can.

    A job of two ranks, started on this node, tries: it must end in time and with status 0.
    """
    if claimed() is False:
        return "this MPI says that it does not read device memory"
    try:
        command = launcher.mpirun_command(2, sys.executable, "-m", "mm3d.selftest")
    except FileNotFoundError as error:
        return f"whether MPI reads device memory cannot be tried, as {error}"
    settings = {"MM3D_BACKEND": "cupy", "MM3D_TRANSPORT": "device"}
    variables = launcher.without_launcher() | launcher.launcher_environment() | settings
    job = subprocess.Popen(command, env=variables, start_new_session=True,
                           stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL)
    tried = f"a job of two ranks that tries device memory by MPI, {shlex.join(command)},"
    try:
        status = job.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        return f"{tried} did not end within {seconds:g} seconds"
    return f"{tried} ended with status {status}" if status else ""
