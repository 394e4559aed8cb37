"""Read and check the site file that describes a cluster."""

import re
import sys
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Iterator, Literal

import msgspec

from bench.errors import UsageError
from bench.prediction import memory_fit

# Text allowed in a line that Slurm reads, with its own rules of quoting.
WORD = re.compile(r"[A-Za-z0-9_.,:/@%+=*&|()\[\]-]+")
TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class SiteTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the site file."""


class Slurm(SiteTable):
    """Options of Slurm's jobs.

    Attributes
    ----------
    time : str
        Time limit of each row's job, in Slurm's notation (``2:00:00``).
    partition, account, qos, constraint : str or None
        Options of sbatch; Slurm's defaults if not given.
    exclusive : bool
        Whether the nodes are not shared with other jobs.
    warning : int
        Seconds before the limit at which a job ends its row with the repetitions so far.
    collect_time : str
        Time limit of the last job, which collects the results and draws the figures.
    options : list of str
        More options of sbatch, such as ``--mem=0``.
    """

    time: str
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    exclusive: bool = True
    warning: int = 180
    collect_time: str = "0:20:00"
    options: list[str] = []


class Node(SiteTable):
    """Ranks, cores and GPUs of a node.

    Attributes
    ----------
    ranks : int
        Number of ranks on the node.
    cores_per_rank : int
        Number of cores of each rank.
    gpus : int
        Number of GPUs of the node.
    gpu_memory : str or None
        Memory of each GPU for arrays, such as ``16 GB`` (of 1000^3 bytes) or ``15 GiB`` (of
        1024^3), without that of the driver, the libraries and MPI.
    memory : str or None
        Memory of the node for the arrays of all of its ranks, if it has no GPUs.
    """

    ranks: int
    cores_per_rank: int = 1
    gpus: int = 0
    gpu_memory: str | None = None
    memory: str | None = None


class Software(SiteTable):
    """Modules, container and Python to load.

    Attributes
    ----------
    modules : list of str
        Environment modules, in the order of loading.
    container : list of str
        Command that runs a program in the container, such as ``apptainer exec IMAGE``.
    python : str
        The interpreter with mm3d's requirements; by default the one that renders the scripts.
    """

    modules: list[str] = []
    container: list[str] = []
    python: str = sys.executable


class Launch(SiteTable):
    """The launcher of ranks and its options.

    Attributes
    ----------
    launcher : {"srun", "mpirun"}
        The program that starts the ranks.
    mpi : str
        Value of ``srun --mpi=``: pmix, pmi2, cray_shasta; see ``srun --mpi=list``.
    options : list of str
        More options of the launcher, such as ``--cpu-bind=cores``.
    gpu_binding : {"none", "task", "rank"}
        "task": Slurm makes one GPU visible to each rank.  "rank": all GPUs of a node are visible
        and rank i of the node takes the i-th, so that MPI can copy directly between GPUs.
    """

    launcher: Literal["srun", "mpirun"] = "srun"
    mpi: str = "pmix"
    options: list[str] = []
    gpu_binding: Literal["none", "task", "rank"] = "none"


class Run(SiteTable):
    """Options of the measurement.

    Attributes
    ----------
    backend : str
        The array library.
    device_buffers : bool
        Whether MPI must carry device buffers.
    options : list of str
        More options of ``bench run``.
    """

    backend: str = "numpy"
    device_buffers: bool = False
    options: list[str] = []


class Site(SiteTable):
    """A site file.

    Attributes
    ----------
    about : str
        A line that describes the cluster.
    inside : dict of str to str
        The direction of the grid inside a node, by scheme; "auto" if not given.
    environment : dict of str to str
        Environment variables to set, such as those that make MPI CUDA-aware.
    """

    about: str
    slurm: Slurm
    node: Node
    software: Software = Software()
    launch: Launch = Launch()
    run: Run = Run()
    inside: dict[str, str] = {}
    environment: dict[str, str] = {}


def supplied_sites() -> dict[str, Path]:
    """List the site files of this package by name."""
    folder = Path(str(resources.files("jobs").joinpath("sites")))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load_site(name: str) -> Site:
    """Read a site by its name, or from a file.

    Raises
    ------
    UsageError
        When there is no such site, or its file is wrong.
    """
    path = supplied_sites().get(name, Path(name))
    try:
        site = msgspec.convert(tomllib.loads(path.read_text()), Site)
    except OSError as error:
        raise UsageError(f"--site {name}: there is no such file; supplied are "
                         f"{', '.join(supplied_sites())}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"--site {name}: {error}") from error
    problem = next(list_problems(site), None)
    if problem:
        raise UsageError(f"--site {name}: {problem}")
    return site


def list_problems(site: Site) -> Iterator[str]:
    """List the faults of a site file, other than wrong types of values."""
    for place, text in list_strings(msgspec.to_builtins(site), ""):
        if not text.isprintable():
            yield f"{place} = {text!r}: must be one printable line"
        elif place.startswith("slurm.") and not WORD.fullmatch(text):
            yield (f"{place} = {text!r}: may have letters, digits and _.,:/@%+=*&|()[]- only, as "
                   "it stands in a line that Slurm reads")
    for key in ("time", "collect_time"):
        if not TIME.fullmatch(getattr(site.slurm, key)):
            yield f"slurm.{key} = {getattr(site.slurm, key)!r}: give it as 2:00:00 or 1-12:00:00"
    for key in ("gpu_memory", "memory"):
        text = getattr(site.node, key)
        try:
            memory_fit.parse_size(text or "1 B")
        except UsageError as error:
            yield f"node.{key} = {error}"
    if site.node.gpu_memory and site.node.memory:
        yield "node.gpu_memory and node.memory: give that of the GPUs, or without any the node's"
    if any(option.partition("=")[0] == "--recompute" for option in site.run.options):
        yield ("run.options: --recompute is chosen for each row by node.gpu_memory or "
               "node.memory, or given to jobs render and submit as --recompute")
    for option in site.slurm.options:
        if not option.startswith("--"):
            yield f"slurm.options: {option!r} is no option of sbatch: give it as --mem=0"
    for key, least in (("ranks", 1), ("cores_per_rank", 1), ("gpus", 0)):
        if getattr(site.node, key) < least:
            yield f"node.{key} = {getattr(site.node, key)}: must be at least {least}"
    if site.slurm.warning < 1:
        yield f"slurm.warning = {site.slurm.warning}: must be at least 1 second"
    for name in site.environment:
        if not VARIABLE.fullmatch(name):
            yield f"environment: {name!r} is no name of a variable"
    yield from _gpu_problems(site)


def _gpu_problems(site: Site) -> Iterator[str]:
    """List settings of GPUs that contradict each other."""
    if site.launch.gpu_binding != "none" and site.node.ranks > site.node.gpus:
        yield (f"launch.gpu_binding = {site.launch.gpu_binding!r}: {site.node.ranks} ranks a node "
               f"cannot have one of {site.node.gpus} GPUs each; set node.ranks or node.gpus")
    if site.launch.gpu_binding == "task" and site.launch.launcher != "srun":
        yield "launch.gpu_binding = 'task': only srun does that; use 'rank' with mpirun"
    if site.run.backend == "cupy" and site.launch.gpu_binding == "none":
        yield "run.backend = 'cupy': set launch.gpu_binding to 'task' or 'rank'"
    if site.run.device_buffers and site.run.backend != "cupy":
        yield (f"run.device_buffers = true: backend {site.run.backend!r} has no device buffers; "
               "use 'cupy'")


def list_strings(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """List all strings in a value, keys included, each with its place."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, found in value.items():
            yield f"{place}.{key}".lstrip("."), str(key)
            yield from list_strings(found, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list):
        for found in value:
            yield from list_strings(found, place)
