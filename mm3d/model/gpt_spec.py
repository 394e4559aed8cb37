"""Define the spec of a GPT: embedding, Transformer layers, norm, head and loss."""

from typing import Any, Mapping

from mm3d.model.chain_specs import ChainSpec, ModelSpec
from mm3d.model.dropout import DropoutSpec
from mm3d.model.layer_specs import LayerNormSpec
from mm3d.model.specs import LayerSpec
from mm3d.model.token_specs import CrossEntropySpec, EmbeddingSpec, HeadSpec
from mm3d.model.transformer_spec import model_spec


def gpt_spec(sizes: Mapping[str, int], vocab: int, tied: bool = True, recompute: str = "none",
             label_smoothing: float = 0.0, z_loss: float = 0.0, ignored: int = -1,
             dropout: float = 0.0, **options: Any) -> ModelSpec:
    """Return the spec of a GPT, without ranks and arrays.

    Parameters
    ----------
    sizes : ModelSizes
        Sizes of its Transformer, and of one micro-batch.
    vocab : int
        Number of tokens.
    tied : bool
        Whether the head uses the embedding's table.
    recompute, label_smoothing, z_loss, ignored, dropout
        As for `mm3d.GPT`; the ends are not recomputed.
    **options
        As for `mm3d.model_spec`.
    """
    model = model_spec(sizes, causal=True, recompute=recompute, dropout=dropout, **options)
    return ModelSpec(model.batch, model.seq, model.hidden, ChainSpec((
        embedding_spec(vocab, model.seq, model.hidden), *dropout_specs(model.hidden, dropout),
        *model.chain.layers,
        *output_specs(vocab, model.hidden, tied, ignored, label_smoothing, z_loss))))


def embedding_spec(vocab: int, seq: int, hidden: int) -> EmbeddingSpec:
    """Return the spec of the layer before the Transformer's."""
    return EmbeddingSpec("embedding", vocab, seq, hidden)


def dropout_specs(hidden: int, dropout: float) -> list[DropoutSpec]:
    """Return the spec of the dropout after the embedding; none where nothing is dropped."""
    return [DropoutSpec("dropout", hidden, dropout)] if dropout else []


def output_specs(vocab: int, hidden: int, tied: bool, ignored: int = -1,
                 label_smoothing: float = 0.0, z_loss: float = 0.0,
                 copied: bool = False) -> tuple[LayerSpec, ...]:
    """Return the specs of the layers after the Transformer's: norm, head and loss.

    `copied` says that the stage of a tied head has no embedding, but a copy of the table.
    """
    return (LayerNormSpec("norm", hidden), HeadSpec("head", hidden, vocab, tied, copied),
            CrossEntropySpec("loss", vocab, ignored, label_smoothing, z_loss))
