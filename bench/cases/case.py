"""Cases: the rows of the paper at the sizes of a preset."""

import math
import random
from dataclasses import dataclass
from typing import Iterable, Mapping

from bench.cases import variants
from bench.cases.paper import Preset, Row, batch_of, load_tables, title
from bench.cases.variants import Variant
from bench.errors import UsageError, require_known
from mm3d import ModelSizes
from mm3d.model.stack import Stack


@dataclass(frozen=True)
class Case:
    """A row and the sizes that it is run with, of which those `overridden` were given by hand.

    `verified` are those of the model that is compared with the serial scheme: smaller where the
    preset limits them, since the serial model runs on one rank.
    """

    row: Row
    preset: str
    sizes: ModelSizes
    verified: ModelSizes
    overridden: tuple[str, ...] = ()
    variant: Variant = Variant()
    verb = ("run", "--rows")    # of bench, which takes selectors

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.row.gpus

    @property
    def selector(self) -> str:
        """Its name in the command line of a job, such as ``weak:3d:1d``."""
        return ":".join(filter(None, (self.row.table, self.row.scheme, self.row.like)))

    @property
    def name(self) -> str:
        """The beginning of a result's file name, such as ``weak-3d-p064-laptop``."""
        like = f"-as-{self.row.like}" * bool(self.row.like)
        return (f"{self.row.table}-{self.row.scheme}{like}-p{self.row.gpus:03d}-{self.preset}"
                f"{self.variant.slug}")

    @property
    def title(self) -> str:
        """The title in messages, such as ``weak 3-D 64 ranks``."""
        like = f", batch of {title(self.row.like)}" * bool(self.row.like)
        return (f"{self.row.table} {title(self.row.scheme)} {self.row.gpus} ranks{like}"
                f"{self.variant.label}")


def scaled_hidden(hidden: int, heads: int, divisor: int, rounding: str) -> int:
    """Divide `hidden` by `divisor`; round to a multiple of `heads`, at least `heads` itself."""
    size = hidden / divisor / heads
    return heads * max(1, math.ceil(size) if rounding == "up" else math.floor(size + 0.5))


def make_case(row: Row, preset: str, variant: Variant = Variant(),
              **overrides: int | None) -> Case:
    """Make the case of `row` under a preset of `load_tables`, with its sizes but for `overrides`.

    These are `layers`, `hidden`, `heads`, `batch` and `seq`; None for the preset's.  UsageError
    when the preset is unknown, or the sizes do not make a model.
    """
    chosen = require_known(load_tables().presets, preset, "preset").of_table(row.table)
    heads = load_tables().settings.heads[row.hidden]
    given = {name: value for name, value in overrides.items() if value is not None}
    sizes = ModelSizes(**{
        "layers": chosen.layers,
        "hidden": scaled_hidden(row.hidden, heads, chosen.hidden_divisor, chosen.rounding),
        "heads": heads,
        "batch": max(1, batch_of(row) // chosen.batch_divisor),
        "seq": chosen.seq} | given)
    for name, value in sizes.items():
        if value < 1:
            raise UsageError(f"--{name} {value}: must be at least 1")
    if sizes.hidden % sizes.heads:
        near = sizes.heads * max(1, round(sizes.hidden / sizes.heads))
        raise UsageError(f"--hidden {sizes.hidden}: must be a multiple of the {sizes.heads} "
                         f"heads, such as {near}")
    return Case(row, preset, sizes, _verified_sizes(chosen, sizes), tuple(sorted(given)), variant)


def _verified_sizes(preset: Preset, sizes: ModelSizes) -> ModelSizes:
    """Limit the sizes to the preset's ``verify_`` sizes."""
    def least(size: int, limit: int | None) -> int:
        return size if limit is None else min(size, limit)
    head_size = least(sizes.hidden // sizes.heads, preset.verify_head_size)
    return ModelSizes(least(sizes.layers, preset.verify_layers), sizes.heads * head_size,
                      sizes.heads, least(sizes.batch, preset.verify_batch),
                      least(sizes.seq, preset.verify_seq))


def shuffle_cases(cases: Iterable[Case], seed: int) -> list[Case]:
    """Return `cases` in an order drawn from `seed`; any selection of cases keeps the order."""
    return sorted(cases, key=lambda one: random.Random(f"{seed} {one.name}").random())


def check_verifiable(cases: list[Case]) -> None:
    """Raise UsageError when the results of a case could not be verified.

    Residuals, which check a model that is too large for one rank, are for 32 and 64 bits.
    """
    for one in cases:
        if one.verified != one.sizes and one.variant.dtype in variants.DTYPES_16_BIT:
            raise UsageError(f"--dtype {one.variant.dtype} --preset {one.preset}: a serial model "
                             f"of that size does not fit, and residuals of a step are for "
                             f"float32 and float64; choose --preset laptop or tiny")


def row_stack(variant: Variant, sizes: Mapping[str, int], recompute: str = "none",
              seed: int = 0) -> Stack:
    """Return layers of these sizes, in the variant's types and with its mask."""
    return Stack(**sizes, seed=seed, dtype=variant.dtype, causal=variant.causal,
                 recompute=recompute)
