"""State a stack of layers: what `mm3d.Transformer` computes, in which types."""

from dataclasses import MISSING, dataclass, fields
from typing import Any, Iterable, Mapping, Self, TypeVar

from mm3d.arrays.plain_numbers import PlainFields
from mm3d.model.architecture import FIELD, PLAIN, Architecture, gather_architecture
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.sizes import SIZES, ModelSizes

Made = TypeVar("Made")


@dataclass(frozen=True)
class Stack(PlainFields):
    """State the layers of a Transformer, and the batch that it takes.

    Attributes
    ----------
    layers, hidden, heads, batch, seq : int
        As in `mm3d.ModelSizes`.
    seed : int
        Seed of the initial parameters, of `mm3d.Transformer.random`, and of the masks of dropout.
    dtype : {"float64", "float32", "float16", "bfloat16"}
        Type of parameters, gradients and activations; "bfloat16" needs the package ml_dtypes.
    causal : bool
        Whether a position attends only to itself and those before it.
    master : {None, "float32"}
        For types of 16 bits: "float32" adds a float32 master copy of every parameter, which an
        optimizer changes (``p.master -= ...``, then `refresh`), and which `state` returns and
        `load` sets.  Gradients are then computed, summed over the ranks and accumulated in
        float32; scaling the loss is left to the caller.
    recompute : str
        Name of the policy of recomputation, see `mm3d.model.recomputation`.  Results are the same
        to the bit.  With every policy but "none", backward reads the input of forward once more,
        so the caller must not change it before.
    dropout : float
        Probability that an element of a residual branch is dropped before it is added.  Masks are
        keyed by the seed, ``mask_key.place``, and the global position, so they are the same on
        every grid.
    experts : ExpertOptions, optional
        Options of experts, which some layers have in place of the perceptron, see
        `mm3d.model.experts`.  The gradients of the router's losses are added by `backward`, times
        ``routings.scale``.
    architecture : Architecture
        What the layers compute; its fields are keywords too, wherever those of a stack are.
    """

    layers: int
    hidden: int
    heads: int
    batch: int
    seq: int
    seed: int = 0
    dtype: str = "float32"
    causal: bool = False
    master: str | None = None
    recompute: str = "none"
    dropout: float = 0.0
    experts: ExpertOptions | None = None
    architecture: Architecture = PLAIN

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Self:
        """Return the stack with the given fields; TypeError for unknown and missing ones."""
        return make_of_fields(given, "Transformer", cls)[0]

    def fields(self) -> dict[str, Any]:
        """Return all fields by name."""
        return dict(vars(self))

    @property
    def sizes(self) -> ModelSizes:
        """Return the sizes, with the architecture."""
        return ModelSizes(*(getattr(self, name) for name in SIZES), self.architecture)


def make_of_fields(given: Mapping[str, Any], owner: str, *kinds: type[Made]) -> list[Made]:
    """Make dataclasses of one mapping from the names of their fields to values.

    Each value that is `given` goes to the first of the `kinds` that has such a field.  Where one
    of them has an architecture, the fields of `Architecture` may be given too.  Raises TypeError,
    in the name of the `owner`, for a name that is no field, and for fields without a default that
    are missing.
    """
    names = [field_names(kind) for kind in kinds]
    every = [name for some in names for name in some]
    if FIELD in every:
        given = gather_architecture(given)
    for name, value in given.items():
        if name not in every:
            raise TypeError(f"{owner}: {name}={value!r}: there is no such field: "
                            f"{', '.join(sorted(set(every)))} would do")
    missing = [one.name for kind in kinds for one in fields(kind)
               if one.default is MISSING and one.name not in given]
    if missing:
        raise TypeError(f"{owner}: sizes are missing: {', '.join(missing)}")
    found, left = [], dict(given)
    for kind, some in zip(kinds, names):
        found.append(kind(**{name: left.pop(name) for name in [*left] if name in some}))
    return found


def field_names(kind: type) -> Iterable[str]:
    """Return the names of the fields of a dataclass, in order."""
    return [one.name for one in fields(kind)]
