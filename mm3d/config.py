"""State what is trained and how ranks divide it: frozen classes, from which `mm3d.GPT` is made.

Each field says in its metadata what it is, so that command lines, titles and records need not.
"""

from dataclasses import asdict, dataclass, replace
from typing import Any, Mapping, Self

from mm3d.arrays.plain_numbers import GREATEST, PlainFields, said
from mm3d.model.architecture import FIELD, PLAIN, Architecture
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.stack import Stack, field_names, make_of_fields

PREFIX = "experts_"    # of the settings of experts


@dataclass(frozen=True)
class Model(PlainFields):
    """State a GPT, and the batch of a step.

    Attributes
    ----------
    layers, hidden, heads : int
        Number of layers, features of the residual stream, attention heads, which divide it.
    batch, seq : int
        Global number of sequences of a step, at least one for each micro-batch of each replica,
        and positions in each.
    vocab : int
        Number of tokens; any, it is divided without padding.
    seed : int
        Seed of the initial parameters, and of the masks of dropout.
    dtype, master : str, str or None
        As for `mm3d.Transformer`.
    tied : bool
        Whether logits are computed with the embedding's table.
    dropout : float
        See `mm3d.model.dropout`.  Attention probabilities are not dropped.
    experts : ExpertOptions or None
        See `mm3d.model.experts`.
    label_smoothing, z_loss : float
        See `mm3d.model.cross_entropy.CrossEntropy`.
    ignored : int
        The target of positions that do not count.
    architecture : Architecture
        See `mm3d.Architecture`.
    """

    layers: int = said("Transformer layers", least=1)
    hidden: int = said("features of a token", least=1)
    heads: int = said("attention heads", least=1)
    batch: int = said("sequences of a step, of all replicas", least=1)
    seq: int = said("tokens in a sequence", least=1)
    vocab: int = said("tokens of the vocabulary", 256, least=1)
    seed: int = said("seed of the parameters, and of dropout", 0, least=0, most=GREATEST)
    dtype: str = said("dtype of all arrays", "float32",
                      choices=("float64", "float32", "float16", "bfloat16"))
    master: str | None = said("dtype of masters of parameters in 16 bits", None, nothing="none")
    tied: bool = said("compute logits with the embedding's table", True, option="untied",
                      contrary="give the head a matrix of its own, instead of the embedding's "
                               "table")
    dropout: float = said("probability that an element of a residual branch or embedding is "
                          "dropped", 0.0)
    experts: ExpertOptions | None = said("experts in place of the perceptron of some layers", None,
                                         option="")
    label_smoothing: float = said("share of a target that is spread over all tokens", 0.0)
    z_loss: float = said("coefficient of the squared log of the softmax's denominator", 0.0,
                         option="")    # --z-loss is the router's
    ignored: int = said("the target of positions that do not count", -1)
    architecture: Architecture = said("what the layers compute, if not those of 2019", PLAIN,
                                      option="")

    def settings(self) -> dict[str, Any]:
        """Return all fields as settings of a record, those of experts and architecture prefixed.

        Fields that are None are left out, and the architecture's that are as by default; several
        numbers are a text.
        """
        found = {name: value for name, value in asdict(self).items() if name != FIELD}
        found |= {f"{FIELD}_{name}": value for name, value in self.architecture.given().items()}
        experts = found.pop("experts") or {}
        if self.experts is not None:
            experts |= self.experts.design.given()
            del experts["design"]
        found |= {PREFIX + name: value for name, value in experts.items()}
        return {name: ", ".join(map(str, value)) if isinstance(value, tuple) else value
                for name, value in found.items() if value is not None}


@dataclass(frozen=True)
class Division(PlainFields):
    """State how ranks divide a model, and when each works.

    It changes results by rounding alone.

    Attributes
    ----------
    data, context, shards, stages, scheme, grid, backend
        As for `mm3d.Mesh`.
    overlap : {None, "auto", False, True, 2, 4, 8}
        Of schemes that have it, see `mm3d.schemes.cube.Cube`; None is "auto".
    context_way : {"gather", "ring"}
        See `mm3d.model.attention.layer`.
    zero : {0, 1, 2, 3}
        What replicas divide, see `mm3d.training.data_parallel`.
    schedule, microbatches : str or Schedule, int
        What each stage does, and in which order; a `Schedule` says how many micro-batches there
        are.
    recompute : str
        See `mm3d.model.recomputation`.
    expert_parallel, in_flight, synchronous
        As for `mm3d.Pipeline`.
    """

    data: int = said("replicas, among which the batch is divided", 1, least=1)
    context: int = said("ranks that divide the positions of the same sequences", 1, least=1)
    context_way: str = said("how they meet each other's keys and values", "gather",
                            choices=("gather", "ring"))
    shards: int | None = said("replicas that divide one copy of the model by zero, the others "
                              "having copies of their own", None, least=1, nothing="all")
    zero: int = said("divide among the replicas: 1, moments and masters; 2, gradients too; 3, "
                     "parameters too", 0, choices=(0, 1, 2, 3))
    stages: int = said("stages of the pipeline in each replica", 1, least=1, letter="P")
    schedule: Any = said("schedule of the stages", "1f1b")
    microbatches: int = said("equal micro-batches of a replica, which divide the batch", 1,
                             least=1, letter="M")
    scheme: str = said("parallelism of the layers in a stage", "3d")
    grid: Any = said("sizes of the grid's directions, such as 2x2x2", None, letter="XxYxZ",
                     nothing=": a cube; a square for 2d, a line for 1d")
    overlap: Any = said(
        "let 3d communicate while ranks multiply; with a number, 2, 4 or 8, activations too, in "
        "so many panels of rows; 0: never", None, nothing=": where they are on several nodes",
        choices=(0, 1, 2, 4, 8), letter="PANELS", bare=1)
    recompute: str = said(
        "recompute in backward, to save memory: none; selective, all but products with weights; "
        "full, each layer from its input; uniform:N, every N layers from the first one's input; "
        "full+selective or uniform:N+selective", "none", letter="POLICY")
    expert_parallel: int = said("neighbouring replicas that divide the experts, a divisor of "
                                "--data; with 1 each has all", 1, least=1)
    in_flight: int = said("sums over replicas that go on while a rank computes", 0, least=0)
    synchronous: bool = said("wait until a message is taken before the next action", False)
    backend: Any = said("array library: numpy or cupy", None, nothing="MM3D_BACKEND, or numpy")

    def __str__(self) -> str:
        grid = "x".join(map(str, getattr(self.grid, "sizes", self.grid) or ()))    # a GridShape
        parts = [f"data {self.data}" * (self.data > 1),
                 f"context {self.context} {self.context_way}" * (self.context > 1),
                 f"shards {self.shards}" * (self.shards is not None),
                 f"ZeRO {self.zero}" * (self.zero > 0),
                 f"experts on {self.expert_parallel}" * (self.expert_parallel > 1),
                 f"{self.stages} stages {self.schedule}" * (self.stages > 1),
                 " ".join(filter(None, [self.scheme, grid])),
                 "overlap" * bool(self.overlap),
                 f"{self.microbatches} micro-batches" * (self.microbatches > 1),
                 f"recompute {self.recompute}" * (self.recompute != "none")]
        return ", ".join(filter(None, parts))


# fields of a Division
OF_MESH = ("data", "context", "shards", "stages", "scheme", "grid", "overlap", "backend")


def refuse_of_mesh(given: Mapping[str, Any]) -> None:
    """Raise TypeError for fields that the mesh of a model says already."""
    for name in given:
        if name in OF_MESH:
            raise TypeError(f"{name}={given[name]!r} belongs to the mesh, which is there already: "
                            f"give it to mm3d.Mesh, or a mm3d.Config and its ranks to mm3d.GPT")


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
    >>> gpt = mm3d.GPT(config, comm)    # on 8 ranks, or on a dry communicator
    """

    model: Model
    division: Division = Division()

    def __post_init__(self) -> None:
        if not (isinstance(self.model, Model) and isinstance(self.division, Division)):
            given = ", ".join(type(one).__name__ for one in (self.model, self.division))
            raise TypeError(f"Config({given}): a mm3d.Model, then a mm3d.Division, would do")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the configuration with the given fields of a model and of a division.

        Raises TypeError for a name that is no field, and for sizes that are missing.
        """
        return cls(*make_of_fields(given, "GPT", Model, Division))

    def stack(self) -> dict[str, Any]:
        """Return the fields of a `mm3d.model.stack.Stack`: the layers of the whole model."""
        return {"causal": True} | {name: getattr(part, name)
                                   for part in (self.model, self.division)
                                   for name in field_names(Stack) if hasattr(part, name)}

    def on(self, backend: Any) -> "Config":
        """Return the same with another array library."""
        return replace(self, division=replace(self.division, backend=backend))
