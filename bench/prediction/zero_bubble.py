"""Compute Table 5 of the zero-bubble paper (arXiv:2401.10241) from its Tables 3 and 9.

The bubble rate is (cost - m (F + B + W)) / cost of m micro-batches; the cost is the longest time
of a rank from its own first begin to its own last end.  The data is in ``zero_bubble.toml``.
"""

from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from importlib import resources
from typing import Iterator

import msgspec

from mm3d.training.schedules import Times, build, clock
from mm3d.training.schedules.search import lower_bound
from mm3d.training.schedules.times import exact

DIGITS = 4    # that Table 5 prints
EXACT = ("1f1b", "1f1b-i", "zb-h1", "zb-h2")
# The schedules that are searched for, and how many micro-batches' activations a rank may hold, in
# units of the number of ranks.
SEARCHED = {"zb-1p": 1, "zb-2p": 2}


class Model(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A model of Table 3."""

    layers: int
    heads: int
    hidden: int


class Row(msgspec.Struct, array_like=True, frozen=True):
    """A row of Tables 9 (times in milliseconds) and 5 (rates)."""

    model: str
    ranks: int
    microbatches: int
    forward: float
    backward: float
    weights: float
    hop: float
    one_f_one_b: float
    interleaved: float
    zb_h1: float
    zb_h2: float
    zb_1p: float
    zb_2p: float

    @property
    def published(self) -> dict[str, float]:
        """Return the rates of Table 5 by schedule."""
        return dict(zip((*EXACT, *SEARCHED), msgspec.structs.astuple(self)[7:]))

    @property
    def times(self) -> Times:
        """Return the times of Table 9, which are the same for every stage."""
        return Times.equal(self.ranks, self.forward, self.backward, self.weights, self.hop)


class Rows(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The table in the file."""

    rows: list[Row]


class Paper(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The contents of ``zero_bubble.toml``."""

    sequence: int
    models: dict[str, Model]
    table: Rows


@dataclass(frozen=True)
class Cell:
    """A published rate and the computed one.

    Attributes
    ----------
    schedule : str
        One of `EXACT` and `SEARCHED`.
    published, computed : Fraction
        The rates, the computed one not rounded.
    least : Fraction or None
        A rate that no schedule in this memory falls below, where one was searched for.
    """

    schedule: str
    published: Fraction
    computed: Fraction
    least: Fraction | None = None

    @property
    def verdict(self) -> str:
        """Return "=" if the printed digits agree, "<" if a searched rate is lower, else "!"."""
        rounded = round(self.computed, DIGITS)
        if rounded == self.published:
            return "="
        return "<" if self.schedule in SEARCHED and rounded < self.published else "!"


@cache
def load() -> Paper:
    """Read the paper's printed numbers."""
    text = resources.files("bench.prediction").joinpath("zero_bubble.toml").read_bytes()
    return msgspec.toml.decode(text, type=Paper, strict=False)


def kept(model: Model, sequence: int) -> Fraction:
    """Return the share of a layer's activations that W still needs (the paper's Table 1).

    It is 32 h of 34 h + 5 a s, in bytes over s b.
    """
    return Fraction(32 * model.hidden, 34 * model.hidden + 5 * model.heads * sequence)


def cells(row: Row) -> Iterator[Cell]:
    """Compute all cells of a row of Table 5 from the times."""
    for name, rate in row.published.items():
        yield (_searched if name in SEARCHED else _exact)(row, name, exact(rate))


def _exact(row: Row, name: str, published: Fraction) -> Cell:
    if name == "1f1b-i":
        return Cell(name, published, interleaved_rate(row))
    schedule = build(name, row.ranks, row.microbatches)
    return Cell(name, published, clock(schedule, row.times).bubble_rate)


def interleaved_rate(row: Row) -> Fraction:
    """Return the rate of interleaved 1F1B as the paper counts it.

    Its bubble is (p - 1) (F + B + W) / v plus (2 v - 1) p - 2 hops.  Each of the v chunks of a
    rank is one layer; two more than the model has stand for the embeddings.  (With a hop for each
    message there would be 2 (p v - 1).)
    """
    ranks, model = row.ranks, load().models[row.model]
    chunks = (model.layers + 2) // ranks
    step = row.times.of("F", 0) + row.times.of("BW", 0)
    bubble = (ranks - 1) * step / chunks + ((2 * chunks - 1) * ranks - 2) * row.times.hop
    return bubble / (row.microbatches * step + bubble)


def _searched(row: Row, name: str, published: Fraction) -> Cell:
    memory, paper = SEARCHED[name] * row.ranks, load()
    schedule = build("auto", row.ranks, row.microbatches, times=row.times, memory=memory,
                     kept=kept(paper.models[row.model], paper.sequence))
    found = clock(schedule, row.times)
    least = lower_bound(row.ranks, row.microbatches, row.times, Fraction(memory))
    return Cell(name, published, found.bubble_rate, 1 - found.work[0] / least)
