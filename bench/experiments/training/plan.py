"""State a whole training; make its optimizer."""

from dataclasses import dataclass
from typing import Any

import mm3d
from bench.records.measurements import Setting
from mm3d.arrays.plain_numbers import said
from mm3d.config import Model
from mm3d.training import learning_rates, optimizers

OPTIMIZERS = ("adamw", "sgd")
THE_SAME = ("vocab", "master", "label_smoothing", "z_loss", "ignored")
FLOOR = 0.1    # the last learning rate as a share of the peak


@dataclass(frozen=True)
class Plan(Model):
    """All settings that determine the curve of a training, but for the text and the mesh.

    The seed is also that of the order of the text.  The loss of float16 is scaled.  SGD keeps its
    learning rate.
    """

    steps: int = said("steps of the whole training, over which the learning rate falls", 300,
                      least=1)
    optimizer: str = said("the optimizer", "adamw", choices=OPTIMIZERS)
    lr: float = said("peak of the learning rate", 1e-3)
    warmup: int = said("steps in which the learning rate of AdamW rises; then it falls to a "
                       "tenth, by half a cosine", 0, least=0, option="lr-warmup")
    weight_decay: float = said("decay of matrices", 0.1)
    clip: float = said("largest norm of the gradient; 0 for no clipping", 1.0)
    momentum: float = said("momentum of SGD", 0.0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype in ("float16", "bfloat16"):
            object.__setattr__(self, "master", "float32")

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        if self.optimizer == "sgd":
            return self.lr
        return learning_rates.warmup_cosine(step, self.steps, self.lr, self.warmup,
                                            FLOOR * self.lr)

    def settings(self) -> dict[str, Setting]:
        """Return the plan as settings of a record, but for what is `THE_SAME` in all trainings."""
        return {name: value for name, value in super().settings().items() if name not in THE_SAME}


def make_optimizer(plan: Plan, model: Any) -> optimizers.Optimizer:
    """Create the plan's optimizer for a model."""
    common = {"weight_decay": plan.weight_decay, "clip": plan.clip,
              "loss_scaling": mm3d.LossScaling() if plan.dtype == "float16" else None}
    if plan.optimizer == "sgd":
        return optimizers.SGD(model, plan.lr, plan.momentum, **common)
    return optimizers.AdamW(model, plan.lr, betas=(0.9, 0.95), eps=1e-8, **common)
