"""The device transport under a really CUDA-aware MPI, with a stand-in for the driver.

``MM3D_CUDA_MPI`` is the folder of such an MPI (with bin/mpirun and lib/libmpi.so.40), and
``CUDA_HOME`` that of CUDA's headers.
"""
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from support import ROOT, run_command

HERE = ROOT / "tests" / "tools" / "standin"
MPI_FOLDER = os.environ.get("MM3D_CUDA_MPI", "")
HEADERS = Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")) / "include"


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """What a job needs to run on the CUDA-aware MPI, and to find the driver."""
    if not MPI_FOLDER:
        pytest.skip("no CUDA-aware MPI: set MM3D_CUDA_MPI to its folder")
    if not shutil.which("gcc"):
        pytest.skip("no gcc, for the stand-in driver")
    if not (HEADERS / "cuda.h").exists():
        pytest.skip(f"no {HEADERS}/cuda.h: set CUDA_HOME to CUDA's folder")
    folder = tmp_path_factory.mktemp("driver")
    subprocess.run(["gcc", "-shared", "-fPIC", f"-I{HEADERS}", "-o", folder / "libcuda.so.1",
                    HERE / "driver.c"], check=True)
    paths = [str(folder), f"{MPI_FOLDER}/lib", os.environ.get("LD_LIBRARY_PATH", "")]
    return {"LD_LIBRARY_PATH": os.pathsep.join(filter(None, paths)),
            **{f"{name}_PREFIX": MPI_FOLDER for name in ("OPAL", "PRTE", "PMIX")},
            "MPI4PY_MPIABI": "openmpi", "MPI4PY_LIBMPI": f"{MPI_FOLDER}/lib/libmpi.so.40",
            "PRTE_ALLOW_RUN_AS_ROOT": "1", "PRTE_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm,smcuda",
            "OMPI_MCA_coll": "^han,adapt,hcoll,ucc", "OMPI_MCA_mpi_yield_when_idle": "1",
            "PRTE_MCA_hwloc_default_binding_policy": "none", "OPENBLAS_NUM_THREADS": "1"}


@pytest.mark.parametrize("ranks", [4, 8])
@pytest.mark.limit(240)
def test_every_collective_and_every_scheme(environment, ranks):
    done = run_command([f"{MPI_FOLDER}/bin/mpirun", "-n", str(ranks), sys.executable,
                        str(HERE / "job.py")], timeout=200, **environment)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    between = int(re.search(r"bytes between processes: (\d+)", done.stdout)[1])
    assert between > 10 ** 6, "large messages go from one process' device memory to another's"
