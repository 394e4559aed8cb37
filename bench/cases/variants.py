"""Variants: how the model of a row may be computed otherwise than in the paper's tables.

A row of a variant is no row of the tables: file names, titles, tables, figures and comparisons
keep each variant apart from the plain rows and from the others.
"""

from dataclasses import dataclass, fields
from typing import Any, Iterable, Mapping

import numpy as np

from mm3d.arrays.backend import Backend
from mm3d.model.recomputation import parse_policy
from mm3d.model.transformer import DTYPES
from mm3d.schemes import find_scheme, registry
from mm3d.schemes.scheme import Option

PLAIN = "float32"    # the dtype of the tables
SIXTEEN = ("float16", "bfloat16")
KNOWN = tuple(dict.fromkeys([PLAIN, *DTYPES, *SIXTEEN]))


@dataclass(frozen=True)
class Variant:
    """What differs from the plain rows.

    Attributes
    ----------
    keep : {"none", "weight", "both"}
        Gathered operands that stay from forward to backward, of schemes that have this option.
    overlap : bool
        Whether communication goes on while ranks multiply, of such schemes.
    causal : bool
        Whether attention looks backward only.
    dtype : str
        Of every array.
    tf32 : bool
        Whether float32 products may round their factors to TensorFloat-32.
    """

    keep: str = "none"
    overlap: bool = False
    causal: bool = False
    dtype: str = PLAIN
    tf32: bool = False

    @property
    def words(self) -> list[str]:
        """Such as "keep both", "causal" and "float16"; none for the plain rows."""
        return [*[f"keep {self.keep}"] * (self.keep != "none"), *["overlap"] * self.overlap,
                *["causal"] * self.causal, *[self.dtype] * (self.dtype != PLAIN),
                *["TF32"] * self.tf32]

    @property
    def label(self) -> str:
        """What follows a row's title or a preset's name; nothing for the plain rows."""
        return "".join(f", {word}" for word in self.words)

    @property
    def slug(self) -> str:
        """The same in the name of a file."""
        return "".join("-" + word.replace(" ", "-").lower() for word in self.words)

    @property
    def rounding(self) -> str:
        """What numbers are rounded to: the dtype, or "tf32"."""
        return "tf32" if self.tf32 else self.dtype

    def options(self, scheme: str) -> dict[str, Any]:
        """Keyword arguments of `mm3d.scheme`."""
        return {name: value for name, value in (("keep", self.keep), ("overlap", self.overlap))
                if name in find_scheme(scheme).options}

    def arguments(self) -> list[str]:
        """The options of the command line that give this variant, but for TF32."""
        return [*[f"--keep={self.keep}"] * (self.keep != "none"), *["--overlap"] * self.overlap,
                *["--causal"] * self.causal, *[f"--dtype={self.dtype}"] * (self.dtype != PLAIN)]


def schemes_with_option(option: str) -> dict[str, Option]:
    """Return the schemes that have an option of this name, with their descriptions of it."""
    return {name: cls.options[option] for name, cls in registry().items() if option in cls.options}


def recorded_variant(configuration: Mapping[str, Any]) -> Variant:
    """The variant that a file is of; files of before have the default of what they lack."""
    return Variant(**{field.name: type(field.default)(configuration.get(field.name, field.default))
                      for field in fields(Variant)})


def problem(variant: Variant, schemes: Iterable[str], backend: Backend | None = None,
            recompute: str | None = None) -> str:
    """Why rows of `schemes` cannot be of this variant, with this policy; empty when they can."""
    if variant.keep != "none" and recompute and parse_policy(recompute).selective:
        return (f"--keep {variant.keep} --recompute {recompute}: selective keeps nothing that "
                f"products gather; leave one of them out, or choose --recompute full")
    for name, flag in (("keep", f"--keep {variant.keep}"), ("overlap", "--overlap")):
        if getattr(variant, name) == getattr(Variant(), name):
            continue
        able = schemes_with_option(name)
        unable = [scheme for scheme in dict.fromkeys(schemes) if scheme not in able]
        if unable:
            return (f"{flag}: scheme {', '.join(map(repr, unable))} has no such option; choose "
                    f"--scheme {','.join(able)}")
    known = backend and (*DTYPES, *map(str, backend.more_dtypes))
    if known and variant.dtype not in known:
        return (f"--dtype {variant.dtype}: backend {backend.name!r} has no such type here; choose "
                f"one of {', '.join(known)}" + ", or --backend cupy, on a GPU" * (
                    backend.name == "numpy"))
    return ""


def itemsize(dtype: str) -> int:
    """Bytes of a number, also of bfloat16, which NumPy does not know."""
    return 2 if dtype in SIXTEEN else np.dtype(dtype).itemsize
