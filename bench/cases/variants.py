"""Variants of the tables' rows: options, dtypes and waits that the paper did not measure.

A row of a variant is not a row of the tables: file names, titles, tables, figures and comparisons
keep each variant apart from the plain rows and from the others.
"""

from dataclasses import dataclass, fields
from typing import Any, Iterable, Mapping

import numpy as np

from bench.errors import UsageError
from mm3d.arrays.backend import DTYPES, Backend
from mm3d.arrays.plain_numbers import PlainFields, said
from mm3d.model.recomputation import parse_policy
from mm3d.schemes import find_scheme, registry
from mm3d.schemes.scheme import Option

PLAIN_DTYPE = "float32"    # the dtype of the tables' rows
WORK = ("compute", "wait")    # ranks compute between collectives, or wait for the modelled seconds
DTYPES_16_BIT = ("float16", "bfloat16")
VARIANT_DTYPES = tuple(dict.fromkeys([PLAIN_DTYPE, *DTYPES, *DTYPES_16_BIT]))


@dataclass(frozen=True)
class Variant(PlainFields):
    """Options in which a row differs from the tables' rows, which are called plain."""

    keep: str = said("gathered operands that {schemes} keeps from forward for backward", "none",
                     choices=("none", "weight", "both"))
    overlap: int = said("let {schemes} communicate while ranks multiply; with a number, 2, 4 or "
                        "8, activations too, in so many panels of rows", 0, letter="PANELS",
                        bare=1, choices=(1, 2, 4, 8), nothing="")
    causal: bool = said("let tokens attend to themselves and earlier ones only", False)
    dtype: str = said("dtype of all arrays; bfloat16 needs the package ml_dtypes", PLAIN_DTYPE,
                      choices=VARIANT_DTYPES)
    tf32: bool = said("round the factors of float32 products to TensorFloat-32", False, option="")
    work: str = said(
        "what ranks do between collectives: compute, or wait for the seconds that a machine model "
        "gives their work, with the core given away", "compute", choices=WORK)

    @property
    def words(self) -> list[str]:
        """The options in words, such as "keep both" and "causal"; none for plain rows."""
        return [*[f"keep {self.keep}"] * (self.keep != "none"),
                *["overlap" + f" {self.overlap}" * (self.overlap > 1)] * bool(self.overlap),
                *["causal"] * self.causal,
                *[self.dtype] * (self.dtype != PLAIN_DTYPE), *["TF32"] * self.tf32,
                *["waited work"] * self.waits]

    @property
    def label(self) -> str:
        """The end of a row's title or of a preset's name; empty for plain rows."""
        return "".join(f", {word}" for word in self.words)

    @property
    def slug(self) -> str:
        """The label as part of a file's name."""
        return "".join("-" + word.replace(" ", "-").lower() for word in self.words)

    @property
    def waits(self) -> bool:
        """Whether ranks wait for the modelled seconds of their work instead of computing."""
        return self.work == "wait"

    @property
    def rounding(self) -> str:
        """Precision of the products: the dtype, or "tf32"."""
        return "tf32" if self.tf32 else self.dtype

    def options(self, scheme: str) -> dict[str, Any]:
        """Return the keyword arguments of `mm3d.scheme`."""
        return {name: value for name, value in (("keep", self.keep), ("overlap", self.overlap))
                if name in find_scheme(scheme).options}

    def arguments(self) -> list[str]:
        """Return the command line's options for this variant, without TF32."""
        return [f"--{name}" + f"={value}" * (value not in (True, 1))
                for name, value in self.given().items() if name != "tf32"]


def schemes_with_option(option: str) -> dict[str, Option]:
    """Return the schemes that have an option of this name, with their descriptions of it."""
    return {name: cls.options[option] for name, cls in registry().items() if option in cls.options}


def recorded_variant(configuration: Mapping[str, Any]) -> Variant:
    """Return the variant that a file records; options that it lacks have their defaults."""
    return Variant(**{field.name: type(field.default)(configuration.get(field.name, field.default))
                      for field in fields(Variant)})


def check_variant(variant: Variant, schemes: Iterable[str], backend: Backend | None = None,
                  recompute: str | None = None) -> None:
    """Raise UsageError when rows of `schemes`, or a backend, cannot have a variant and policy."""
    if variant.keep != "none" and recompute and parse_policy(recompute).selective:
        raise UsageError(f"--keep {variant.keep} --recompute {recompute}: selective keeps nothing "
                         f"that products gather; leave one of them out, or choose --recompute "
                         f"full")
    for name, flag in (("keep", f"--keep {variant.keep}"), ("overlap", "--overlap")):
        if getattr(variant, name) == getattr(Variant(), name):
            continue
        able = schemes_with_option(name)
        unable = [scheme for scheme in dict.fromkeys(schemes) if scheme not in able]
        if unable:
            raise UsageError(f"{flag}: scheme {', '.join(map(repr, unable))} has no such option; "
                             f"choose --scheme {','.join(able)}")
    if variant.waits and backend and not backend.host_buffers:
        raise UsageError(f"--work wait: backend {backend.name!r} holds arrays on a device, and "
                         f"what is moved lies in host memory; choose --backend numpy")
    known = backend and (*DTYPES, *map(str, backend.more_dtypes))
    if known and variant.dtype not in known:
        raise UsageError(f"--dtype {variant.dtype}: backend {backend.name!r} has no such type "
                         f"here; choose one of {', '.join(known)}, or pip install ml_dtypes for "
                         f"bfloat16")


def itemsize(dtype: str) -> int:
    """Return the bytes of a number, also of bfloat16, which NumPy does not know."""
    return 2 if dtype in DTYPES_16_BIT else np.dtype(dtype).itemsize
