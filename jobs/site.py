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

# What may stand in a line that Slurm reads, where quoting is Slurm's own affair.
WORD = re.compile(r"[A-Za-z0-9_.,:/@%+=*&|()\[\]-]+")
TIME = re.compile(r"(\d+-)?\d+(:\d\d){0,2}")
VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the site file."""


class Slurm(Part):
    """Options of Slurm's jobs.

    Attributes
    ----------
    time : str
        Limit of each row's job, as Slurm writes it (``2:00:00``).
    partition, account, qos, constraint : str or None
        As of sbatch; left to Slurm's defaults where not given.
    exclusive : bool
        Whether nodes are shared with no other job.
    warning : int
        Seconds before the limit at which a job ends with what it has.
    collect_time : str
        Limit of the last job, which collects and draws.
    options : list of str
        Of sbatch, such as ``--mem=0``.
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


class Node(Part):
    """Ranks, cores and GPUs of a node.

    Attributes
    ----------
    ranks : int
        How many are started on it.
    cores_per_rank : int
        The cores of each.
    gpus : int
        GPUs of the node.
    gpu_memory : str or None
        Of each GPU for arrays, such as ``16 GB`` (of 1000^3 bytes) or ``15 GiB`` (of 1024^3);
        what the driver, the libraries and MPI need besides is not in it.
    memory : str or None
        Of the node for the arrays of all of its ranks, where there are no GPUs.
    """

    ranks: int
    cores_per_rank: int = 1
    gpus: int = 0
    gpu_memory: str | None = None
    memory: str | None = None


class Software(Part):
    """Modules, container and Python to load.

    Attributes
    ----------
    modules : list of str
        Environment modules, in this order.
    container : list of str
        The command that runs a program inside the container, such as ``apptainer exec IMAGE``.
    python : str
        The interpreter that has mm3d's requirements; by default the one that renders.
    """

    modules: list[str] = []
    container: list[str] = []
    python: str = sys.executable


class Launch(Part):
    """The launcher of ranks and its options.

    Attributes
    ----------
    launcher : {"srun", "mpirun"}
        Which program starts them.
    mpi : str
        ``srun --mpi=``: pmix, pmi2, cray_shasta; see ``srun --mpi=list``.
    options : list of str
        Of the launcher, such as ``--cpu-bind=cores``.
    gpu_binding : {"none", "task", "rank"}
        "task": Slurm shows each rank one GPU of its own.  "rank": all GPUs of a node are shown to
        it and rank i of a node takes the i-th, which lets MPI use direct copies between them.
    """

    launcher: Literal["srun", "mpirun"] = "srun"
    mpi: str = "pmix"
    options: list[str] = []
    gpu_binding: Literal["none", "task", "rank"] = "none"


class Run(Part):
    """What is run: the array library, whether MPI must carry device buffers, and more options of
    ``bench run``."""

    backend: str = "numpy"
    device_buffers: bool = False
    options: list[str] = []


class Site(Part):
    """A site file.

    Attributes
    ----------
    about : str
        What the cluster is, in a line.
    inside : dict of str to str
        By scheme the direction of the grid that stays inside a node ("auto" where not given).
    environment : dict of str to str
        Variables that are set, such as those that make MPI CUDA-aware.
    """

    about: str
    slurm: Slurm
    node: Node
    software: Software = Software()
    launch: Launch = Launch()
    run: Run = Run()
    inside: dict[str, str] = {}
    environment: dict[str, str] = {}


def supplied() -> dict[str, Path]:
    """List the site files of this package by name."""
    folder = Path(str(resources.files("jobs").joinpath("sites")))
    return {path.stem: path for path in sorted(folder.glob("*.toml"))}


def load(name: str) -> Site:
    """Read the site called `name`, or that of the file `name`.

    Raises
    ------
    UsageError
        When there is none, or it says what cannot be meant.
    """
    path = supplied().get(name, Path(name))
    try:
        site = msgspec.convert(tomllib.loads(path.read_text()), Site)
    except OSError as error:
        raise UsageError(f"--site {name}: there is no such file; supplied are "
                         f"{', '.join(supplied())}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise UsageError(f"--site {name}: {error}") from error
    problem = next(problems(site), None)
    if problem:
        raise UsageError(f"--site {name}: {problem}")
    return site


def problems(site: Site) -> Iterator[str]:
    """List faults of a site file beyond the types of its values."""
    for place, text in strings(msgspec.to_builtins(site), ""):
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


def strings(value: Any, place: str) -> Iterator[tuple[str, str]]:
    """List all strings in a value, keys included, and where each stands."""
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, dict):
        for key, found in value.items():
            yield f"{place}.{key}".lstrip("."), str(key)
            yield from strings(found, f"{place}.{key}".lstrip("."))
    elif isinstance(value, list):
        for found in value:
            yield from strings(found, place)
