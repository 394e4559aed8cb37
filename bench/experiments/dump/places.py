"""Name the tensors of a training step, in the order in which they are computed.

All names are those of Hugging Face's files: a tensor's own name for weights and gradients, and a
module's name for its output.
"""

from dataclasses import dataclass

from mm3d.config import Model
from mm3d.hugging_face.names import GPT2_PREFIXES, LLAMA_PREFIXES
from mm3d.pretrained.loading import model_pieces

# Files of a dump, by the kind of their tensors; scalars are in a file together.
FILES = {"mask": "masks", "activation": "activations",
         "activation gradient": "activation_gradients", "gradient": "gradients",
         "weight after": "weights_after"}
SCALARS, LOSS, NORM = "scalars", "loss", "norm"


@dataclass(frozen=True)
class TensorId:
    """Name a tensor of a step: its kind, a key of `FILES`, "loss" or "norm"; and its name.

    `rank` is that of a copy which differs from those of earlier ranks, and else 0.
    """

    kind: str
    name: str = ""
    rank: int = 0

    @classmethod
    def of(cls, kind: str, name: str) -> "TensorId":
        """Return the place of a name in a dump, which may be NAME@RANK."""
        name, _, rank = name.partition("@")
        return cls(kind, name, int(rank or 0))

    @property
    def first(self) -> "TensorId":
        """Return the place that this copies."""
        return TensorId(self.kind, self.name)

    def __str__(self) -> str:
        return f"{self.kind} {self.name}".strip() + f" of rank {self.rank}" * bool(self.rank)


def border_names(family: str, layers: int) -> list[str]:
    """Return the modules whose outputs are borders of layers, in order.

    These are the embedding with dropout, each layer, the last norm, and the head: the logits.
    """
    gpt2 = family == "gpt2"
    root, block = GPT2_PREFIXES if gpt2 else LLAMA_PREFIXES
    first, last = ("drop", "ln_f") if gpt2 else ("embed_tokens", "norm")
    return [root + first, *(f"{root}{block}{number}" for number in range(layers)), root + last,
            "lm_head"]


def mask_names(layers: int) -> dict[str, str]:
    """Return the modules of GPT-2 that drop elements, by the names of their layers here."""
    found = {"dropout": "transformer.drop"}
    for number in range(layers):
        found |= {f"layers.{number}.attention": f"transformer.h.{number}.attn.resid_dropout",
                  f"layers.{number}.mlp": f"transformer.h.{number}.mlp.dropout"}
    return found


def tensor_names(family: str, model: Model) -> dict[str, list[str]]:
    """Return the names of the tensors of each parameter, in the order of the model."""
    return {name: list(dict.fromkeys(piece.tensor for piece in pieces))
            for name, pieces in model_pieces(family, model).items()}


def in_order(family: str, model: Model) -> list[TensorId]:
    """Return all tensors of a step in the order in which they are computed.

    Masks and activations forward, the loss, gradients backward, the norm, and weights afterwards.
    The gradient of a tied table is last of all, as the embedding adds to it.
    """
    borders, names = border_names(family, model.layers), tensor_names(family, model)
    forward = [TensorId("mask", name) for name in mask_names(model.layers).values()]
    forward += [TensorId("activation", name) for name in borders]
    groups = {name: [] for name in borders}
    for parameter, tensors in names.items():
        groups[_border_of(parameter, borders)] += tensors
    backward = [place for border in reversed(borders) for place in (
        TensorId("activation gradient", border),
        *(TensorId("gradient", tensor) for tensor in reversed(groups[border])))]
    after = [TensorId("weight after", tensor) for tensors in names.values() for tensor in tensors]
    return [*forward, TensorId(LOSS), *backward, TensorId(NORM), *after]


def _border_of(parameter: str, borders: list[str]) -> str:
    """Return the border after a parameter's layer."""
    part, _, rest = parameter.partition(".")
    if part == "layers":
        return borders[1 + int(rest.partition(".")[0])]
    return borders[{"embedding": 0, "positions": 0, "norm": -2, "head": -1}[part]]
