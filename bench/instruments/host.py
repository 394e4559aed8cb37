"""Describe the machine and the software of a run, without user or host names."""

import hashlib
import math
import os
import platform
import re
import shlex
import subprocess
from functools import cache
from pathlib import Path

from threadpoolctl import threadpool_info, threadpool_limits

from bench.cluster.spec import CLUSTER_ENV, Cluster
from bench.records.atomic import LOCAL
from bench.records.schema import UNKNOWN
from bench.records.measurements import Setting
from mm3d import control_groups, launcher
from mm3d.arrays import backend as backends

# Variables of MPI, its networks, BLAS and memory that influence times.
TUNING = re.compile(r"(MPIR_CVAR|MPICH_|I_MPI_|MV2_|FI_|UCX_|NCCL_|PSM|OMPI_MCA_(mpi|pml|btl|mtl|"
                    r"coll|osc|smsc|opal)|OPENBLAS|GOTO|MKL_|OMP_|BLIS_|MALLOC_|LD_PRELOAD|MM3D)"
                    r"[A-Za-z_0-9]*")
# Variables of a Slurm job that influence times; not its user, account, name, folder or hosts.
SLURM = ("JOB_ID", "ARRAY_TASK_ID", "JOB_NUM_NODES", "NTASKS", "NTASKS_PER_NODE",
         "TASKS_PER_NODE", "CPUS_PER_TASK", "CPUS_ON_NODE", "CPU_BIND", "CPU_BIND_TYPE",
         "DISTRIBUTION", "GPUS_PER_NODE", "GPUS_ON_NODE", "THREADS_PER_CORE")
PRIVATE = re.compile(r"[/@~]")    # in paths and addresses, which may name a person
ROOT = Path(__file__).resolve().parents[2]    # of the source
CPUINFO = Path("/proc/cpuinfo")
CPUFREQ = Path("/sys/devices/system/cpu/cpu0/cpufreq")


def cpu_model(cpuinfo: Path = CPUINFO) -> str:
    """Return the processor's name, or the architecture if `cpuinfo` has none.

    Virtual machines hide the number of the model, as in "AMD EPYC"; then family and model are
    added, which identify the generation.
    """
    about = dict(re.findall(r"^(model name|cpu|cpu family|model)\s*:\s*(.+)$", _text(cpuinfo),
                            re.MULTILINE))
    name = about.get("model name") or about.get("cpu")
    if name is None:
        return platform.processor() or platform.machine()
    if not re.search(r"\d", name) and {"cpu family", "model"} <= about.keys():
        name = f"{name.strip()} family {about['cpu family']} model {about['model']}"
    return name.strip()


def processor_flags(cpuinfo: Path = CPUINFO) -> frozenset[str]:
    """Read the instruction sets of the processor; empty if `cpuinfo` lists none."""
    found = re.search(r"^flags\s*:(.*)$", _text(cpuinfo), re.MULTILINE)
    return frozenset(found[1].split()) if found else frozenset()


def slug_of(model: str, cores: int) -> str:
    """Return a folder name for a machine, such as ``amd-epyc-7763-8-cores``."""
    short = re.sub(r"\((R|TM|C)\)|CPU|Processor|@.*", " ", model, flags=re.IGNORECASE)
    words = re.findall(r"[a-z0-9]+", short.lower())
    return "-".join([*words, str(cores), "cores"])


def mpi_name(library: str) -> str:
    """Return name and version of an MPI library from its own description.

    The rest may name its builder and a host.
    """
    first = library.replace("\0", "").splitlines()[0].partition(",")[0]
    return " ".join(first.replace("Version:", "").split())


def default_out() -> Path:
    """Return the default of ``--out``: ``results/local/<machine>``."""
    return LOCAL / slug_of(cpu_model(), launcher.cores())


def describe_host(backend: str, ranks: int, mpi_library: str, command: str) -> dict[str, Setting]:
    """Describe the environment of a run for the record; `command` is as from `command_line`.

    The commit is that of `source_at_start`.  Source that has changed since then is not clean: what
    was imported late was another's.
    """
    cores, local, sharing = (launcher.cores(), launcher.local_ranks(),
                             launcher.ranks_on_these_cores())
    commit, clean = source = source_at_start()
    quota = control_groups.cpu_quota()    # which limits `cores`; in cores
    limited = {} if quota is None else {"cpu_quota": quota,
                                        "allowed_cores": launcher.allowed_cores()}
    tuning = {name: value for name, value in sorted(os.environ.items())
              if TUNING.fullmatch(name) and not name.startswith(CLUSTER_ENV)}
    slurm = {name: os.environ[f"SLURM_{name}"] for name in SLURM if f"SLURM_{name}" in os.environ}
    return {"cpu_model": cpu_model(), "cores": cores, "ranks": ranks,
            "ranks_on_this_node": local, "ranks_per_core": sharing / cores,
            "oversubscribed": launcher.oversubscribed(), "backend": backend,
            "operating_system": f"{platform.system()} {platform.machine()}",
            "kernel": platform.release().partition("-")[0],
            "python": platform.python_version(),
            "mpi": mpi_name(mpi_library),
            "tuning_variables": mask_variables(tuning), "slurm": mask_variables(slurm),
            "command": command,
            "git_commit": commit, "git_clean": clean and source_version() == source,
            **limited, **cluster_environment(Cluster.from_environment()),
            **backends.get(backend).describe_device(),
            **_clock_speeds(), **_versions(), **describe_blas()}


def cluster_environment(cluster: Cluster | None) -> dict[str, Setting]:
    """Describe the emulated cluster of a run for the record; nothing without one.

    ``emulated_cluster`` is what `Cluster.parse` reads; the rate is in bit/s, infinite without a
    limit, the latency in seconds; ``emulated_congestion_control`` names the algorithm by which TCP
    sends.
    """
    if cluster is None:
        return {}
    return {"emulated_cluster": str(cluster), "emulated_nodes": cluster.nodes,
            "emulated_ranks_per_node": cluster.ranks,
            "emulated_link_rate": math.inf if cluster.link is None else cluster.link,
            "emulated_latency": cluster.latency,
            "emulated_congestion_control": Path(
                "/proc/sys/net/ipv4/tcp_congestion_control").read_text("ascii").strip()}


def command_line(argv: list[str]) -> str:
    """Format the command for the record, with only the last part of each path."""
    kept = []
    for word in argv:
        option, equals, value = word.partition("=") if word.startswith("-") else ("", "", word)
        kept.append(f"{option}{equals}{Path(value).name if '/' in value else value}")
    return shlex.join(["python", "-m", "bench", *kept])


def mask_variables(variables: dict[str, str]) -> str:
    """Format variables for the record; values that may name a person are masked.

    Libraries to preload keep the names of their files.
    """
    kept = {**variables}
    if "LD_PRELOAD" in kept:
        kept["LD_PRELOAD"] = ":".join(Path(file).name
                                      for file in re.split(r"[:\s]+", kept["LD_PRELOAD"]))
    return " ".join(f"{name}={'(masked)' if PRIVATE.search(value) else value}"
                    for name, value in kept.items())


def _clock_speeds() -> dict[str, Setting]:
    """Read the processor's clock speeds, as far as the system states them.

    ``cpu_mhz``: the mean over the cores at this moment; ``cpu_mhz_least`` and ``cpu_mhz_most``:
    the limits; ``cpu_governor``: the policy that chooses between them.
    """
    found: dict[str, Setting] = {}
    cores = re.findall(r"^cpu MHz\s*:\s*([\d.]+)$", _text(CPUINFO), re.MULTILINE)
    if cores:
        found["cpu_mhz"] = round(sum(map(float, cores)) / len(cores), 1)
    for name, file in (("cpu_mhz_least", "cpuinfo_min_freq"), ("cpu_mhz_most",
                                                               "cpuinfo_max_freq")):
        kilohertz = _text(CPUFREQ / file).strip()
        if kilohertz.isdecimal():
            found[name] = int(kilohertz) / 1000
    governor = _text(CPUFREQ / "scaling_governor").strip()
    return found | ({"cpu_governor": governor} if governor else {})


def _text(path: Path) -> str:
    """Read a file of the system; "" if it does not exist."""
    try:
        return path.read_text("utf-8", "replace")
    except OSError:
        return ""


def source_digest(root: Path = ROOT) -> str:
    """Return a digest of the source of mm3d and bench in `root`, committed or not."""
    digest = hashlib.blake2b(digest_size=10)
    for folder in ("mm3d", "bench"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".cu", ".toml"):
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _versions() -> dict[str, Setting]:
    # Imported on rank 0 alone, so that the others start sooner.
    from importlib.metadata import PackageNotFoundError, version
    found: dict[str, Setting] = {}
    for package in ("mm3d", "numpy", "mpi4py", "h5py", "cupy"):
        try:
            found[f"{package}_version"] = version(package)
        except PackageNotFoundError:
            continue
    return found


def granted_threads(threads: int) -> int:
    """Return how many of `threads` BLAS really uses: its build limits them."""
    with threadpool_limits(threads, user_api="blas"):
        return describe_blas()["blas_threads"] or threads


def describe_blas() -> dict[str, Setting]:
    """Return name, kernels and threads of the first BLAS that is loaded."""
    for library in threadpool_info():
        if library["user_api"] == "blas":
            return {"blas": f"{library['internal_api']} {library['version'] or ''}".strip(),
                    "blas_architecture": library.get("architecture") or "unknown",
                    "blas_threads": library["num_threads"]}
    return {"blas": "unknown", "blas_architecture": "unknown", "blas_threads": 0}


@cache
def source_at_start() -> tuple[str, bool]:
    """Return `source_version` as of the first call, which verbs make before they measure."""
    return source_version()


def source_version(root: Path = ROOT) -> tuple[str, bool]:
    """Return the git commit of the source in `root`, and whether it is unchanged.

    Results are no source, nor are new files outside of the packages, such as programs of a user.

    The commit is `UNKNOWN` where there is no git, where the source lies in somebody else's
    repository, or where git refuses or fails.
    """
    # Variables such as GIT_DIR, which hooks set, name another repository.
    environment = {name: value for name, value in os.environ.items()
                   if not name.startswith("GIT_") or name.startswith("GIT_CONFIG")}

    def git(*argv: str) -> str | None:
        try:
            done = subprocess.run(["git", "--no-optional-locks", "-C", str(root), *argv],
                                  capture_output=True, timeout=20, env=environment)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return os.fsdecode(done.stdout).strip("\n") if done.returncode == 0 else None

    top = git("rev-parse", "--show-toplevel")
    if not top or Path(top).resolve() != root:
        return UNKNOWN, False
    tracked = git("ls-files", "--error-unmatch", "--", "mm3d/__init__.py", "bench/__init__.py")
    commit = git("rev-parse", "--verify", "HEAD^{commit}")
    changes = git("status", "--porcelain", "--", ".", ":!results")
    if tracked is None or commit is None or changes is None:
        return UNKNOWN, False
    return commit, not [line for line in changes.splitlines() if not line.startswith("?? ")
                        or line[3:].startswith(("bench/", "jobs/", "mm3d/"))]
