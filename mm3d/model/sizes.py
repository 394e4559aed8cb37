"""Define the sizes of a Transformer, and check them."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Iterator

from mm3d.arrays.plain_numbers import PlainFields, check_whole
from mm3d.model.architecture import (FIELD, INNER_FACTOR, PLAIN, Architecture,
                                     check_architecture)


@dataclass(frozen=True)
class ModelSizes(PlainFields, Mapping[str, Any]):
    """Hold the sizes of a Transformer.

    It is a read-only mapping from names to sizes, so that ``Transformer(scheme, **sizes)`` and
    ``dict(sizes)`` work; an architecture other than the default is among them.

    Attributes
    ----------
    layers, hidden, heads : int
        Number of layers, features of the residual stream, attention heads.
    batch, seq : int
        Global number of sequences, and positions in each.
    architecture : Architecture
        What the layers compute; heads and perceptrons have sizes there.

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
    architecture: Architecture = PLAIN

    def __repr__(self) -> str:
        return f"ModelSizes({', '.join(f'{name}={self[name]!r}' for name in self)})"

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any]) -> "ModelSizes":
        """Return the sizes among `settings`, such as the configuration of a run.

        Raises
        ------
        KeyError
            When one is missing.
        """
        return cls(*(settings[name] for name in SIZES))

    def __getitem__(self, name: str) -> Any:
        if name not in (*SIZES, FIELD):
            raise KeyError(name)
        return getattr(self, name)

    def __iter__(self) -> Iterator[str]:
        yield from SIZES
        if self.architecture != PLAIN:
            yield FIELD

    def __len__(self) -> int:
        return len(SIZES) + (self.architecture != PLAIN)

    @property
    def tokens(self) -> int:
        """Return the number of positions in all sequences together."""
        return self.batch * self.seq

    @property
    def head(self) -> int:
        """Return the number of features of a head."""
        return self.architecture.head or self.hidden // self.heads

    @property
    def kv_heads(self) -> int:
        """Return the number of heads of keys and of values."""
        return self.architecture.kv_heads or self.heads

    @property
    def group(self) -> int:
        """Return the number of heads of queries that share one of keys and values."""
        return self.heads // self.kv_heads

    @property
    def inner(self) -> int:
        """Return the number of features between the products of a perceptron."""
        return self.architecture.inner or INNER_FACTOR * self.hidden

    def check(self) -> None:
        """Raise ValueError unless all sizes are at least 1, and those of heads fit."""
        for name in SIZES:
            check_whole(name, getattr(self, name))
        check_architecture(self.architecture)
        self.architecture.check_heads(self.hidden, self.heads)


SIZES = tuple(field.name for field in fields(ModelSizes) if field.name != FIELD)
