"""Define the sizes of a Transformer, and check them."""

import numbers
from collections.abc import Mapping
from dataclasses import astuple, dataclass, fields
from typing import Any, ClassVar, Iterator

from mm3d.arrays.plain_numbers import keep_plain_numbers


@dataclass(frozen=True)
class ModelSizes(Mapping[str, int]):
    """Hold the sizes of a Transformer.

    It is a read-only mapping from names to sizes, so that ``Transformer(scheme, **sizes)`` and
    ``dict(sizes)`` work.

    Attributes
    ----------
    layers, hidden, heads : int
        Number of layers, features of the residual stream, attention heads.
    batch, seq : int
        Global number of sequences, and positions in each.
    mlp_factor : int
        Ratio of the inner features of the multi-layer perceptron to `hidden`, for all models.

    Examples
    --------
    >>> sizes = ModelSizes(layers=2, hidden=48, heads=4, batch=8, seq=16)
    >>> sizes.tokens, sizes["hidden"]
    (128, 48)
    """

    layers: int
    hidden: int
    heads: int
    batch: int
    seq: int
    mlp_factor: ClassVar[int] = 4

    def __post_init__(self) -> None:
        keep_plain_numbers(self)

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "ModelSizes":
        """Return the sizes among `settings`, such as the configuration of a run.

        Raises
        ------
        KeyError
            When one is missing.
        """
        return cls(*(settings[name] for name in SIZES))

    def __getitem__(self, name: str) -> int:
        if name not in SIZES:
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        return iter(SIZES)

    def __len__(self) -> int:
        return len(SIZES)

    @property
    def tokens(self) -> int:
        """Return the number of positions in all sequences together."""
        return self.batch * self.seq

    def check(self) -> None:
        """Raise ValueError unless all sizes are at least 1 and the heads have equal features."""
        for name, size in zip(SIZES, astuple(self)):
            if not isinstance(size, numbers.Integral) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}={size!r} should be a whole number of at least 1")
        hidden, heads = self.hidden, self.heads
        if hidden % heads:
            below, above = hidden // heads * heads, (hidden // heads + 1) * heads
            near = f"hidden={below} or hidden={above}" if below else f"hidden={above}"
            raise ValueError(f"hidden={hidden} cannot be divided among heads={heads} of equal "
                             f"size: {near} would do")


SIZES = tuple(field.name for field in fields(ModelSizes))
