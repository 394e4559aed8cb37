"""Whether the MPI here moves device arrays.

What an MPI says of itself is a hint.  One that claims to read device memory and does not ends a
program that believes it, so the question is put to a small job of its own, `mm3d.selftest`.
"""

import ctypes
import functools
import os
import signal
import subprocess
import sys

from mpi4py import MPI

from mm3d import environment


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
def cuda_aware(seconds: float = 60) -> bool:
    """Whether a job of two ranks, started here, moves device arrays by MPI and ends in time."""
    if claimed() is False:
        return False
    try:
        command = environment.mpirun_command(2, sys.executable, "-m", "mm3d.selftest")
    except FileNotFoundError:
        return False
    settings = {"MM3D_BACKEND": "cupy", "MM3D_TRANSPORT": "device"}
    job = subprocess.Popen(command, env=environment.without_launcher() | settings,
                           stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                           stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        return job.wait(seconds) == 0
    except subprocess.TimeoutExpired:
        os.killpg(job.pid, signal.SIGKILL)
        job.wait()
        return False
