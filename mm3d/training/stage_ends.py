"""Build what stands around the layers of a GPT in one stage."""

from dataclasses import dataclass
from typing import Any

from mm3d.model.chains import Chain
from mm3d.model.dropout import Dropout
from mm3d.model.embedding import Embedding
from mm3d.model.gpt_ends import Output
from mm3d.model.gpt_spec import dropout_specs, embedding_spec
from mm3d.model.parameters import Parameter
from mm3d.model.transformer import Transformer
from mm3d.training.schedules import Schedule


@dataclass(frozen=True)
class StageEnds:
    """Hold the layers of a stage that are none of the Transformer's.

    Attributes
    ----------
    embedding, dropout : Embedding, Dropout
        In the stage with the first layer; None elsewhere, and without dropout.
    output : Output or None
        In the stage with the last layer.
    """

    embedding: Embedding | None = None
    dropout: Dropout | None = None
    output: Output | None = None

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


def build_ends(schedule: Schedule, stage: int, chunks: list[Transformer], vocab: int, tied: bool,
               **options: Any) -> StageEnds:
    """Build the ends of a stage.

    Parameters
    ----------
    schedule : Schedule
        The schedule.
    stage : int
        The stage of the mesh, or rank of the schedule.
    chunks : list of Transformer
        Its layers.
    vocab, tied
        As for `mm3d.GPT`.
    **options
        Those of the loss, see `mm3d.model.gpt_spec.output_specs`.
    """
    stages, (_, seq, hidden) = schedule.stages[stage], chunks[0].shape
    builder, found = chunks[0].builder, {}
    if 0 in stages:
        found["embedding"], = builder.build_layers([embedding_spec(vocab, seq, hidden)])
        first = chunks[stages.index(0)]    # has the key of its masks
        if first.dropout:
            found["dropout"], = first.builder.build_layers(dropout_specs(hidden, first.dropout))
    if schedule.stage_count - 1 in stages:
        found["output"] = Output(builder, vocab, hidden, tied, **options)
    return StageEnds(**found)
