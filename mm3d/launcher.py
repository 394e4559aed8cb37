"""What the process environment says about the launch, and the defaults it deserves.

Imports neither NumPy nor mpi4py: `set_defaults` must run before either of them does, because
BLAS libraries and MPI libraries read their variables once, when they start.
"""
from __future__ import annotations

import os
import re
import shutil
import sys
import time
import traceback
import warnings
from collections.abc import Mapping, MutableMapping

# Ranks that the launcher started on this node: MPICH's hydra and Intel MPI, Open MPI, MVAPICH.
LOCAL_RANKS = ("MPI_LOCALNRANKS", "OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE")

# The rank among those of this node: the same launchers, and srun.
LOCAL_RANK = ("MPI_LOCALRANKID", "OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK",
              "SLURM_LOCALID")

# Beginnings of what a launcher tells its ranks, which must not reach those of another launcher.
LAUNCHER = ("PMI_", "PMIX_", "HYDRA_", "HYDI_", "OMPI_", "PRTE_", "MPI_LOCAL")

# Beginnings of what Slurm tells a job.  An mpirun that finds it starts its ranks by srun, which,
# from within a step, waits for the cores of that step itself.
SLURM = ("SLURM_", "SLURMD_", "SRUN_")
SPECIAL_STEPS = 0xfffffff0    # from here on the numbers of a job's script and of its prompt

# The rank in the job: hydra and PMI launchers, Open MPI, PMIx (srun --mpi=pmix).
RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")

BLAS_THREADS = ("OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS", "OMP_NUM_THREADS")

# Ranks that share a core must give it up while they wait; both libraries spin by default.
YIELD = {
    "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",    # MPICH
    "MPIR_CVAR_ENABLE_HEAVY_YIELD": "1",
    "OMPI_MCA_mpi_yield_when_idle": "1",    # Open MPI
}

# Open MPI refuses to run as root, or more ranks than cores, unless told; MPICH does both.
PERMIT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",    # Open MPI 5
    "OMPI_MCA_rmaps_base_oversubscribe": "1",                     # Open MPI 4
}


def local_ranks(environ: Mapping[str, str] = os.environ) -> int:
    """Number of MPI ranks on this node according to the launcher; 1 when there was none."""
    for name in LOCAL_RANKS:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    # srun sets this for the tasks of a step; a batch script, which is no rank, does not have it.
    if "SLURM_STEP_TASKS_PER_NODE" in environ:
        counts = _expand(environ["SLURM_STEP_TASKS_PER_NODE"])
        node = int(environ.get("SLURM_NODEID", 0))
        return counts[node] if node < len(counts) else max(counts, default=1)
    # Some launchers tell only the size of the world: exact on one node, an upper bound on several.
    size = environ.get("PMI_SIZE", "")
    return int(size) if size.isdigit() else 1


def local_rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process' rank among those of its node; 0 when there was no launcher."""
    for name in LOCAL_RANK:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return 0


def without_launcher(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment for starting another launcher on this node, from a rank.

    Settings of MPI stay; what makes this process a rank, or part of a job of Slurm, does not.
    """
    return {name: value for name, value in environ.items()
            if not name.startswith(LAUNCHER + SLURM) or "_MCA_" in name or name in PERMIT}


def in_step(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a task that srun has started, within a job of Slurm."""
    step = environ.get("SLURM_STEP_ID", "")
    return step.isdigit() and int(step) < SPECIAL_STEPS


def for_launcher(command: list[str], environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment in which a process that is no rank starts the launcher `command`.

    Within a step of Slurm an ``mpirun`` must know nothing of it, and starts its ranks on this
    node; elsewhere it may use all nodes of the job.
    """
    mine = dict(environ)
    if in_step(environ) and os.path.basename(command[0]).startswith(("mpirun", "mpiexec")):
        mine = {name: value for name, value in mine.items() if not name.startswith(SLURM)}
    return mine | launcher_environment(environ)


def cores(environ: Mapping[str, str] = os.environ) -> int:
    """Number of cores that the ranks on this node may use together.

    A launcher may bind each rank to a part of its cores. What they share is then what the
    launcher itself, the parent process, may use, within what Slurm has allocated.
    """
    available = _affinity(0)
    if local_ranks(environ) > 1:
        available = available | _affinity(os.getppid())
    allocated = environ.get("SLURM_CPUS_ON_NODE", "")
    return min(len(available), int(allocated)) if allocated.isdigit() else len(available)


def launcher_rank(environ: Mapping[str, str] = os.environ) -> int:
    """This process' rank according to the launcher; 0 when there was none.

    Unlike the rank in the world, it tells processes apart whose MPI is not the launcher's.
    """
    for name in RANK:
        if environ.get(name, "").isdigit():
            return int(environ[name])
    return 0


def check_launcher(size: int | None) -> None:
    """Refuse a world of one rank where the launcher has started more than one.

    Parameters
    ----------
    size : int or None
        Ranks of the world; None to check nothing.

    Raises
    ------
    ValueError
        When the launcher and mpi4py belong to different MPI libraries.
    """
    if size == 1 and local_ranks() > 1:
        raise ValueError(f"the launcher started {local_ranks()} ranks, each alone in its world: "
                         "mpirun and mpi4py belong to different MPI libraries; use the mpirun of "
                         "the MPI that this Python's mpi4py loads")


def oversubscribed(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether more ranks than cores share this node."""
    return local_ranks(environ) > cores(environ)


def blas_threads(environ: Mapping[str, str] = os.environ) -> int:
    """BLAS threads that each rank gets: its share of the node's cores, at least one."""
    share = cores(environ) // local_ranks(environ)
    return max(1, min(len(_affinity(0)), share))


def set_defaults(environ: MutableMapping[str, str] = os.environ) -> dict[str, str]:
    """Set what lets many ranks share a node; variables that the user has set stay as they are.

    Caps the threads of each BLAS when there is more than one rank on the node, and makes MPI
    yield while it waits when there are more ranks than cores.

    Parameters
    ----------
    environ : mutable mapping, default os.environ
        The environment to change.

    Returns
    -------
    dict
        The variables that were set and their values.

    Warns
    -----
    RuntimeWarning
        When MPI has been imported already, so that it will spin instead of yielding (rank 0).
    """
    chosen: dict[str, str] = {}
    # Every BLAS here obeys OMP_NUM_THREADS unless its own variable is set: a user who has set
    # that one has spoken for all of them.
    if local_ranks(environ) > 1 and "OMP_NUM_THREADS" not in environ:
        threads = blas_threads(environ)
        if "numpy" in sys.modules and not any(name in environ for name in BLAS_THREADS):
            import threadpoolctl    # NumPy's BLAS is loaded and has read its variables
            threadpoolctl.threadpool_limits(threads, user_api="blas")
        chosen.update(dict.fromkeys(BLAS_THREADS, str(threads)))
    if oversubscribed(environ):
        chosen.update(YIELD)
        if ("mpi4py.MPI" in sys.modules and not YIELD.keys() & environ.keys()
                and launcher_rank(environ) == 0):
            warnings.warn(f"{local_ranks(environ)} ranks share {cores(environ)} cores, and mm3d "
                          "was imported after mpi4py.MPI, too late to make MPI yield while it "
                          "waits: import mm3d first", RuntimeWarning, stacklevel=3)
    chosen = {name: value for name, value in chosen.items() if name not in environ}
    environ.update(chosen)
    return chosen


def launcher_environment(environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Variables to add for an `mpirun` started from Python, so that it runs as root and with more
    ranks than cores; without those that the user has set."""
    return {name: value for name, value in PERMIT.items() if name not in environ}


def mpirun_command(ranks: int, *argv: str) -> list[str]:
    """The command line that runs `argv` on a number of ranks.

    Parameters
    ----------
    ranks : int
        Number of ranks.
    *argv : str
        The program and its arguments, the interpreter included: `sys.executable, "-m", ...`.

    Returns
    -------
    list of str
        For `subprocess.run`. The `mpirun` beside this interpreter goes before those on PATH, as
        it belongs to the MPI library that mpi4py finds in the same environment.

    Raises
    ------
    FileNotFoundError
        When there is no `mpirun`.
    """
    beside = os.path.dirname(sys.executable)
    mpirun = shutil.which("mpirun", path=beside) or shutil.which("mpirun")
    if mpirun is None:
        raise FileNotFoundError(f"there is no mpirun in {beside} nor on PATH: install an MPI "
                                "library, for example with: pip install mpich")
    return [mpirun, "-n", str(ranks), *argv]


def abort(comm) -> None:
    """End the job of all ranks of `comm` with status 1 for the exception being handled.

    Its traceback comes first.  A launcher that ends a job drops what ranks have written and it has
    not yet passed on, so it gets two seconds for that.
    """
    traceback.print_exc()
    sys.stderr.flush()
    time.sleep(2)
    comm.Abort(1)


def _affinity(pid: int) -> set[int]:
    """Cores that a process may run on (0: this one)."""
    try:
        return os.sched_getaffinity(pid)
    except AttributeError:          # macOS
        return set(range(os.cpu_count() or 1))
    except OSError:                 # the launcher belongs to another user, or is gone
        return set()


def _expand(counts: str) -> list[int]:
    """Slurm's "4(x2),3" as [4, 4, 3]."""
    pairs = re.findall(r"(\d+)(?:\(x(\d+)\))?", counts)
    return [int(count) for count, times in pairs for _ in range(int(times or 1))]
