"""State what is trained and how ranks divide it, and build that: three frozen classes.

Each field says in its metadata what it is, so that command lines, titles and records need not.
"""

from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from typing import Any, Mapping, Self

from mm3d.model.experts.options import ExpertOptions
from mm3d.model.experts.spec import Experts
from mm3d.training.gpt import GPT
from mm3d.training.mesh import Mesh

WIDE = "float32"    # of the masters of types of 16 bits
NARROW = ("float16", "bfloat16")
PREFIX = "experts_"    # of the settings of experts


def said(about: str, *default: Any, **more: Any) -> Any:
    """Define a field of a dataclass by what it is, and its default, if it has one.

    ``least`` is the smallest whole number, ``choices`` are all values, and ``nothing`` says what
    None stands for.
    """
    about = {"about": about, **more}
    return field(default=default[0], metadata=about) if default else field(metadata=about)


@dataclass(frozen=True)
class Model:
    """State a GPT, and the batch of a step; see `mm3d.GPT`.

    Types of 16 bits are trained with masters of float32.
    """

    layers: int = said("Transformer layers", least=1)
    hidden: int = said("features of a token", least=1)
    heads: int = said("attention heads", least=1)
    batch: int = said("sequences of a step, of all replicas", least=1)
    seq: int = said("tokens in a sequence", least=1)
    vocab: int = said("tokens of the vocabulary", 256, least=1)
    seed: int = said("seed of the parameters, and of dropout", 0, least=0)
    dtype: str = said("dtype of all arrays", "float32", choices=("float64", WIDE, *NARROW))
    tied: bool = said("compute logits with the embedding's table", True)
    dropout: float = said("probability that an element of a residual branch or embedding is "
                          "dropped", 0.0)
    experts: ExpertOptions | None = said("experts in place of the perceptron of some layers",
                                         None)

    @property
    def master(self) -> str | None:
        """Return the dtype of the masters; None without."""
        return WIDE if self.dtype in NARROW else None

    def settings(self) -> dict[str, Any]:
        """Return all fields as settings of a record, those of experts with a prefix.

        What is None is not recorded.
        """
        found = asdict(self)
        of_experts = found.pop("experts") or {}
        return found | {PREFIX + name: value for name, value in of_experts.items()
                        if value is not None}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> Self:
        """Return what a record states; KeyError where something is missing but a default."""
        found = {one.name: type(one.default)(settings[one.name])
                 if one.default is not MISSING else int(settings[one.name])
                 for one in fields(cls) if one.name in settings or one.default is MISSING}
        of_experts = {one.name: settings[PREFIX + one.name] for one in fields(Experts)
                      if PREFIX + one.name in settings}
        if of_experts:
            found["experts"] = Experts(**{"capacity": None, **of_experts})
        return cls(**found)


@dataclass(frozen=True)
class Division:
    """State how ranks divide a model, and when each works; see `mm3d.Mesh` and `mm3d.GPT`.

    It changes results by rounding alone.
    """

    data: int = said("replicas, among which the batch is divided", 1, least=1)
    shards: int | None = said("replicas that divide one copy of the model by zero, the others "
                              "having copies of their own", None, least=1, nothing="all")
    zero: int = said("divide among the replicas: 1, moments and masters; 2, gradients too; 3, "
                     "parameters too", 0, choices=(0, 1, 2, 3))
    stages: int = said("stages of the pipeline in each replica", 1, least=1)
    schedule: str = said("schedule of the stages", "1f1b")
    microbatches: int = said("micro-batches of a replica's part of the batch", 1, least=1)
    scheme: str = said("tensor parallelism in each stage", "3d")
    grid: tuple[int, ...] | None = said("sizes of the grid's directions, such as 2x2x2", None,
                                        nothing="a cube; a square for 2d, a line for 1d")
    recompute: str = said("recompute in backward, to save memory", "none")
    expert_parallel: int = said("neighbouring replicas that divide the experts, a divisor of "
                                "data; with 1 each has all", 1, least=1)
    backend: Any = said("array library: numpy or cupy", None,
                        nothing="MM3D_BACKEND, or numpy")

    def given(self) -> dict[str, Any]:
        """Return what differs from the defaults."""
        return {one.name: value for one in fields(self)
                if (value := getattr(self, one.name)) != one.default}

    def __str__(self) -> str:
        grid = "x".join(map(str, self.grid or ()))
        parts = [f"data {self.data}" * (self.data > 1),
                 f"shards {self.shards}" * (self.shards is not None),
                 f"ZeRO {self.zero}" * (self.zero > 0),
                 f"experts on {self.expert_parallel}" * (self.expert_parallel > 1),
                 f"{self.stages} stages {self.schedule}" * (self.stages > 1),
                 " ".join(filter(None, [self.scheme, grid])),
                 f"{self.microbatches} micro-batches" * (self.microbatches > 1),
                 f"recompute {self.recompute}" * (self.recompute != "none")]
        return ", ".join(filter(None, parts))


@dataclass(frozen=True)
class Config:
    """State a training: a model, and how ranks divide it.

    Attributes
    ----------
    model, division : Model, Division
        What is computed, and where.

    Examples
    --------
    >>> config = Config(Model(layers=4, hidden=64, heads=4, batch=16, seq=32),
    ...                 Division(data=2, stages=2, grid=(2, 1, 1), microbatches=4, zero=1))
    >>> gpt = config.build(comm)    # on 8 ranks, or on a dry communicator
    """

    model: Model
    division: Division = Division()

    def build(self, comm: Any, **more: Any) -> GPT:
        """Arrange the ranks and create the model; ``gpt.free()`` and ``gpt.mesh.free()`` end both.

        Parameters
        ----------
        comm : mpi4py.MPI.Intracomm
            All ranks; each calls this.
        **more
            Further parameters of `mm3d.GPT`.

        Raises
        ------
        ValueError
            On every rank alike, for what does not fit together, or differs between ranks.
        """
        how, model = self.division, self.model
        mesh = Mesh(comm, how.stages, how.scheme, how.grid, how.backend, data=how.data,
                    shards=how.shards)
        return GPT(mesh, model.layers, model.hidden, model.heads, model.vocab, model.batch,
                   model.seq, seed=model.seed, dtype=model.dtype, master=model.master,
                   tied=model.tied, dropout=model.dropout, experts=model.experts,
                   microbatches=how.microbatches, schedule=how.schedule, recompute=how.recompute,
                   zero=how.zero, expert_parallel=how.expert_parallel, **more)

    def on(self, backend: Any) -> "Config":
        """Return the same with another array library."""
        return replace(self, division=replace(self.division, backend=backend))
