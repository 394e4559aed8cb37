"""The cases: which rows the paper's tables have, and with what sizes a preset runs them."""

import math
import random
from functools import cache
from importlib import resources
from typing import Iterable, Literal

import msgspec

import mm3d
from bench.variants import Variant
from mm3d import ModelSizes

BASELINES = ("1d", "2d")    # the schemes that the paper compares with
PROPOSED = "3d"    # and its own
PAPER = (*BASELINES, PROPOSED)    # all that its tables have
TITLES = {name: mm3d.SCHEMES[name].title
          for name in sorted(mm3d.SCHEMES, key=lambda name: (name not in PAPER, name))}
HEADINGS = {"weak": "Table 1, weak scaling", "strong": "Table 2, strong scaling"}


class UsageError(ValueError):
    """An argument that cannot be meant; the same on every rank, before any communication."""


class Row(msgspec.Struct, array_like=True, frozen=True):
    """A row as the paper prints it; times in seconds, NaN in a row that it does not have.

    Where `like` names a scheme, the row is measured with the batch of that scheme's row of the
    same table and ranks, so that both have equally many tokens.
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
        """Which row of the paper's it is: table, scheme, ranks."""
        return self.table, self.scheme, self.gpus

    @property
    def recomputed(self) -> float:
        """Average step time by the paper's equation 6, in seconds per sequence."""
        return (self.forward + self.backward) / self.batch

    @property
    def consistent(self) -> bool:
        """Whether the printed average is the recomputed one, to the digits printed."""
        return not self.published or abs(self.average - self.recomputed) < 0.001

    @property
    def published(self) -> bool:
        """Whether the paper has it."""
        return not math.isnan(self.average)


class Assumptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Sizes and types that the paper leaves open."""

    layers: int
    seq: int
    dtype: str
    heads: dict[int, int]


class Preset(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How the sizes of a row become the sizes that are run."""

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


class Cases(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of ``tables.toml``."""

    rows: list[Row]
    settings: Assumptions
    presets: dict[str, Preset]


class Case(msgspec.Struct, frozen=True):
    """A row with the sizes it is run at.

    Attributes
    ----------
    row : Row
        What was published.
    preset : str
        Which preset the sizes are from.
    sizes : ModelSizes
        Of the model that is measured.
    verified : ModelSizes
        Of the model that is compared with the serial scheme; `sizes` unless the preset says
        that a serial model cannot be that large.
    overridden : tuple of str
        The sizes that were given by hand instead of by the preset.
    variant : Variant
        How it is computed otherwise than the tables' rows.
    """

    row: Row
    preset: str
    sizes: ModelSizes
    verified: ModelSizes
    overridden: tuple[str, ...] = ()
    variant: Variant = Variant()

    @property
    def name(self) -> str:
        """Such as ``weak-3d-p064-laptop``: the beginning of a result's file name."""
        like = f"-as-{self.row.like}" * bool(self.row.like)
        return (f"{self.row.table}-{self.row.scheme}{like}-p{self.row.gpus:03d}-{self.preset}"
                f"{self.variant.slug}")

    @property
    def title(self) -> str:
        """Such as ``weak 3-D 64 ranks``."""
        like = f", batch of {title(self.row.like)}" * bool(self.row.like)
        return (f"{self.row.table} {title(self.row.scheme)} {self.row.gpus} ranks{like}"
                f"{self.variant.label}")


def title(scheme: str) -> str:
    """What tables call `scheme`; its name when it is not known here."""
    return TITLES.get(scheme, scheme)


@cache
def load() -> Cases:
    """The rows, settings and presets of ``tables.toml``, checked."""
    text = resources.files("bench").joinpath("tables.toml").read_bytes()
    return msgspec.toml.decode(text, type=Cases, strict=False)


def scaled_hidden(hidden: int, heads: int, divisor: int, rounding: str) -> int:
    """`hidden` over `divisor` as a multiple of `heads`, at least one element a head."""
    size = hidden / divisor / heads
    return heads * max(1, math.ceil(size) if rounding == "up" else math.floor(size + 0.5))


def case(row: Row, preset: str, variant: Variant = Variant(),
         **overrides: int | None) -> Case:
    """The case that `row` is under `preset`.

    Parameters
    ----------
    row : Row
        Which row.
    preset : str
        One of ``load().presets``.
    variant : Variant
        How it is computed.
    **overrides : int or None
        Sizes to run instead of the preset's: `layers`, `hidden`, `heads`, `batch`, `seq`.

    Raises
    ------
    UsageError
        When the preset is unknown or the sizes make no model.
    """
    chosen = _one_of(load().presets, preset, "preset")
    heads = load().settings.heads[row.hidden]
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
    return Case(row, preset, sizes, _verified(chosen, sizes), tuple(sorted(given)), variant)


def batch_of(row: Row) -> int:
    """The published batch that `row` is measured with: its own, or that of the row `like` it."""
    if not row.like:
        return row.batch
    found = {other.key: other for other in load().rows}.get((row.table, row.like, row.gpus))
    return (found or own(row.table, row.like, row.gpus)).batch


def equal_tokens(rows: Iterable[Row]) -> list[Row]:
    """What makes the 3-D rows and the others on as many ranks comparable at equal batches.

    Each of a pair of the tables' rows whose batches differ, measured with the batch of the other
    too, if it is one of `rows`.
    """
    rows, more = list(rows), []
    known = [row for row in dict.fromkeys([*rows, *load().rows]) if not row.like]
    for cube in (row for row in known if row.scheme == PROPOSED):
        for other in known:
            if (other.table, other.gpus) == (cube.table, cube.gpus) and other.batch != cube.batch:
                more += [msgspec.structs.replace(one, like=like) for one, like in (
                    (other, PROPOSED), (cube, other.scheme)) if one in rows]
    return list(dict.fromkeys(more))


def select(tables: str = "all", schemes: str = "all", ranks: int | None = None) -> list[Row]:
    """The rows of some tables and schemes: the paper's in its order, then `own` ones.

    Parameters
    ----------
    tables, schemes : str
        Names with commas between them, or "all": for schemes, those that the paper has.
    ranks : int, optional
        For how many ranks a scheme that the paper lacks has rows; by default for each of the
        table's rank counts that fits the scheme.

    Raises
    ------
    UsageError
        When a name is unknown.
    """
    wanted_tables = _names(tables, list(HEADINGS), "--table")
    wanted_schemes = PAPER if schemes == "all" else _names(schemes, list(TITLES), "--scheme")
    rows = [row for row in load().rows
            if row.table in wanted_tables and row.scheme in wanted_schemes]
    return rows + [own(table, scheme, count) for table in wanted_tables
                   for scheme in wanted_schemes if scheme not in PAPER
                   for count in ([ranks] if ranks else _fitting(table, scheme))]


def named(pairs: str, ranks: int) -> list[Row]:
    """The rows called ``weak:3d,strong:1d``; of a scheme that the paper lacks on so many ranks.

    ``weak:3d:1d`` is the row of 3-D with the batch of that of 1-D.  Each is there once, however
    often it is called.

    Raises
    ------
    UsageError
        When a name is unknown, or no pair.
    """
    found = []
    for pair in pairs.split(","):
        table, colon, scheme = pair.partition(":")
        if not colon:
            raise UsageError(f"--rows {pair}: give a table and a scheme, as in weak:3d")
        scheme, colon, like = scheme.partition(":")
        if colon:
            _one_of(TITLES, like, "--rows")
        found += [msgspec.structs.replace(row, like=like) for row in select(table, scheme, ranks)]
    return list({(row.key, row.like): row for row in found}.values())


def own(table: str, scheme: str, ranks: int) -> Row:
    """A row that the paper does not have.

    Its sizes are those of the table's row with the nearest number of ranks, and of several such
    rows the one with the largest batch.
    """
    rows = [row for row in load().rows if row.table == table]
    like = min(rows, key=lambda row: (abs(math.log(row.gpus / ranks)), -row.batch))
    return Row(table, scheme, ranks, like.batch, like.hidden, *[math.nan] * 3)


def _fitting(table: str, scheme: str) -> list[int]:
    """The rank counts of `table` for which `scheme` has a grid."""
    found = []
    for ranks in sorted({row.gpus for row in load().rows if row.table == table}):
        try:
            mm3d.SCHEMES[scheme].default_grid(ranks)
        except ValueError:
            continue
        found.append(ranks)
    return found


def shuffled(cases: Iterable[Case], seed: int) -> list[Case]:
    """`cases` in an order drawn from `seed`.

    Each case draws its own number, so that any selection of them keeps the order.
    """
    return sorted(cases, key=lambda one: random.Random(f"{seed} {one.name}").random())


def _verified(preset: Preset, sizes: ModelSizes) -> ModelSizes:
    """The sizes to verify: no larger than the preset's ``verify_`` sizes."""
    def least(size: int, limit: int | None) -> int:
        return size if limit is None else min(size, limit)
    head_size = least(sizes.hidden // sizes.heads, preset.verify_head_size)
    return ModelSizes(least(sizes.layers, preset.verify_layers), sizes.heads * head_size,
                      sizes.heads, least(sizes.batch, preset.verify_batch),
                      least(sizes.seq, preset.verify_seq))


def _names(given: str, known: list[str], option: str) -> list[str]:
    names = [name.strip() for name in given.split(",")]
    if names == ["all"]:
        return known
    return [_one_of({k: k for k in known}, name, option, "all") for name in dict.fromkeys(names)]


def _one_of(known: dict, name: str, what: str, *also: str):
    if name not in known:
        choices: Iterable[str] = [*known, *also]
        raise UsageError(f"{what} {name!r} is unknown: choose one of {', '.join(choices)}")
    return known[name]
