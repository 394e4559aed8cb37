"""Predicted beside measured: what was run on a machine, replayed on its model."""

import math
from typing import Iterator

import msgspec
import numpy as np
from tabulate import tabulate

from bench import model
from bench.cases import TITLES
from bench.products import Problem
from bench.results import read_all
from mm3d import backend as backends
from mm3d import dry, store, timing
from mm3d.hollow import DryBackend
from mm3d.observe import observed
from mm3d.record import Measurements
from mm3d.transport import Absent

NAMES = {"matmul": "MNK", "layer": ("hidden", "heads", "batch", "seq", "layers")}
Seconds = dict[str, float]


class Work(msgspec.Struct, frozen=True):
    """A product C = AB or a Transformer, and how it is dealt.

    Attributes
    ----------
    kind : {"matmul", "layer"}
        Which.
    scheme, grid : str, tuple of int
        How it is dealt.
    sizes : tuple of int
        M, N and K, or hidden, heads, batch, seq and layers.
    form : str
        Of a product; "" for a Transformer.
    """

    kind: str
    scheme: str
    grid: tuple[int, ...]
    sizes: tuple[int, ...]
    form: str = ""

    @property
    def label(self) -> str:
        """Such as ``matmul 3d 2x1x1 512x512x512 ab``."""
        return " ".join([self.kind, self.scheme, "x".join(map(str, self.grid)),
                         "x".join(map(str, self.sizes)), self.form]).rstrip()

    @property
    def ranks(self) -> int:
        """Of the grid."""
        return math.prod(self.grid)

    @classmethod
    def of(cls, label: str) -> "Work":
        """The work that has this label."""
        kind, scheme, grid, sizes, *form = label.split()
        return cls(kind, scheme, *(tuple(map(int, text.split("x"))) for text in (grid, sizes)),
                   *form)


class Measured(msgspec.Struct, frozen=True):
    """Work and its measured seconds by phase, or of a "step", the published average, if any, and
    how its collectives travelled, if that is known.

    Seconds are medians.
    """

    work: Work
    dtype: str
    seconds: Seconds
    published: float = math.nan
    transport: str = ""

    def fits(self, machine: model.Machine) -> bool:
        """Whether `machine` is a model for these ranks and this transport.

        A measured one is for as many ranks as measured it; nothing is said of a transport that
        is not known.
        """
        same = not machine.passes or self.work.ranks == machine.ranks_per_node
        return same and machine.travels(self.transport)


def trace(work: Work, dtype: str, block: int) -> dry.Trace:
    """What rank 0 does for `work`, elementwise in blocks of so many elements."""
    if work.kind == "layer":
        return dry.extended(work.scheme, work.ranks, work.grid, dtype=dtype, block=block,
                            **dict(zip(NAMES["layer"], work.sizes)))
    backend = backends.get(DryBackend())
    backend.begin(block)
    problem = Problem(work.scheme, work.form, Absent(work.ranks), work.grid, work.sizes, dtype, 0,
                      backend)
    with observed(problem.grid, backend.trace):
        for phase in dry.PHASES:
            backend.trace.phase = phase
            getattr(problem, phase)()
    return backend.trace


def predicted(machine: model.Machine, work: Work, dtype: str) -> Seconds:
    """Seconds of forward and backward on the model of `machine`."""
    return model.step_seconds(machine, trace(work, dtype, machine.granule))


def measured(run: store.Run | Measurements) -> Iterator[Measured]:
    """The products and Transformers in a file of results."""
    chosen = run.configuration
    more = {"transport": chosen.get("transport", "")}
    if isinstance(run, store.Run):
        work = Work("layer", chosen["scheme"], _grid(chosen["grid"]),
                    tuple(chosen[name] for name in NAMES["layer"]))
        yield Measured(work, chosen["dtype"],
                       {phase: timing.typical(run.samples[phase]) for phase in dry.PHASES},
                       run.published["recomputed_step_time"], **more)
    elif run.kind == "matmul":
        work = Work("matmul", chosen["scheme"], _grid(chosen["grid"]),
                    tuple(chosen[name] for name in "MNK"), chosen["form"])
        seconds = run.variables["seconds"].values[:, 0, 0]
        yield Measured(work, chosen["dtype"], dict(zip(run.scales["phase"], seconds.tolist())),
                       **more)
    elif run.kind == "layer":
        work = Work("layer", chosen["scheme"], _grid(chosen["grid"]),
                    tuple(chosen[name] for name in NAMES["layer"]))
        yield Measured(work, chosen["dtype"], {"step": run.variables["seconds"].values[0, 0]},
                       **more)
    elif run.kind == "check":
        for label, times in zip(run.scales["work"], run.variables["samples"].values):
            seconds = dict(zip(run.scales["phase"], np.median(times, axis=-1).tolist()))
            yield Measured(Work.of(label), chosen["dtype"], seconds, **more)


def _grid(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(" x ")))


def collected(folder: str) -> tuple[list[Measured], list[str]]:
    """All that the files in `folder` have measured, and what could not be read.

    Raises
    ------
    StoreError
        When there is no such folder, or nothing in it.
    """
    runs, problems = read_all(folder)
    found = [one for run in runs for one in measured(run)]
    if not found:
        raise store.StoreError(f"{folder}: no measured products or Transformers")
    return found, problems


def report(machine: model.Machine, found: list[Measured]) -> str:
    """Predicted beside measured, the median error of each kind, and the planner's choices.

    What the machine is no model for is left out.
    """
    known = [one for one in found if one.dtype in machine.gemm_rate]
    own = [one for one in known if one.fits(machine)]
    left = "\n".join(f"{count} runs of {what} left out" for count, what in (
        (len(known) - len(own), "other numbers of ranks or another transport"),
        (len(found) - len(known), "dtypes without a rate of products")) if count)
    if not own:
        return f"{machine.about}\n{left}"
    guesses = [predicted(machine, one.work, one.dtype) for one in own]
    lines = [machine.about, table(own, guesses), errors(own, guesses), choices(own, guesses), left]
    return "\n\n".join(filter(None, lines))


def _totals(one: Measured, guess: Seconds) -> tuple[float, float]:
    """Predicted and measured seconds of the phases that were measured."""
    phases = dry.PHASES if "step" in one.seconds else one.seconds
    return sum(guess[phase] for phase in phases), sum(one.seconds.values())


def table(found: list[Measured], guesses: list[Seconds]) -> str:
    """A line for each: milliseconds, and the error of the sum."""
    rows = []
    for one, guess in sorted(zip(found, guesses), key=lambda pair: pair[0].work.kind):
        work, (guessed, took) = one.work, _totals(one, guess)
        cells = [1e3 * number for phase in dry.PHASES
                 for number in (guess[phase], one.seconds.get(phase, math.nan))]
        average = [math.nan] * 3
        if work.kind == "layer" and not math.isnan(one.published):
            average = [one.published, guessed / work.sizes[2], took / work.sizes[2]]
        rows.append([TITLES.get(work.scheme, work.scheme), " x ".join(map(str, work.grid)),
                     f"{work.kind} {' x '.join(map(str, work.sizes))} {work.form}".rstrip(),
                     one.dtype, *cells, f"{guessed / took - 1:+.0%}", *average])
    heads = ["", "grid", "sizes", "dtype", "forward ms\npredicted", "\nmeasured",
             "backward ms\npredicted", "\nmeasured", "error", "average s\npublished",
             "\npredicted", "\nmeasured"]
    if all(math.isnan(one.published) for one in found):
        heads, rows = heads[:9], [row[:9] for row in rows]
    return tabulate(rows, heads, floatfmt=".4g", missingval="-", disable_numparse=[0, 1, 2, 3, 8],
                    colalign=("left",))


def errors(found: list[Measured], guesses: list[Seconds]) -> str:
    """The median absolute error of the products and of the Transformers."""
    lines = []
    for kind in NAMES:
        off = [abs(guessed / took - 1) for guessed, took in (
            _totals(one, guess) for one, guess in zip(found, guesses) if one.work.kind == kind)]
        if off:
            lines.append(f"{kind}: {len(off)} runs, error {np.median(off):.0%} in the median, "
                         f"{np.mean(off):.0%} in the mean, {max(off):.0%} at most")
    return "\n".join(lines)


def choices(found: list[Measured], guesses: list[Seconds]) -> str:
    """For each size that several grids were measured for: the grid with the least predicted
    seconds, which the planner takes, beside the fastest."""
    groups: dict[tuple, list[tuple[float, float, Work]]] = {}
    for one, guess in zip(found, guesses):
        work = one.work
        for schemes in ("all", *["3d"] * (work.scheme == "3d")):
            key = work.kind, work.sizes, work.form, one.dtype, work.ranks, schemes
            groups.setdefault(key, []).append((*_totals(one, guess), work))
    rows = []
    for (kind, sizes, _, dtype, ranks, schemes), tried in groups.items():
        if len(tried) == 1:
            continue
        (_, took, taken), (_, least, fastest) = min(tried), min(tried, key=lambda one: one[1])
        names = [f"{TITLES.get(work.scheme, work.scheme)} {' x '.join(map(str, work.grid))}"
                 for work in (taken, fastest)]
        rows.append([f"{kind} {' x '.join(map(str, sizes))}", ranks,
                     TITLES.get(schemes, schemes), len(tried), names[0], 1e3 * took, names[1],
                     1e3 * least, f"{took / least - 1:+.0%}",
                     f"{max(one[1] for one in tried) / least - 1:+.0%}"])
    return rows and tabulate(rows, ["", "ranks", "of schemes", "grids", "planner's", "ms",
                                    "fastest", "ms", "planner's over\nthe fastest",
                                    "slowest over\nthe fastest"], floatfmt=".4g",
                             disable_numparse=[0, 8, 9])
