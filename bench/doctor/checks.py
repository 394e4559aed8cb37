"""Check this environment for ``bench doctor``: each check makes a `Finding` from the `Facts`.

The name of a check's function is its name in the table.
"""

import functools
import os
import platform
import shlex
import tempfile
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Callable

import numpy as np

from bench.cluster.run import refusal
from bench.cluster.spec import Cluster
from bench.doctor.child_jobs import Facts
from bench.errors import StoreError
from bench.instruments import leftover_memory
from bench.records import journal, run_file
from bench.records.measurements import Measurements, Variable
from bench.records.notes import counted
from mm3d.arrays.cupy_backend import INSTALL_COMMAND

OK, WARNING, FAILED, SKIPPED = "ok", "warning", "failed", "skipped"
PACKAGES = ("mm3d", "numpy", "mpi4py", "h5py")
STRANGERS = ("launcher and mpi4py belong to different MPI libraries; use the mpirun of the MPI "
             "that this Python's mpi4py loads, or another srun --mpi=")


@dataclass(frozen=True)
class Finding:
    """The result of a check: its state, `OK`, `WARNING`, `FAILED` or `SKIPPED`, and a text."""

    state: str
    text: str


DoctorCheck = Callable[[Facts], Finding]


def skip_unless(there: Callable[[Facts], Any], why: str) -> Callable[[DoctorCheck], DoctorCheck]:
    """Return a decorator of checks that are skipped where something is not there."""
    def decorate(check: DoctorCheck) -> DoctorCheck:
        @functools.wraps(check)
        def checked(facts: Facts) -> Finding:
            return check(facts) if there(facts) else Finding(SKIPPED, why)
        return checked
    return decorate


needs_world = skip_unless(lambda facts: facts.world, "not known, as the launcher failed")


def software(facts: Facts) -> Finding:
    """Report the versions of Python and of the packages."""
    found = [f"Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} (not installed, imported from its source)")
    return Finding(OK, ", ".join(found))


def modules(facts: Facts) -> Finding:
    """Check that the environment modules that are required are loaded."""
    loaded = [name for name in os.environ.get("LOADEDMODULES", "").split(":") if name]
    # A module is named with its version, without it, or with the version's first parts.
    missing = [name for name in facts.modules if not any(
        f"{one}/".startswith((f"{name}/", f"{name}." if "/" in name else f"{name}/"))
        for one in loaded)]
    text = f"loaded: {', '.join(loaded) or 'none'}"
    if missing:
        return Finding(FAILED, f"{', '.join(missing)} not loaded: load them, or take them out of "
                       f"the site file; {text}")
    return Finding(OK if loaded else SKIPPED, text)


def launcher(facts: Facts) -> Finding:
    """Check that the launcher starts one world of as many ranks as it is asked for."""
    worlds, problem = facts.census
    name = shlex.join(facts.launcher)
    if len(worlds) > 1:
        return Finding(FAILED, f"{name} started {len(worlds)} worlds of "
                       f"{counted(len(worlds[0]), 'rank')} instead of one of {facts.ranks}: "
                       f"{STRANGERS}")
    if problem or not worlds:
        return Finding(FAILED, f"{name}: {problem or 'no rank said anything'}"
                       + f"; perhaps {STRANGERS}" * ("PMI" in problem))
    if len(worlds[0]) != facts.ranks:
        return Finding(FAILED, f"{name} started {counted(len(worlds[0]), 'rank')} instead of "
                       f"{facts.ranks}")
    return Finding(OK, f"one world of {counted(facts.ranks, 'rank')}, {worlds[0][0]['mpi']}")


@needs_world
def nodes(facts: Facts) -> Finding:
    """Check the number of ranks on each node."""
    counts = {rank["node"]: rank["ranks_on_node"] for rank in facts.world}
    sizes = sorted(set(counts.values()))
    text = (f"{counted(len(counts), 'node')} with {', '.join(map(str, sizes))} rank"
            f"{'s' * (sizes != [1])}")
    if facts.ranks_per_node and max(counts.values()) > facts.ranks_per_node:
        return Finding(FAILED, f"{text}, where at most {facts.ranks_per_node} are wanted")
    return Finding(OK, text)


@needs_world
def blas(facts: Facts) -> Finding:
    """Check that BLAS uses kernels for this processor, and no more threads than cores."""
    worst = max(facts.world, key=lambda rank: (rank["blas_threads"] * rank["ranks_on_node"]
                                               / rank["cores"]))
    threads, ranks, cores = (worst[key] for key in ("blas_threads", "ranks_on_node", "cores"))
    text = (f"{worst['blas']}, kernels for {worst['blas_architecture']}, "
            f"{counted(threads, 'thread')} a rank, {counted(ranks, 'rank')} on "
            f"{counted(cores, 'core')}")
    if worst.get("cpu_quota") is not None:
        text += f" by a CPU quota of {worst['cpu_quota']:g}"
    if worst.get("compiler"):
        text += f"; elementwise kernels by {worst['compiler']}"
    if threads > 1 and threads * ranks > cores:
        return Finding(FAILED, f"{text}: {threads * ranks} threads fight for them; set "
                       f"OMP_NUM_THREADS={max(1, cores // ranks)}, or leave it unset")
    if ranks > cores:
        return Finding(WARNING, f"{text}: they take turns, and times say nothing about scaling")
    forced = os.environ.get("OPENBLAS_CORETYPE")
    if forced and worst["best_kernels"] == "avx512f" and forced.lower() != "skylakex":
        return Finding(WARNING, f"{text}: OPENBLAS_CORETYPE={forced} forces them, on a processor "
                       "with AVX-512; unset it")
    return Finding(OK, text)


@needs_world
def gpus(facts: Facts) -> Finding:
    """Check that every node has the GPUs that are required, and every rank one of its own."""
    wanted = facts.gpus_per_node
    if not wanted and not facts.sees_gpus:
        return Finding(SKIPPED, "none seen, none wanted")
    used: dict[tuple[int, str], list[int]] = {}
    for number, rank in enumerate(facts.world):
        if not rank["gpus"]:
            return Finding(FAILED, f"rank {number} sees no GPU, where {wanted} a node are wanted: "
                           "ask Slurm for them, or check the driver")
        if rank["gpu_problem"]:
            return Finding(FAILED, rank["gpu_problem"])
        used.setdefault((rank["node"], rank["gpu"]), []).append(number)
    for node in {node for node, _ in used}:
        here = [rank for rank in facts.world if rank["node"] == node]
        seen = len({gpu for rank in here for gpu in rank["gpus"]})
        shared = [ranks for (at, _), ranks in used.items() if at == node and len(ranks) > 1]
        if shared and wanted and all(len(rank["gpus"]) == 1 for rank in here):
            return Finding(FAILED, f"ranks {', '.join(map(str, shared[0]))} all see one and the "
                           "same GPU: give each its own (gpu_binding of the site file)")
        if seen < min(wanted, len(here)):
            return Finding(FAILED, f"the {len(here)} ranks on the node of rank {node} see "
                           f"{counted(seen, 'GPU')}, where {wanted} are wanted")
        if shared and wanted:
            return Finding(FAILED, f"ranks {', '.join(map(str, shared[0]))} share a GPU: start at "
                           f"most {wanted} on a node")
    shared = sum(len(ranks) > 1 for ranks in used.values())
    return Finding(WARNING if shared else OK, f"{counted(len(used), 'GPU')} for "
                   f"{counted(facts.ranks, 'rank')}, as {facts.world[0]['gpu_source']} says")


@needs_world
def variables(facts: Facts) -> Finding:
    """Check that every rank has the environment variables that are wanted."""
    if not facts.variables:
        return Finding(SKIPPED, "none wanted")
    for name, wanted in facts.variables.items():
        found = [rank["variables"][name] for rank in facts.world]
        # Launchers and containers add folders of their own to paths.
        wrong = [number for number, value in enumerate(found) if value is None
                 or value != wanted and not {*wanted.split(":")} < {*value.split(":")}]
        if wrong:
            value = found[wrong[0]]
            state = "not set" if value is None else repr(value)
            return Finding(FAILED, f"{name} is {state} on {len(wrong)} of {facts.ranks} ranks, "
                           f"where {wanted!r} is wanted: the launcher or the container does not "
                           "hand it on (--export of srun, --cleanenv), or sets it itself")
    return Finding(OK, f"{', '.join(facts.variables)} on all ranks as wanted")


@needs_world
def backend(facts: Facts) -> Finding:
    """Check that every rank can use the array library that is wanted."""
    if facts.backend != "cupy" and not facts.device_buffers:
        return Finding(SKIPPED, "NumPy is all that is wanted")
    problems = [rank["cupy"] for rank in facts.world if rank["cupy"]]
    if problems:
        return Finding(FAILED, f"CuPy cannot be used on {len(problems)} of {facts.ranks} ranks: "
                       f"{problems[0]}: {INSTALL_COMMAND}")
    return Finding(OK, "CuPy on all ranks")


@needs_world
def cuda_aware(facts: Facts) -> Finding:
    """Check that MPI reads and writes device buffers, by doing so in a child job."""
    if not facts.device_buffers and not facts.sees_gpus:
        return Finding(SKIPPED, "no GPU seen, device buffers not wanted")
    if any(rank["cupy"] for rank in facts.world):
        return Finding(FAILED if facts.device_buffers else SKIPPED,
                       "not known, as CuPy cannot be used")
    answers, problem = facts.run_child_job("exchange")
    if not problem and answers and not answers[0]:
        return Finding(OK, f"{facts.ranks} ranks exchanged device buffers")
    text = f"an exchange of device buffers {problem or (answers or ['said nothing'])[0]}"
    if facts.device_buffers:
        return Finding(FAILED, f"{text}: this MPI, or the way it is started, does not carry "
                       "device buffers; use a CUDA-aware one, set what it needs in the site "
                       "file's [environment], or say device_buffers = false to go through host "
                       "memory")
    return Finding(WARNING, f"{text}: collectives go through host memory")


@needs_world
def nccl(facts: Facts) -> Finding:
    """Report the version of NCCL."""
    if not facts.sees_gpus:
        return Finding(SKIPPED, "no GPU seen")
    try:
        from cupy.cuda import nccl as library
        return Finding(OK, f"NCCL {library.get_version()}")
    except (ImportError, AttributeError, RuntimeError) as error:
        return Finding(WARNING, f"not usable from CuPy: {error}")


def hdf5(facts: Facts) -> Finding:
    """Check that a file of results can be written into the folder and read back."""
    numbers = np.array([0.1, 2.0, -3e300])
    try:
        folder = journal.check_folder(facts.folder) if facts.folder else None
        with tempfile.TemporaryDirectory(dir=folder, prefix=".doctor-") as scratch:
            path = run_file.write_run(Measurements("doctor", {}, {}, {"size": [0, 1, 2]}, {
                "numbers": Variable(numbers, "1", ("size",))}, []), scratch, "doctor")
            with run_file.open_file(path) as file:
                back = file["measurements/numbers"][...]
    except (OSError, StoreError) as error:
        return Finding(FAILED, f"results cannot be kept: {error}")
    same = np.array_equal(back, numbers)
    return Finding(OK if same else FAILED, "a file was written and read back"
                   if same else f"{numbers} was written and {back} read back")


@needs_world
def clock(facts: Facts) -> Finding:
    """Check the resolution of the clock, and the error between the clocks of nodes."""
    resolution = max(rank["clock_resolution"] for rank in facts.world)
    error = max(rank["clock_offset_error"] for rank in facts.world)
    text = f"resolution {resolution:.2g} s, error between nodes {error:.2g} s"
    coarse = not np.isfinite(resolution) or resolution > 1e-5 or error > 1e-3
    return Finding(WARNING if coarse else OK, text)


def leftovers(facts: Facts, folder: Path = leftover_memory.SEGMENT_FOLDER) -> Finding:
    """Report the shared memory that killed jobs have left, or remove it if asked to."""
    found = leftover_memory.abandoned_segments(folder)
    if not found:
        return Finding(OK, f"no shared memory of killed jobs in {folder}")
    if facts.clean:
        removed = leftover_memory.remove_segments(found)
        return Finding(OK, f"removed: {leftover_memory.describe_amount(removed)}")
    return Finding(WARNING, leftover_memory.removal_advice(found))


def cluster(facts: Facts) -> Finding:
    """Check whether this machine can emulate a cluster, by doing so."""
    if facts.seen:
        return Finding(SKIPPED, "emulated clusters are for one machine, not for jobs")
    problem = refusal(Cluster(1, 1, 1e8, 1e-3))
    if problem and "netem" in problem:    # it comes after everything else
        return Finding(OK, "this machine can emulate a cluster, with links of limited rate "
                       "(tbf), but none with a latency: the kernel has no netem")
    if problem:
        return Finding(SKIPPED, f"no emulated cluster here: {problem}")
    return Finding(OK, "this machine can emulate a cluster, with links of limited rate (tbf) and "
                   "a latency (netem)")


CHECKS: list[DoctorCheck] = [software, modules, launcher, nodes, variables, blas, gpus, backend,
                             cuda_aware, nccl, hdf5, clock, leftovers, cluster]
