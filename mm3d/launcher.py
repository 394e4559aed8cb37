"""Read how a launcher started this process, and set the defaults of its environment.

Imports neither NumPy nor mpi4py: `set_defaults` must run before either of them is imported,
because BLAS libraries and MPI libraries read their variables once, when they start.
"""
from __future__ import annotations

import os
import re
import shutil
import sys
import time
import warnings
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Any

from mm3d import control_groups

# What launchers tell a rank.  One may have been started by another, which its ranks then hear of
# as well: MPI's own launchers come first, then LSF's jsrun, PALS and other launchers of PMI, and
# last Flux and Slurm.  Number of ranks on this node: MPICH's hydra and Intel MPI, Open MPI,
# MVAPICH 2 and 3, jsrun, PALS, PMI.
LOCAL_SIZE_VARIABLES = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE",
                        "MV2_COMM_WORLD_LOCAL_SIZE", "MVP_COMM_WORLD_LOCAL_SIZE",
                        "JSM_NAMESPACE_LOCAL_SIZE", "PALS_LOCAL_SIZE", "PMI_LOCAL_SIZE")

# The number of the rank on this node: the same launchers, Flux, and srun.
LOCAL_RANK_VARIABLES = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK",
                        "MV2_COMM_WORLD_LOCAL_RANK", "MVP_COMM_WORLD_LOCAL_RANK",
                        "JSM_NAMESPACE_LOCAL_RANK", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK",
                        "FLUX_TASK_LOCAL_ID", "SLURM_LOCALID")

# The rank in the job: hydra and PMI launchers, Open MPI, PMIx (srun --mpi=pmix), and the others.
RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "MV2_COMM_WORLD_RANK",
                  "MVP_COMM_WORLD_RANK", "JSM_NAMESPACE_RANK", "PALS_RANKID", "FLUX_TASK_RANK")

# Number of ranks of the job: PMI launchers, Open MPI, and the others.
SIZE_VARIABLES = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE",
                  "MVP_COMM_WORLD_SIZE", "JSM_NAMESPACE_SIZE", "FLUX_JOB_SIZE")

# Describes the emulated cluster of `bench.cluster` in which a process runs.
CLUSTER_VARIABLE = "MM3D_CLUSTER"

# Prefixes of variables that a launcher sets for its ranks; another launcher must not see them.
LAUNCHER_PREFIXES = ("PMI_", "PMIX_", "HYDRA_", "HYDI_", "OMPI_", "PRTE_", "MPI_LOCAL",
                     "MV2_COMM_WORLD_", "MVP_COMM_WORLD_", "JSM_NAMESPACE_", "PALS_", "FLUX_TASK_",
                     "FLUX_JOB_")

# Set by Open MPI for its ranks, in the form of a user's settings; a user's own stay.
RANK_SETTINGS = ("OMPI_MCA_ess", "OMPI_MCA_orte_app", "OMPI_MCA_orte_ess", "OMPI_MCA_orte_hnp",
                 "OMPI_MCA_orte_job", "OMPI_MCA_orte_launch", "OMPI_MCA_orte_local_daemon",
                 "OMPI_MCA_orte_top", "OMPI_MCA_pmix")

# By which srun tells its tasks how many there are; a batch script does not have it.
STEP_TASKS = "SLURM_STEP_TASKS_PER_NODE"

# Prefixes of variables that Slurm sets for a job.  An mpirun that finds them starts its ranks by
# srun, which, from within a step, waits for the cores that the step itself holds.
SLURM_PREFIXES = ("SLURM_", "SLURMD_", "SRUN_")
FIRST_SPECIAL_STEP = 0xfffffff0    # step ids from here on are no srun: batch script, salloc
PAUSE = 0.02    # seconds between two looks of a rank that waits: few, as others are measured

BLAS_THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS",
                         "OMP_NUM_THREADS")

KERNELS_VARIABLE = "OPENBLAS_CORETYPE"
PROCESSORS = Path("/proc/cpuinfo")    # of Linux
HEAD_BYTES = 8192                     # in which the first processor is described

# Ranks that share a core must yield it while they wait; both libraries spin by default.
YIELD_SETTINGS = {
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",    # MPICH
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",    # Open MPI
}

# Open MPI refuses to run as root, or more ranks than cores, without these; MPICH needs none.
PERMISSIONS = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",    # Open MPI 5
    "OMPI_MCA_rmaps_base_oversubscribe": "1",                     # Open MPI 4
}


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of MPI ranks on this node, by the launcher; 1 without a launcher."""
    if told := _first_number(LOCAL_SIZE_VARIABLES, environ):
        return told
    # Some launchers set only the size of the world: exact on one node, an upper bound on several.
    size = _first_number(SIZE_VARIABLES, environ)
    nodes = _first_number(["FLUX_JOB_NNODES"], environ)
    if size and nodes and "FLUX_TASK_LOCAL_ID" in environ:
        return -(-size // nodes)    # Flux spreads them evenly
    if STEP_TASKS in environ:
        counts = _expand_counts(environ[STEP_TASKS])
        node = _first_number(["SLURM_NODEID"], environ) or 0
        return max(1, counts[node] if node < len(counts) else max(counts, default=1))
    return size or 1


def ranks_on_these_cores(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of ranks that share the cores of this machine, by the launcher.

    They are the ranks of this node, and in an emulated cluster the ranks of all its nodes.
    """
    local = local_ranks(environ)
    if CLUSTER_VARIABLE not in environ:
        return local
    return max(local, _first_number(SIZE_VARIABLES, environ) or 0)


def local_rank(environ: Mapping[str, str] = os.environ) -> int | None:
    """Return the number of this process' rank on its node; None if no launcher says it."""
    return _first_number(LOCAL_RANK_VARIABLES, environ)


def has_launched(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher has started this process as a rank, alone or among others."""
    return local_ranks(environ) > 1 or _first_number(RANK_VARIABLES, environ) is not None


def launcher_rank(environ: Mapping[str, str] = os.environ) -> int:
    """Return this process' rank according to the launcher; 0 without a launcher.

    It differs from process to process even where each is alone in its world, because its MPI is
    not the launcher's.  srun without an MPI (``--mpi=none``) tells its tasks nothing else than
    their numbers.
    """
    names = [*RANK_VARIABLES, *["SLURM_PROCID"] * in_slurm_step(environ)]
    return _first_number(names, environ) or 0


def in_slurm_step(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether srun has started this process as a task of a Slurm job."""
    step = _first_number(["SLURM_STEP_ID"], environ)
    return step is not None and step < FIRST_SPECIAL_STEP


def makes_a_rank(name: str) -> bool:
    """Return whether a launcher makes a process a rank by the variable `name`.

    A user's settings of MPI do not, nor what else Slurm tells a job.
    """
    if name.startswith(RANK_SETTINGS) or name == STEP_TASKS:
        return True
    return (name.startswith(LAUNCHER_PREFIXES) and "_MCA_" not in name
            and name not in PERMISSIONS)


def environment_without_launcher(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment in which a rank starts another launcher on this node.

    The user's settings of MPI stay; variables that make this process a rank, or part of a Slurm
    job, are left out.
    """
    return {name: value for name, value in environ.items() if not is_launchers(name)}


def is_launchers(name: str) -> bool:
    """Return whether a launcher, or Slurm, sets this variable itself for its ranks."""
    return makes_a_rank(name) or name.startswith(SLURM_PREFIXES)


def environment_to_start(command: list[str],
                         environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment in which a process that is no rank starts the launcher `command`.

    Within a step of Slurm an ``mpirun`` must not see Slurm's variables, and starts its ranks on
    this node; elsewhere it may use all nodes of the job.
    """
    own = dict(environ)
    if in_slurm_step(environ) and os.path.basename(command[0]).startswith(("mpirun", "mpiexec")):
        own = {name: value for name, value in own.items() if not name.startswith(SLURM_PREFIXES)}
    return own | mpirun_settings(environ)


def mpirun_settings(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that let an ``mpirun`` run as root and with more ranks than cores.

    Variables that the user has set are left out.
    """
    return {name: value for name, value in PERMISSIONS.items() if name not in environ}


def mpirun_command(ranks: int, *argv: str) -> list[str]:
    """Return the command line that runs `argv` on a number of ranks, for `subprocess.run`.

    `argv` is the program and its arguments, the interpreter included.  The ``mpirun`` beside this
    interpreter goes before one on PATH, as it belongs to the MPI library that mpi4py finds in the
    same environment; an emulated cluster uses the one on PATH.  Raises FileNotFoundError when
    there is none.
    """
    beside = os.path.dirname(sys.executable)
    mpirun = None if CLUSTER_VARIABLE in os.environ else shutil.which("mpirun", path=beside)
    mpirun = mpirun or shutil.which("mpirun")
    if mpirun is None:
        raise FileNotFoundError(f"there is no mpirun in {beside} nor on PATH: install an MPI "
                                "library, for example with: pip install mpich")
    return [mpirun, "-n", str(ranks), *argv]


def check_launcher(size: int | None) -> None:
    """Refuse a world of one rank where the launcher has started more than one.

    The world has `size` ranks; None checks nothing.  Raises ValueError when the launcher and
    mpi4py belong to different MPI libraries.
    """
    if size == 1 and local_ranks() > 1:
        raise ValueError(f"the launcher started {local_ranks()} ranks, each alone in its world: "
                         "mpirun and mpi4py belong to different MPI libraries; use the mpirun of "
                         "the MPI that this Python's mpi4py loads")


def cores(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of cores that the ranks on this node may use together, at least one.

    They are `allowed_cores`, but no more whole ones than the quota of the control groups.
    """
    return _within_quota(allowed_cores(environ))


def allowed_cores(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of cores on which the ranks on this node may run.

    A launcher may bind each rank to some of its own cores.  The ranks then share the cores of the
    launcher, which is the parent process, within Slurm's allocation.
    """
    available = _allowed_cores(0)
    if local_ranks(environ) > 1:
        available = available | _allowed_cores(os.getppid())
    return min(len(available),
               _first_number(["SLURM_CPUS_ON_NODE"], environ) or len(available))


def process_cores() -> int:
    """Return the number of cores that this process alone may use, at least one."""
    return _within_quota(len(_allowed_cores(0)))


def oversubscribed(environ: Mapping[str, str] = os.environ) -> bool:
    """Return whether this machine has more ranks than cores for them."""
    return ranks_on_these_cores(environ) > cores(environ)


def wait_patiently(comm: Any) -> None:
    """Wait at a barrier without keeping a core busy: a rank may be late by minutes."""
    request = comm.Ibarrier()
    while not request.Test():
        time.sleep(PAUSE)


def blas_threads(environ: Mapping[str, str] = os.environ) -> int:
    """Return the number of BLAS threads of each rank: its share of the cores, at least one."""
    return max(1, min(process_cores(), cores(environ) // ranks_on_these_cores(environ)))


def set_defaults(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set the variables with which many ranks can share a node; return those set, by name.

    Limits the threads of each BLAS when there is more than one rank on the node, or a quota; makes
    MPI yield while it waits when there are more ranks than cores.  Variables that the user has set
    in `environ` stay as they are.  Warns with RuntimeWarning, on rank 0, when MPI has been
    imported already, so that it will spin instead of yielding.
    """
    chosen: dict[str, str] = {}
    # Every BLAS here obeys OMP_NUM_THREADS unless its own variable is set, so a user who has set
    # it has decided for all of them.
    threads = blas_threads(environ)
    several = ranks_on_these_cores(environ) > 1
    if (several or threads < len(_allowed_cores(0))) and "OMP_NUM_THREADS" not in environ:
        if "numpy" in sys.modules and not any(name in environ for name in BLAS_THREAD_VARIABLES):
            import threadpoolctl    # NumPy's BLAS is loaded and has read its variables
            threadpoolctl.threadpool_limits(threads, user_api="blas")
        chosen.update(dict.fromkeys(BLAS_THREAD_VARIABLES, str(threads)))
    if oversubscribed(environ):
        chosen.update(YIELD_SETTINGS)
        if ("mpi4py.MPI" in sys.modules and not YIELD_SETTINGS.keys() & environ.keys()
                and launcher_rank(environ) == 0):
            warnings.warn(f"{ranks_on_these_cores(environ)} ranks share {cores(environ)} cores, "
                          "and mm3d was imported after mpi4py.MPI, too late to make MPI yield "
                          "while it waits: import mm3d first", RuntimeWarning, stacklevel=3)
    chosen = {name: value for name, value in chosen.items() if name not in environ}
    environ.update(chosen)
    return chosen


def set_kernels(environ: MutableMapping[str, str] = os.environ,
                processors: Path = PROCESSORS) -> None:
    """Set OpenBLAS' variable in `environ` to `fastest_kernels`, unless the user has set it.

    Too late once NumPy has started OpenBLAS, which then keeps its own choice.
    """
    if "numpy" not in sys.modules and (kernels := fastest_kernels(processors)):
        environ.setdefault(KERNELS_VARIABLE, kernels)


def fastest_kernels(processors: Path = PROCESSORS) -> str | None:
    """Return the kernels that OpenBLAS should use here; None where it chooses the fastest itself.

    On every processor with AVX-512 it uses kernels of 512 bits.  Zen 4 (the only one of family 25
    with AVX-512) executes such instructions in halves of 256 bits.  There the products of a GPT of
    512 features, 1024 rows, take 1.03 (one process) to 1.08 times as long (two) in float32 as with
    kernels of 256 bits (OpenBLAS 0.3.31), and as long in float64.  `processors` describes them as
    Linux does.
    """
    try:
        with processors.open("rb") as file:
            head = file.read(HEAD_BYTES).decode("ascii", "replace").partition("\n\n")[0]
    except OSError:
        return None
    found = {name.strip(): value.strip() for name, _, value in
             (line.partition(":") for line in head.splitlines())}
    zen4 = (found.get("vendor_id") == "AuthenticAMD" and found.get("cpu family") == "25"
            and "avx512f" in found.get("flags", "").split())
    return "Haswell" if zen4 else None


def _first_number(names: Iterable[str], environ: Mapping[str, str]) -> int | None:
    """Return the value of the first of these variables that is a number; None if none is."""
    return next((int(environ[name]) for name in names
                 if re.fullmatch("[0-9]+", environ.get(name, ""))), None)


def _within_quota(count: int) -> int:
    quota = control_groups.cpu_quota()
    return count if quota is None else max(1, min(count, int(quota)))


def _allowed_cores(process: int) -> set[int]:
    """Return the cores that a process may run on (0: this one)."""
    try:
        return os.sched_getaffinity(process)
    except AttributeError:          # macOS
        return set(range(os.cpu_count() or 1))
    except OSError:                 # the launcher belongs to another user, or has ended
        return set()


def _expand_counts(counts: str) -> list[int]:
    """Convert Slurm's "4(x2),3" to [4, 4, 3]."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in pairs for _ in range(int(times or 1))]
