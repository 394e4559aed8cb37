"""The verb ``compare``: two sets of results, case by case.

A case is a row of the tables or a point of a microbenchmark; its samples are seconds of
repetitions, each of the slowest rank.
"""

import math
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator

import numpy as np

from bench.cases import UsageError, title
from bench.formats import Column, Notes, Number, Table, render
from bench.intervals import SIGNIFICANT
from bench.results import EFFORT, natural, read_all
from mm3d import timing
from mm3d.record import Measurements
from mm3d.statistics import CONFIDENCE, Interval, holm, rank_sum, ratio_interval
from mm3d.store import Run, StoreError

# What a run of a model has computed. Whatever else was set is mentioned where it differs.
WORK = ("layers", "hidden", "heads", "batch", "seq", "mlp_factor", "causal", "dtype", "grid",
        "grid_axes")
# Settings of a microbenchmark that are how it was done, not what.
MANNER = EFFORT | {"transport", "one_process_threads", "one_process_cores"}
# What differs from run to run and says nothing, or is said otherwise.
PASSING = {"command", "clock_resolution_s", "clock_offset_error_s", "git_clean"}
SHOWN = 6


@dataclass
class Case:
    """What was measured of one case.

    Attributes
    ----------
    samples : ndarray
        Seconds of every repetition.
    run : Run or Measurements
        Where they are from.
    """

    samples: np.ndarray
    run: Run | Measurements


@dataclass
class Verdict:
    """One case of both sets.

    Attributes
    ----------
    name : str
        Which.
    medians : tuple of float
        Seconds, of A and of B.
    ratio : Interval
        B's times over A's.
    p : float
        Of the rank-sum test, after Holm's correction.
    """

    name: str
    medians: tuple[float, float]
    ratio: Interval
    p: float

    @property
    def word(self) -> str:
        """ "faster" or "slower", or that no difference was shown."""
        if self.p >= SIGNIFICANT:
            return "no difference shown"
        return "slower" if self.ratio.median > 1 else "faster"


def compare(arguments) -> int:
    """Print the comparison; 1 when a case is slower by more than `fail_on_regression` per cent.

    Raises
    ------
    UsageError
        When the two sets cannot be compared.
    StoreError
        When one of them cannot be read.
    """
    limit = arguments.fail_on_regression
    if limit is not None and not 0 <= limit < np.inf:
        raise UsageError(f"--fail-on-regression {limit:g}: a percentage of at least 0 would do")
    names = arguments.a, arguments.b
    (first, lost), (second, also_lost) = map(cases, names)
    first, second = told_apart(first, second)
    common = comparable(names, first, second)
    verdicts = judged(first, second, common)
    worse = [] if limit is None else [
        verdict for verdict in verdicts
        if verdict.word == "slower" and verdict.ratio.median > 1 + limit / 100]
    parts = [f"A: {names[0]}\nB: {names[1]}" if arguments.format == "text" else
             f"A: {names[0]}, B: {names[1]}", table(verdicts),
             Notes("About this comparison:", notes(first, second, common, verdicts))]
    if lost + also_lost:
        parts.append(Notes("Left out:", lost + also_lost))
    if worse:
        parts.append(Notes(f"Slower by more than {limit:g} %:", [
            f"{verdict.name}: {100 * (verdict.ratio.median - 1):.1f} %" for verdict in worse]))
    print(render(parts, arguments.format))
    return 1 if worse else 0


def cases(path: str | Path) -> tuple[dict[tuple[str, str], Case], list[str]]:
    """The cases of a file or of a folder by name and transport, of each the latest, and what could
    not be read.

    Raises
    ------
    StoreError
        When there are none.
    """
    runs, problems = read_all(path)
    found: dict[tuple[str, str], Case] = {}
    for run in runs:
        transport = str(run.configuration.get("transport", "not recorded"))
        for name, case in model_case(run) if isinstance(run, Run) else points(run):
            found[name, transport] = case
    if not found:
        raise StoreError(f"{path} holds nothing that was timed repeatedly")
    return found, problems


def told_apart(*sets: dict[tuple[str, str], Case]) -> list[dict[str, Case]]:
    """The cases of each set by name, with the transport in it where a set has one by two."""
    several = {name for found in sets
               for name, count in Counter(name for name, _ in found).items() if count > 1}
    return [{f"{name}, transport {transport}" if name in several else name: case
             for (name, transport), case in found.items()} for found in sets]


def model_case(run: Run) -> Iterator[tuple[str, Case]]:
    """A row of the tables: the times of whole steps."""
    chosen = run.configuration
    name = f"{chosen['table']} {title(chosen['scheme'])} {run.ranks} ranks, {chosen['preset']}"
    if chosen["overridden"]:
        name += ", with " + " ".join(f"{word} {chosen.get(word)}"
                                     for word in chosen["overridden"].split())
    yield name, Case(timing.step_times(run.samples, 1), run)


def points(record: Measurements) -> Iterator[tuple[str, Case]]:
    """The points of a microbenchmark: every place in its samples, whatever its kind."""
    what = " ".join(f"{name} {value}" for name, value in sorted(record.configuration.items())
                    if name not in MANNER)
    for variable in record.variables.values():
        if variable.units != "s" or "repetition" not in variable.dims:
            continue
        values, dims = np.asarray(variable.values, np.float64), list(variable.dims)
        if "edge" in dims:    # when each rank began and ended, from the first one's start
            values = values.take(-1, dims.index("edge"))
            dims.remove("edge")
        order = [dim for dim in dims if dim not in ("repetition", "rank")]
        order += [dim for dim in ("repetition", "rank") if dim in dims]
        values = values.transpose([dims.index(dim) for dim in order])
        if "rank" in dims:
            values = np.fmax.reduce(values, axis=-1)
            order.remove("rank")
        for place in np.ndindex(values.shape[:-1]):
            where = " ".join(f"{dim} {record.scales[dim][k]}"
                             for dim, k in zip(order, place))
            samples = values[place][np.isfinite(values[place])]
            if samples.size:
                yield f"{record.kind} {where}" + f", {what}" * bool(what), Case(samples, record)


def comparable(names: tuple[str, str], first: dict[str, Case],
               second: dict[str, Case]) -> list[str]:
    """The cases that both sets have.

    Raises
    ------
    UsageError
        When there are none, or a case is not the same in both.
    """
    versions = [sorted({case.run.schema for case in found.values()}) for found in (first, second)]
    if versions[0] != versions[1] or len(versions[0]) > 1:
        said = ", ".join(f"{name} has {' and '.join(map(str, version))}"
                         for name, version in zip(names, versions))
        raise UsageError(f"files of different schema versions cannot be compared: {said}; "
                         f"measure again what is older")
    common = sorted(first.keys() & second.keys(), key=natural)
    if not common:
        raise UsageError("nothing in common: " + "; ".join(
            f"{name} has {_some(list(found))}" for name, found in zip(names, (first, second))))
    differ = []
    for name in common:
        a, b = (found[name].run.configuration for found in (first, second))
        if isinstance(first[name].run, Run):
            differ += [f"{name}: {word} {a[word]} and {b[word]}" for word in WORK
                       if word in a and word in b and a[word] != b[word]]
    if differ:
        raise UsageError(f"different work under the same name cannot be compared: "
                         f"{_some(differ, '; ')}")
    return common


def judged(first: dict[str, Case], second: dict[str, Case], common: list[str]) -> list[Verdict]:
    """The verdict on every case."""
    pairs = [(first[name].samples, second[name].samples) for name in common]
    corrected = holm([rank_sum(*pair) for pair in pairs])
    return [Verdict(name, tuple(float(np.median(samples)) for samples in pair),
                    ratio_interval(*pair), p)
            for name, pair, p in zip(common, pairs, corrected)]


def table(verdicts: list[Verdict]) -> Table:
    """The verdicts."""
    rows = []
    for one in verdicts:
        few = "" if one.ratio.confidence >= CONFIDENCE else "+"
        ratio, low, high = (Number(value, f"{value:.3f}{mark}") for value, mark in
                            zip(one.ratio[:3], ("", few, few)))
        rows.append([one.name, *(Number(value, f"{value:.4g}") for value in one.medians), ratio,
                     low, high, Number(one.p, f"{one.p:.2g}"), one.word])
    columns = [Column("", "case"), Column("A", "(s)", "median"), Column("B", "(s)", "median"),
               Column("B / A", "", "ratio"), Column("low", "95 %", "ratio"),
               Column("high", "95 %", "ratio"), Column("p", "corrected"), Column("B is")]
    return Table("Times of B over those of A", columns, rows)


def notes(first: dict[str, Case], second: dict[str, Case], common: list[str],
          verdicts: list[Verdict]) -> list[str]:
    """How it was compared, what was not, and what else differs."""
    counts = {word: sum(one.word == word for one in verdicts)
              for word in ("faster", "slower", "no difference shown")}
    text = [f"Of {len(verdicts)} cases B is faster in {counts['faster']}, slower in "
            f"{counts['slower']}; in {counts['no difference shown']} no difference was shown.",
            "The ratio is Hodges and Lehmann's estimate, its interval Moses', both without an "
            "assumption on the distributions but that they differ by a factor (+ marks intervals "
            "with less than 95 %, of too few repetitions). p is that of the two-sided rank-sum "
            f"test after Holm's correction for {len(verdicts)} cases, read at "
            f"{100 * SIGNIFICANT:g} %.",
            "The repetitions of a case are from one run each: what changes from run to run, such "
            "as placement, clocks and neighbours, is in no interval."]
    hopeless = [name for name in common if 2 * len(common) / math.comb(
        len(first[name].samples) + len(second[name].samples), len(first[name].samples))
        >= SIGNIFICANT]
    if hopeless:
        text.append(f"WARNING: too few repetitions to show any difference among {len(common)} "
                    f"cases: {_some(hopeless)}.")
    for name, found, other in (("A", first, second), ("B", second, first)):
        alone = [case for case in found if case not in other]
        if alone:
            text.append(f"Only in {name}, {len(alone)}: {_some(alone)}.")
    crowded = sum(bool(found[name].run.environment.get("oversubscribed"))
                  for found in (first, second) for name in common)
    if crowded:
        text.append(f"WARNING: in {crowded} of {2 * len(common)} runs ranks outnumber cores and "
                    f"take turns.")
    return text + differences(first, second, common)


def differences(first: dict[str, Case], second: dict[str, Case],
                common: list[str]) -> list[str]:
    """What else than the times differs: settings and environment."""
    found: dict[tuple[str, str, str], int] = {}
    for name in common:
        a, b = first[name].run, second[name].run
        passing = PASSING | (EFFORT - {"seed"})
        for group in ("configuration", "environment"):
            before, after = getattr(a, group), getattr(b, group)
            for word in sorted((before.keys() | after.keys()) - passing):
                values = [str(side.get(word, "not recorded")) for side in (before, after)]
                if values[0] != values[1]:
                    found[word, *values] = found.get((word, *values), 0) + 1
    return [f"Differs: {word} is {a} in A and {b} in B" + (
        "." if count == len(common) else f" ({count} of {len(common)} cases).")
        for (word, a, b), count in found.items()] or [
        "Settings and environment are the same in both."]


def _some(names: list[str], between: str = ", ") -> str:
    more = len(names) - SHOWN
    return between.join(names[:SHOWN]) + (f"{between}and {more} more" if more > 0 else "")
