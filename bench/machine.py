"""What the benchmark ran on, without user or host names."""

import hashlib
import os
import platform
import re
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from threadpoolctl import threadpool_info

from mm3d import environment
from mm3d.store import Setting

# Settings of MPI and BLAS that change times; their values name no person and no machine.
TUNING = re.compile(r"(MPIR_CVAR|OMPI_MCA_mpi|OMPI_MCA_(pml|btl|coll)|OPENBLAS|MKL_NUM|OMP_NUM|"
                    r"BLIS_NUM|MM3D)[A-Za-z_0-9]*")


def cpu_model() -> str:
    """The processor's name as it gives it, or the architecture where it gives none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    found = re.search(r"^(?:model name|cpu)\s*:\s*(.+)$", text, re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def slug() -> str:
    """A folder name for results of this kind of machine, such as ``amd-epyc-7763-8-cores``."""
    model = re.sub(r"\((R|TM|C)\)|CPU|Processor|@.*", " ", cpu_model(), flags=re.IGNORECASE)
    words = re.findall(r"[a-z0-9]+", model.lower())
    return "-".join([*words, str(environment.cores()), "cores"])


def mpi_name(library: str) -> str:
    """Name and version from what an MPI library says of itself.

    The rest may name who built it, and where.
    """
    first = library.replace("\0", "").splitlines()[0].partition(",")[0]
    return " ".join(first.replace("Version:", "").split())


def default_out() -> Path:
    """Where results go unless ``--out`` says otherwise: ``results/<machine>``."""
    return Path("results") / slug()


def describe(backend: str, ranks: int, mpi_library: str, command: str) -> dict[str, Setting]:
    """The environment of a run, as it is recorded.

    Parameters
    ----------
    backend : str
        The array library.
    ranks : int
        Ranks of the run.
    mpi_library : str
        What the MPI library says of itself.
    command : str
        The command line, with nothing private in it.
    """
    cores, local = environment.cores(), environment.local_ranks()
    commit, clean = _source_version()
    tuning = sorted(f"{name}={value}" for name, value in os.environ.items()
                    if TUNING.fullmatch(name))
    return {"cpu_model": cpu_model(), "cores": cores, "ranks": ranks,
            "ranks_on_this_node": local, "ranks_per_core": local / cores,
            "oversubscribed": environment.oversubscribed(), "backend": backend,
            "operating_system": f"{platform.system()} {platform.machine()}",
            "python": platform.python_version(),
            "mpi": mpi_name(mpi_library),
            "tuning_variables": " ".join(tuning), "command": command, "git_commit": commit,
            "git_clean": clean} | _versions() | blas()


def source_digest() -> str:
    """What tells whether two runs have the same source, whether committed or not."""
    root = Path(__file__).resolve().parents[1]
    digest = hashlib.blake2b(digest_size=10)
    for folder in ("mm3d", "bench"):
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in (".py", ".toml"):
                digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def _versions() -> dict[str, Setting]:
    found: dict[str, Setting] = {}
    for package in ("mm3d", "numpy", "mpi4py", "h5py", "cupy"):
        try:
            found[f"{package}_version"] = version(package)
        except PackageNotFoundError:
            continue
    return found


def blas() -> dict[str, Setting]:
    """Name, kernels and threads of the first BLAS that is loaded."""
    for library in threadpool_info():
        if library["user_api"] == "blas":
            return {"blas": f"{library['internal_api']} {library['version'] or ''}".strip(),
                    "blas_architecture": library.get("architecture") or "unknown",
                    "blas_threads": library["num_threads"]}
    return {"blas": "unknown", "blas_architecture": "unknown", "blas_threads": 0}


def _source_version() -> tuple[str, bool]:
    """The git commit of this source and whether the tree, results apart, is unchanged."""
    root = Path(__file__).resolve().parents[1]

    def git(*argv: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *argv], capture_output=True, text=True,
                                  timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    commit = git("rev-parse", "HEAD")
    changes = git("status", "--porcelain", "--", ".", ":!results")
    return commit or "unknown", commit is not None and changes == ""
