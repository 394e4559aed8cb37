"""State what the layers of a Transformer compute, beside their sizes, in 2019 and later.

The defaults are the Transformer of the paper.  Llama (Touvron et al., arXiv 2302.13971 and
2307.09288) and its relatives differ in the fields of `Architecture` alone:

>>> llama = mm3d.Architecture(norm="rms", positions="rotary", kv_heads=8, perceptron="swiglu",
...                           inner=14336, biases="none")
>>> mm3d.Model(layers=32, hidden=4096, heads=32, batch=1, seq=8192, vocab=128256,
...            architecture=llama).architecture.given()["kv_heads"]
8
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from mm3d.arrays.plain_numbers import PlainFields, is_number, is_whole
from mm3d.names import check_name

INNER_FACTOR = 4    # of the features between the products of a perceptron to the hidden ones
CHOICES = {"norm": ("layer", "rms"), "positions": ("learned", "rotary"),
           "perceptron": ("gelu", "swiglu"), "biases": ("all", "qkv", "none")}


@dataclass(frozen=True)
class Architecture(PlainFields):
    """State what the layers of a Transformer compute; the defaults are those of 2019.

    Attributes
    ----------
    norm : {"layer", "rms"}
        "layer" subtracts the mean, divides by the deviation and adds a bias; "rms" divides by the
        root of the mean square alone (Zhang and Sennrich, arXiv 1910.07467).
    epsilon : float
        Added to the variance, or to the mean square.
    positions : {"learned", "rotary"}
        "learned" adds a table's rows to the embedding; "rotary" has no table, and rotates queries
        and keys (Su et al., arXiv 2104.09864).
    rotary_base : float
        The base of the angles' frequencies, called theta elsewhere.
    rotary_scaling : tuple of float, optional
        Scaling of the frequencies as in Llama 3.1: factor, low, high, original, see
        `mm3d.model.rotary.frequencies`.
    kv_heads : int, optional
        Number of heads of keys and values, which divides the heads: each is shared by a group of
        neighbouring heads of queries, which stay together on a rank (Ainslie et al., arXiv
        2305.13245).  By default each head has its own.
    head : int, optional
        Features of a head; by default `hidden` divided by the heads.
    perceptron : {"gelu", "swiglu"}
        "gelu" is GELU(x W) V, "swiglu" is (SiLU(x W) * x U) V (Shazeer, arXiv 2002.05202).
        Experts compute the same.
    inner : int, optional
        Features between the products of the perceptron, and of each expert; by default
        4 x hidden.
    biases : {"all", "qkv", "none"}
        Which linear layers have biases: all, those of queries, keys and values alone, or none.
        The norm "layer" has its own in any case.
    window : int, optional
        To how many positions a position attends at most, itself and those just before it (Beltagy,
        Peters and Cohan, arXiv 2004.05150); by default to all before it.
    """

    norm: str = "layer"
    epsilon: float = 1e-5
    positions: str = "learned"
    rotary_base: float = 10000.0
    rotary_scaling: tuple[float, float, float, float] | None = None
    kv_heads: int | None = None
    head: int | None = None
    perceptron: str = "gelu"
    inner: int | None = None
    biases: str = "all"
    window: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.rotary_scaling, list):    # as files have it
            object.__setattr__(self, "rotary_scaling", tuple(self.rotary_scaling))
        super().__post_init__()

    @property
    def gates(self) -> int:
        """Return how many products up a perceptron has: 2 where one gates the other."""
        return 2 if self.perceptron == "swiglu" else 1

    def check(self) -> None:
        """Raise ValueError unless each field is possible, naming the first that is not."""
        for name, known in CHOICES.items():
            check_name(name, getattr(self, name), known)
        for name in ("kv_heads", "head", "inner", "window"):
            value = getattr(self, name)
            if value is not None and not is_whole(value):
                raise ValueError(f"{name}={value!r} should be a whole number of at least 1, or "
                                 f"None")
        for name, least in (("epsilon", 0), ("rotary_base", 1)):
            value = getattr(self, name)
            if not is_number(value) or not least < value < math.inf:
                raise ValueError(f"{name}={value!r} should be a number above {least}")
        self._check_scaling()

    def _check_scaling(self) -> None:
        """Raise ValueError unless the scaling of frequencies is possible."""
        found = self.rotary_scaling
        if found is None:
            return
        if (not isinstance(found, tuple) or len(found) != 4 or not all(map(is_number, found))
                or not (found[0] >= 1 and 0 < found[1] < found[2] and found[3] >= 1)):
            raise ValueError(f"rotary_scaling={found!r} should be (factor, low, high, original) "
                             f"with a factor of at least 1 and low below high, such as "
                             f"(8.0, 1.0, 4.0, 8192), or None")
        if self.positions != "rotary":
            raise ValueError(f"rotary_scaling={found!r} has no effect on positions="
                             f"{self.positions!r}: positions='rotary' would do")

    def check_heads(self, hidden: int, heads: int) -> None:
        """Raise ValueError unless so many heads, of `hidden` features together, can be made."""
        if self.head is None and hidden % heads:
            below, above = hidden // heads * heads, (hidden // heads + 1) * heads
            near = f"hidden={below} or hidden={above}" if below else f"hidden={above}"
            raise ValueError(f"hidden={hidden} cannot be divided among heads={heads} of equal "
                             f"size: {near} would do")
        if self.kv_heads is not None and heads % self.kv_heads:
            near = [n for n in range(1, heads + 1) if not heads % n]
            raise ValueError(f"kv_heads={self.kv_heads} does not divide heads={heads}: "
                             f"{', '.join(map(str, near))} would do")
        head = self.head or hidden // heads
        if self.positions == "rotary" and head % 2:
            raise ValueError(f"positions='rotary' rotates pairs of features, and a head has "
                             f"{head}: an even number would do")

    def require_plain(self, who: str) -> None:
        """Raise ValueError unless this is the Transformer of 2019, which alone `who` knows."""
        if self != PLAIN:
            raise ValueError(f"{who} knows no Transformer with "
                             f"{', '.join(f'{k}={v!r}' for k, v in self.given().items())}: the "
                             f"default architecture would do")


PLAIN = Architecture()
FIELD = "architecture"    # what it is called in the classes that have one


def gather_architecture(given: Mapping[str, Any], before: Architecture = PLAIN) -> dict[str, Any]:
    """Return fields by name, with those of an `Architecture` replaced by one such value.

    Those that are given change `before`, unless `FIELD` is `given` too.
    """
    names = [one.name for one in fields(Architecture)]
    found = {name: value for name, value in given.items() if name not in names}
    own = {name: given[name] for name in names if name in given}
    if own:
        start = found.get(FIELD, before)
        check_architecture(start)
        found[FIELD] = replace(start, **own)
    return found


def check_architecture(found: Any) -> None:
    """Raise ValueError unless what is `found` is an `Architecture`, and possible."""
    if not isinstance(found, Architecture):
        raise ValueError(f"architecture={found!r} should be mm3d.Architecture(...), such as "
                         f"mm3d.Architecture(norm='rms')")
    found.check()
