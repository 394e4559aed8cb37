"""Define the tables and keys of the site file that describes a cluster."""

import sys
from typing import Literal

import msgspec

from bench.text_files import decode


class SiteTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the site file."""


class Slurm(SiteTable):
    """Options of Slurm's jobs.

    Attributes
    ----------
    time : str
        Time limit of each row's job, in Slurm's notation (``2:00:00``).
    time_by_ranks : dict of str to str
        Limits that replace `time` for jobs on exactly this many ranks: ``64 = "8:00:00"``.
    partition, account, qos, constraint : str or None
        Options of sbatch; Slurm's defaults if not given.
    mail : str or None
        Where Slurm writes that a job has failed, and that the last one has ended.
    gpu_option : {"gpus-per-node", "gres", "none"}
        The option of sbatch that asks for GPUs; "gres" for a Slurm that knows only that one,
        "none" for one that knows no GPUs, where the nodes of a partition have them.
    gres : str or None
        Other generic resources of each node, such as ``nvme:1``.
    exclusive : bool
        Whether the nodes are not shared with other jobs.
    warning : int
        Seconds before the limit at which a job ends its row with the repetitions so far.
    options : list of str
        More options of sbatch, such as ``--mem=0``; none that the job sets itself.
    """

    time: str
    time_by_ranks: dict[str, str] = {}
    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    mail: str | None = None
    gpu_option: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    gres: str | None = None
    exclusive: bool = True
    warning: int = 180
    options: list[str] = []


class Collect(SiteTable):
    """Options of the last job, of one task without a GPU: it collects and draws.

    Attributes
    ----------
    time : str
        Time limit.
    account : str or None
        Its account; that of ``[slurm]`` if not given.
    partition, qos, constraint, options
        As in ``[slurm]``, whose values are the defaults; but with a partition of its own, qos,
        constraint and options have no defaults.
    """

    time: str = "0:20:00"
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    options: list[str] | None = None


class Node(SiteTable):
    """Ranks, cores and GPUs of a node.

    Attributes
    ----------
    ranks : int
        Number of ranks on the node.
    cores_per_rank : int
        Number of cores of each rank.
    gpus : int or str
        Number of GPUs of the node, or their type in Slurm and number: ``a100:4``.
    gpu_memory : str or None
        Memory of each GPU for arrays, such as ``16 GB`` (of 1000^3 bytes) or ``15 GiB`` (of
        1024^3), without that of the driver, the libraries and MPI.
    memory : str or None
        Memory of the node for the arrays of all of its ranks, if it has no GPUs.
    """

    ranks: int
    cores_per_rank: int = 1
    gpus: int | str = 0
    gpu_memory: str | None = None
    memory: str | None = None

    @property
    def gpu_count(self) -> int:
        """The number of GPUs of the node."""
        return int(str(self.gpus).rpartition(":")[2])

    @property
    def gpu_type(self) -> str:
        """Their type in Slurm; "" if it does not matter."""
        return str(self.gpus).rpartition(":")[0]


class Software(SiteTable):
    """Modules, container and Python to load.

    Attributes
    ----------
    setup : list of str
        Commands of Bash, each complete, that a job runs first, such as ``module use FOLDER``,
        ``source FILE``, ``conda activate NAME``, ``spack load PACKAGE``; one that fails ends it.
    modules : list of str
        Environment modules to load then, in this order.
    container : list of str
        Command that runs a program in the container, such as ``apptainer exec IMAGE``.
    python : str
        The interpreter with mm3d's requirements; by default the one that renders the scripts.
    """

    setup: list[str] = []
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
        More options of the launcher, such as ``--cpu-bind=cores``; behind ``--`` srun may start
        a program that starts Python, such as ``-- numactl -l``.
    gpu_binding : {"none", "task", "rank"}
        "task": Slurm makes one GPU visible to each rank.  "rank": all GPUs of a node are visible
        and rank i of the node takes the i-th, so that MPI can copy directly between GPUs.
    gpu_order : list of int
        With "rank": rank i of a node takes the GPU of this number, as the cores of each are
        joined to it.  A job then asks for all GPUs of its nodes.
    """

    launcher: Literal["srun", "mpirun"] = "srun"
    mpi: str = "pmix"
    options: list[str] = []
    gpu_binding: Literal["none", "task", "rank"] = "none"
    gpu_order: list[int] = []


class RunOptions(SiteTable):
    """Options of the measurement.

    Attributes
    ----------
    backend : str
        The array library.
    device_buffers : bool
        Whether MPI must carry device buffers.
    options : list of str
        More options of ``bench run``, such as ``--repetitions=10``.
    machine : str or None
        The machine model, supplied or a file named from / on, that predicts rows of combined.
    """

    backend: str = "numpy"
    device_buffers: bool = False
    options: list[str] = []
    machine: str | None = None


class Site(SiteTable):
    """A site file.

    Attributes
    ----------
    about : str
        A line that describes the cluster.
    slurm, node, software, launch, run, collect : SiteTable
        The tables of the file.
    inside : dict of str to str
        The direction of the grid inside a node, by scheme; "auto" if not given.
    environment : dict of str to str
        Environment variables to set, such as those that make MPI CUDA-aware.  ``$NAME`` and
        ``${NAME}`` in a value are expanded; in a list with colons an item that is one variable may
        be unset, if another item has text.
    """

    about: str
    slurm: Slurm
    node: Node
    software: Software = Software()
    launch: Launch = Launch()
    run: RunOptions = RunOptions()
    collect: Collect = Collect()
    inside: dict[str, str] = {}
    environment: dict[str, str] = {}


def decode_site(text: str) -> Site:
    """Decode the text of a site file, whose values are not checked; ValueError as of `decode`."""
    return decode(text, Site)
