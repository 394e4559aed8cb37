"""State what is trained, and on which mesh; make the model and its optimizer."""

from dataclasses import MISSING, asdict, dataclass, fields
from typing import Any, Mapping

import mm3d
from bench.experiments.training.text import VOCAB
from bench.records.measurements import Setting
from mm3d.model.experts.layer import Experts
from mm3d.training import learning_rates, optimizers

OPTIMIZERS = ("adamw", "sgd")
DTYPES = ("float64", "float32", "float16", "bfloat16")
PREFIX = "experts_"    # of the settings of experts
FLOOR = 0.1    # the last learning rate as a share of the peak


@dataclass(frozen=True)
class Plan:
    """State everything that the curve of a training follows from, but the text and the mesh.

    Attributes
    ----------
    layers, hidden, heads, batch, seq : int
        Sizes of the model and of a step's global batch.
    steps : int
        Steps of the whole training, over which the learning rate falls.
    seed : int
        Seed of the parameters, of the order of the text and of dropout.
    dtype : str
        Type of parameters, gradients and activations.  With 16 bits masters and gradients are
        float32, and with float16 the loss is scaled.
    tied : bool
        Whether the head uses the embedding's table.
    dropout : float
        Probability that an element of a residual branch or embedding is dropped.
    optimizer : {"adamw", "sgd"}
        The optimizer.
    lr, warmup : float, int
        Peak of the learning rate, and steps of its linear rise; then half a cosine down to
        `FLOOR` of the peak.  SGD keeps `lr`.
    weight_decay, clip, momentum : float
        0 for none.
    experts : Experts or None
        Experts in place of the perceptron of some layers.
    """

    layers: int
    hidden: int
    heads: int
    batch: int
    seq: int
    steps: int
    seed: int = 0
    dtype: str = "float32"
    tied: bool = True
    dropout: float = 0.0
    optimizer: str = "adamw"
    lr: float = 1e-3
    warmup: int = 0
    weight_decay: float = 0.1
    clip: float = 1.0
    momentum: float = 0.0
    experts: Experts | None = None

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        if self.optimizer == "sgd":
            return self.lr
        return learning_rates.warmup_cosine(step, self.steps, self.lr, self.warmup,
                                            FLOOR * self.lr)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Setting]) -> "Plan":
        """Return the plan that a record states."""
        found = {one.name: type(one.default)(settings[one.name])
                 if one.default is not MISSING else int(settings[one.name])
                 for one in fields(cls) if one.name != "experts"}
        of_experts = {name.removeprefix(PREFIX): value for name, value in settings.items()
                      if name.startswith(PREFIX) and name != f"{PREFIX}jitter"}    # in old files
        if of_experts:    # what is None is not recorded
            found["experts"] = Experts(**{"capacity": None, **of_experts})
        return cls(**found)

    def settings(self) -> dict[str, Setting]:
        """Return the plan as settings of a record; nothing of experts where there are none."""
        found = asdict(self)
        of_experts = found.pop("experts") or {}
        return found | {PREFIX + name: value for name, value in of_experts.items()
                        if value is not None}


@dataclass(frozen=True)
class Placement:
    """State where a model is trained: what changes no curve beyond rounding.

    Attributes
    ----------
    data, shards, stages, scheme, grid, backend
        See `mm3d.Mesh`.
    zero, schedule, microbatches, recompute, expert_parallel
        See `mm3d.GPT`.
    """

    data: int = 1
    stages: int = 1
    scheme: str = "3d"
    grid: tuple[int, ...] | None = None
    zero: int = 0
    schedule: str = "1f1b"
    microbatches: int = 1
    recompute: str = "none"
    backend: str | None = None
    shards: int | None = None
    expert_parallel: int = 1

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


def make_mesh(placement: Placement, comm: Any) -> mm3d.Mesh:
    """Arrange the ranks of `comm`; ValueError on every rank where they cannot be."""
    given = placement.given()
    return mm3d.Mesh(comm, **{name: given[name] for name in (
        "data", "shards", "stages", "scheme", "grid", "backend") if name in given})


def make_model(plan: Plan, placement: Placement, mesh: mm3d.Mesh) -> Any:
    """Create the model on the mesh; ValueError on every rank for sizes that do not fit."""
    given = placement.given()
    more = {name: given[name] for name in ("zero", "recompute", "expert_parallel")
            if name in given}
    if plan.experts is not None:
        more["experts"] = plan.experts
    if plan.dropout:
        more["dropout"] = plan.dropout
    if plan.dtype in DTYPES[2:]:
        more["master"] = "float32"
    return mm3d.GPT(mesh, plan.layers, plan.hidden, plan.heads, VOCAB, plan.batch, plan.seq,
                    seed=plan.seed, dtype=plan.dtype, tied=plan.tied,
                    schedule=placement.schedule, microbatches=placement.microbatches, **more)


def make_optimizer(plan: Plan, model: Any) -> optimizers.Optimizer:
    """Create the optimizer of a model."""
    common = {"weight_decay": plan.weight_decay, "clip": plan.clip,
              "loss_scaling": mm3d.LossScaling() if plan.dtype == "float16" else None}
    if plan.optimizer == "sgd":
        return optimizers.SGD(model, plan.lr, plan.momentum, **common)
    return optimizers.AdamW(model, plan.lr, betas=(0.9, 0.95), eps=1e-8, **common)
