"""The rows of the paper's tables, and the presets that scale them."""

import math
from functools import cache
from importlib import resources
from typing import Literal

import msgspec

from mm3d.schemes import registry

BASELINES = ("1d", "2d")    # the schemes that the paper compares its own with
PROPOSED = "3d"    # the paper's own scheme
PAPER = (*BASELINES, PROPOSED)    # the schemes of its tables
TITLES = {name: registry()[name].title
          for name in sorted(registry(), key=lambda name: (name not in PAPER, name))}
HEADINGS = {"weak": "Table 1, weak scaling", "strong": "Table 2, strong scaling"}


class Row(msgspec.Struct, array_like=True, frozen=True):
    """A row as the paper prints it, times in seconds; its times are NaN if the paper lacks it.

    If `like` names a scheme, the row is measured with that scheme's batch in the same table at the
    same ranks, so that both have the same number of tokens.
    """

    table: Literal["weak", "strong"]
    scheme: str
    gpus: int
    batch: int
    hidden: int
    forward: float
    backward: float
    average: float
    like: str = ""

    @property
    def key(self) -> tuple[str, str, int]:
        """Key of the row in the paper's tables: table, scheme, ranks."""
        return self.table, self.scheme, self.gpus

    @property
    def recomputed(self) -> float:
        """Average step time by the paper's equation 6, in seconds a sequence."""
        return (self.forward + self.backward) / self.batch

    @property
    def consistent(self) -> bool:
        """Whether the printed average agrees with `recomputed` to the printed digits."""
        return not self.published or abs(self.average - self.recomputed) < 0.001

    @property
    def published(self) -> bool:
        """Whether the paper has the row."""
        return not math.isnan(self.average)


class Assumptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes and dtypes that the paper does not state."""

    layers: int
    seq: int
    dtype: str
    heads: dict[int, int]


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Rules that turn a row's published sizes into measured ones, and limits of a measurement.

    A preset of an emulated cluster names it, and the machine whose work its ranks wait for.  That
    machine is shrunk by `shrink`, which also divides hidden size and sequence length.  Links and
    waits of a row are slowed until software takes `software_share` of a step.  `tables` overrides
    fields for the rows of one table.  `ranks` lists the rank counts that are reproduced by
    default; empty for all.  `minutes` is how long that takes on two cores, 0 where it is not
    known.
    """

    about: str
    layers: int
    seq: int
    hidden_divisor: int
    batch_divisor: int
    rounding: Literal["nearest", "up"]
    warmup: int
    repetitions: int
    max_repetitions: int
    max_seconds: float
    traced: int
    verify_layers: int | None = None
    verify_seq: int | None = None
    verify_batch: int | None = None
    verify_head_size: int | None = None
    cluster: str = ""
    machine: str = ""
    shrink: float = 1.0
    software_share: float = 0.0
    ranks: list[int] = []
    minutes: float = 0.0
    tables: dict[str, dict[str, int]] = {}

    def of_table(self, table: str) -> "Preset":
        """Return the preset for the rows of one table: its fields, overridden by `tables`."""
        return msgspec.structs.replace(self, **self.tables.get(table, {}))


class PaperTables(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of ``tables.toml``."""

    rows: list[Row]
    settings: Assumptions
    presets: dict[str, Preset]


def title(scheme: str) -> str:
    """Return the title of `scheme` in tables; its name if it is not registered."""
    return TITLES.get(scheme, scheme)


@cache
def load_tables() -> PaperTables:
    """Read the rows, settings and presets of ``tables.toml``, with their types checked."""
    text = resources.files("bench.cases").joinpath("tables.toml").read_bytes()
    return msgspec.toml.decode(text, type=PaperTables, strict=False)


def batch_of(row: Row) -> int:
    """Return the published batch that `row` is measured with: its own, or that of `like`."""
    if not row.like:
        return row.batch
    found = {other.key: other for other in load_tables().rows}.get((row.table, row.like, row.gpus))
    return (found or unpublished_row(row.table, row.like, row.gpus)).batch


def unpublished_row(table: str, scheme: str, ranks: int) -> Row:
    """Make a row that the paper does not have, with the sizes of a row of the table.

    That has the nearest number of ranks and, among equally near ones, the largest batch.
    """
    rows = [row for row in load_tables().rows if row.table == table]
    like = min(rows, key=lambda row: (abs(math.log(row.gpus / ranks)), -row.batch))
    return Row(table, scheme, ranks, like.batch, like.hidden, *[math.nan] * 3)
