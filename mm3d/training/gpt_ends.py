"""Make the layers of a GPT's stage outside the Transformer: embedding, norm, head and loss."""

import math
from dataclasses import dataclass
from typing import Any

from mm3d.arrays.backend import Array
from mm3d.arrays.plain_numbers import check_whole, is_number
from mm3d.model.builder import Builder
from mm3d.model.chains import Chain
from mm3d.model.cross_entropy import CrossEntropy, Targets
from mm3d.model.dropout import Dropout
from mm3d.model.embedding import Embedding, Head, TiedHead
from mm3d.model.architecture import Architecture
from mm3d.model.parameters import Parameter
from mm3d.model.layers import make_norm
from mm3d.model.transformer import Transformer
from mm3d.training.schedules import Schedule


class Output:
    """Hold norm, head and loss of the last stage.

    `build` makes the parameters; the norm is that of the architecture.  A tied head uses the
    `table` of the embedding, which is None where it is on another stage.  Other options are of
    `mm3d.GPT`, and of the loss, `mm3d.model.cross_entropy.CrossEntropy`.
    """

    def __init__(self, build: Builder, vocab: int, hidden: int, tied: bool,
                 table: Parameter | None, architecture: Architecture, **options: Any) -> None:
        self.norm = make_norm(build, "norm", hidden, architecture)
        self.head = (TiedHead(build, hidden, vocab, table) if tied else
                     Head(build, hidden, vocab))
        self.loss = build.named(CrossEntropy(build.inner, vocab, **options), "loss", "loss")
        self.layers = [self.norm, self.head, self.loss]
        self.parameters = [*self.norm.parameters, *self.head.parameters]

    def forward(self, y: Array, targets: Targets) -> tuple[Array, Any]:
        """Compute the sum of the losses of this rank's rows from the output of the layers."""
        x, norm = self.norm.forward(y)
        logits, head = self.head.forward(x)
        total, loss = self.loss.forward(logits, targets)
        return total, (norm, head, loss)

    def backward(self, targets: Targets, saved: Any) -> Array:
        """Compute the scaled gradient of the layers' output; the logits are overwritten."""
        norm, head, loss = saved
        return self.norm.backward(
            self.head.backward(self.loss.backward(targets, loss), head), norm)

    def add_tied_gradient(self) -> None:
        """Add the gradient of a tied head to the embedding's, on the same rank."""
        if self.head.table is not None:
            self.head.table.grad += self.head.weight.grad


@dataclass(frozen=True)
class StageEnds:
    """Hold the layers of a stage outside the Transformer."""

    # In the stage with the first layer; None elsewhere, and without dropout.
    embedding: Embedding | None = None
    dropout: Dropout | None = None
    output: Output | None = None    # in the stage with the last layer

    @property
    def layers(self) -> Chain:
        """Return all of these layers."""
        found = [one for one in (self.embedding, self.dropout) if one]
        return Chain(*found, *(self.output.layers if self.output else ()))

    @property
    def parameters(self) -> tuple[list[Parameter], list[Parameter]]:
        """Return the parameters before and after the layers."""
        before, after = (end.parameters if end else [] for end in (self.embedding, self.output))
        return before, after

    @property
    def twins(self) -> tuple[Parameter, ...]:
        """Return the weight of a head that is tied to the table of the embedding here."""
        head = self.output and self.output.head
        return (head.weight,) if head and head.table is not None else ()


def build_ends(schedule: Schedule, stage: int, chunks: list[Transformer], vocab: int, tied: bool,
               **options: Any) -> StageEnds:
    """Build the ends of a stage of the mesh, a rank of the schedule, with its layers in `chunks`.

    `vocab` and `tied` are as for `mm3d.GPT`, other options those of
    `mm3d.model.cross_entropy.CrossEntropy`.
    """
    stages, stack = schedule.stages[stage], chunks[0].stack
    build, found, table = chunks[0].builder, {}, None
    architecture, hidden = stack.architecture, stack.hidden
    if 0 in stages:
        embedding = found["embedding"] = Embedding(
            build, vocab, stack.seq if architecture.positions == "learned" else None, hidden)
        first, table = chunks[stages.index(0)], embedding.weight    # with the key of its masks
        if first.dropout:
            drop = Dropout(first.outer, hidden, first.dropout, "dropout", first.mask_key)
            found["dropout"] = build.named(drop, "dropout", "dropout")
    if schedule.stage_count - 1 in stages:
        found["output"] = Output(build, vocab, hidden, tied, table, architecture, **options)
    return StageEnds(**found)


def check_scheme(scheme: Any, tied: bool) -> None:
    """Raise ValueError for a scheme without the layout of an embedding's table."""
    if not hasattr(scheme, "down_weight"):
        raise ValueError(f"scheme {scheme.name!r} has no down_weight: a {'tied ' * tied}GPT needs "
                         f"it, another scheme would do")


def check_vocabulary(vocab: int, label_smoothing: float, z_loss: float) -> None:
    """Raise ValueError for a vocabulary or factors of the loss that make no sense."""
    check_whole("vocab", vocab)
    if not (is_number(label_smoothing) and 0 <= label_smoothing < 1):
        raise ValueError(f"label_smoothing={label_smoothing!r} should be at least 0 and below 1")
    if not (is_number(z_loss) and 0 <= z_loss < math.inf):
        raise ValueError(f"z_loss={z_loss!r} should be a number of at least 0")
