"""Define the tables and keys of the site file that describes a cluster."""

import sys
from typing import Literal

import msgspec

from bench.text_files import decode


class SiteTable(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A table of the site file."""


class Slurm(SiteTable):
    """Options of Slurm's jobs; Slurm's defaults where they are None."""

    time: str    # the limit of each row's job, in Slurm's notation (2:00:00)
    # Limits that replace it for jobs on exactly this many ranks: 64 = "8:00:00".
    time_by_ranks: dict[str, str] = {}
    partition: str | None = None    # these four as sbatch calls them
    account: str | None = None
    qos: str | None = None
    constraint: str | None = None
    mail: str | None = None    # where Slurm writes that a job has failed, and the last one ended
    # The option of sbatch that asks for GPUs; "gres" for a Slurm that knows only that one, "none"
    # for one that knows no GPUs, where the nodes of a partition have them.
    gpu_option: Literal["gpus-per-node", "gres", "none"] = "gpus-per-node"
    gres: str | None = None    # other generic resources of each node, such as nvme:1
    exclusive: bool = True     # nodes are not shared with other jobs
    # Seconds before the limit at which a job ends its row with the repetitions so far.
    warning: int = 180
    options: list[str] = []    # more of sbatch, such as --mem=0; none that the job sets itself


class Collect(SiteTable):
    """Options of the last job, of one task without a GPU: it collects and draws.

    Those of None are as in ``[slurm]``; with a partition of its own, qos, constraint and options
    are Slurm's defaults instead.
    """

    time: str = "0:20:00"
    account: str | None = None
    partition: str | None = None
    qos: str | None = None
    constraint: str | None = None
    options: list[str] | None = None


class Node(SiteTable):
    """Ranks, cores and GPUs of a node."""

    ranks: int
    cores_per_rank: int = 1
    gpus: int | str = 0    # their number, or their type in Slurm and number: a100:4
    # Of each GPU for arrays, such as 16 GB (of 1000^3 bytes) or 15 GiB (of 1024^3), without that
    # of the driver, the libraries and MPI.
    gpu_memory: str | None = None
    memory: str | None = None    # of the node for the arrays of all of its ranks, without GPUs

    @property
    def gpu_count(self) -> int:
        """The number of GPUs of the node."""
        return int(str(self.gpus).rpartition(":")[2])

    @property
    def gpu_type(self) -> str:
        """Their type in Slurm; "" if it does not matter."""
        return str(self.gpus).rpartition(":")[0]


class Software(SiteTable):
    """Modules, container and Python to load."""

    # Commands of Bash, each complete, that a job runs first, such as "module use FOLDER", "source
    # FILE", "conda activate NAME", "spack load PACKAGE"; one that fails ends it.
    setup: list[str] = []
    modules: list[str] = []      # environment modules to load then, in this order
    container: list[str] = []    # what runs a program in it, such as "apptainer exec IMAGE"
    python: str = sys.executable    # the interpreter with mm3d's requirements


class Launch(SiteTable):
    """The launcher of ranks and its options."""

    launcher: Literal["srun", "mpirun"] = "srun"
    mpi: str = "pmix"    # of srun --mpi=: pmix, pmi2, cray_shasta; see srun --mpi=list
    # More options of the launcher, such as --cpu-bind=cores; behind "--" srun may start a program
    # that starts Python, such as "-- numactl -l".
    options: list[str] = []
    # "task": Slurm makes one GPU visible to each rank.  "rank": all GPUs of a node are visible and
    # rank i of the node takes the i-th, so that MPI can copy directly between GPUs.
    gpu_binding: Literal["none", "task", "rank"] = "none"
    # With "rank": rank i of a node takes the GPU of this number, as the cores of each are joined
    # to it.  A job then asks for all GPUs of its nodes.
    gpu_order: list[int] = []


class RunOptions(SiteTable):
    """Options of the measurement."""

    backend: str = "numpy"    # the array library
    device_buffers: bool = False    # MPI must carry them
    options: list[str] = []    # more of bench run, such as --repetitions=10
    # The machine model, supplied or a file named from / on, that predicts rows of combined.
    machine: str | None = None


class Site(SiteTable):
    """A site file."""

    about: str    # a line that describes the cluster
    slurm: Slurm
    node: Node
    software: Software = Software()
    launch: Launch = Launch()
    run: RunOptions = RunOptions()
    collect: Collect = Collect()
    inside: dict[str, str] = {}    # the direction inside a node, by scheme; "auto" without
    # Variables to set, such as those that make MPI CUDA-aware.  $NAME and ${NAME} in a value are
    # expanded; in a list with colons an item that is one variable may be unset, if another item
    # has text.
    environment: dict[str, str] = {}


def decode_site(text: str) -> Site:
    """Decode the text of a site file, whose values are not checked; ValueError as of `decode`."""
    return decode(text, Site)
