"""Compare two sides of runs, case by case: a row of the tables, or a point of a microbenchmark.

The unit is a run, whose repetitions share its placement, its neighbours and its minutes: it counts
with their median.  With fewer than three runs a side only medians are shown; from three on
differences are tested.
"""

import textwrap
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Callable, Iterator, Mapping, Sequence

import numpy as np

from bench.cases.variants import recorded_variant
from bench.document import Column, Notes, Part, Table, make_table, spread
from bench.errors import StoreError, UsageError
from bench.records.folder import EFFORT, SAME, is_crowded, natural_key, read_runs
from bench.records.measurements import Measurements, Setting
from bench.records.model_run import Run
from bench.reports.certainty import SIGNIFICANT, run_name
from bench.statistics import Difference, compare_runs

MIN_RUNS = 3    # runs of each side that a verdict needs
# Settings that differ from run to run without meaning, or are stated elsewhere.
IGNORED_SETTINGS = {"command", "clock_resolution_s", "clock_offset_error_s", "git_clean"} | (
    EFFORT - {"seed"})
# Settings that the runs of one side should have in common.
SIDE_SETTINGS = (*SAME, "transport")
# Settings of a run's work, the same in all runs of a case. Differences in others become notes.
WORK_SETTINGS = ("layers", "hidden", "heads", "batch", "seq", "mlp_factor", "causal", "dtype",
                 "tf32", "grid", "grid_axes", "waited_machine", "waited_scale", "waited_shrink")
# Settings of a microbenchmark that say how it was measured, and name no case.
MEASURING_SETTINGS = EFFORT | {"transport", "one_process_threads", "one_process_cores"}
MAX_NAMES, MAX_LETTERS = 3, 120    # in lines that list cases


@dataclass(frozen=True)
class Timed:
    """A run in a case, with its seconds: the median of its repetitions, of the slowest rank."""

    median: float
    run: Measurements


Cases = dict[str, list[Timed]]    # the runs of each case, in the order of their creation
ByTransport = dict[tuple[str, str], list[Timed]]


@dataclass(frozen=True)
class CaseVerdict:
    """The comparison of one case."""

    name: str
    medians: tuple[float, float]    # seconds of A and of B: the median of the runs' medians
    runs: tuple[int, int]
    # B over A, with p after Holm's correction; None if there are too few runs.
    difference: Difference | None = None

    @property
    def ratio(self) -> float:
        """Return B's time over A's."""
        return self.difference.ratio if self.difference else self.medians[1] / self.medians[0]

    @property
    def word(self) -> str:
        """Return "faster", "slower" or "no difference shown"; "-" without a test."""
        if self.difference is None:
            return "-"
        if self.difference.p >= SIGNIFICANT:
            return "no difference shown"
        return "slower" if self.ratio > 1 else "faster"


def compare_sides(first: Sequence[str], second: Sequence[str],
                  limit: float | None = None) -> tuple[list[Part], list[str], list[str]]:
    """Compare two sides of runs.

    Returns the table of verdicts, and notes; a line for each case in which B is slower by more
    than `limit` per cent, or that it lacks; and a message for each file that was left out.

    Raises UsageError when the two sides cannot be compared, or a limit is given with too few runs;
    StoreError when a file or folder cannot be read.
    """
    names = " ".join(first), " ".join(second)
    (before, problems), (after, more) = read_cases(first), read_cases(second)
    before, after = name_cases(before, after)
    common = common_cases(names, before, after)
    short, shared = shorten_names({name: before[name] for name in common})
    verdicts = [replace(one, name=short[one.name])
                for one in judge_cases(before, after, common)]
    few = [one for one in verdicts if one.difference is None]
    if few and limit is not None:
        raise UsageError(
            f"--fail-on-regression takes at least {MIN_RUNS} runs of each case on either side, "
            f"because two runs of the same code differ by more than their repetitions do: "
            f"{abbreviate([f'{one.name}: {one.runs[0]} and {one.runs[1]}' for one in few], '; ')}")
    notes = comparison_notes(before, after, common, verdicts)
    if shared:
        notes.append(f"The same in all cases of microbenchmarks: {shared}.")
    parts: list[Part] = [verdict_table(verdicts), Notes("About this comparison:", notes)]
    failures = [] if limit is None else [
        *(f"only in A, and so not judged: {name}" for name in before if name not in after),
        *(f"slower by more than {limit:g} %: {one.name}: {100 * (one.ratio - 1):.1f} %"
          for one in verdicts if one.word == "slower" and one.ratio > 1 + limit / 100)]
    return parts, failures, problems + more


def judge_cases(first: Cases, second: Cases, common: list[str]) -> list[CaseVerdict]:
    """Test all cases that have enough runs."""
    medians = {name: tuple([timed.median for timed in side[name]] for side in (first, second))
               for name in common}
    enough = [name for name in common if min(map(len, medians[name])) >= MIN_RUNS]
    tested = dict(zip(enough, compare_runs([medians[name] for name in enough])))
    return [CaseVerdict(name, tuple(float(np.median(side)) for side in medians[name]),
                        tuple(map(len, medians[name])), tested.get(name)) for name in common]


def verdict_table(verdicts: list[CaseVerdict]) -> Table:
    """Make the table of verdicts; without tested cases, of medians and their ratios alone."""
    def of_test(name: str) -> Callable[[CaseVerdict], float]:
        return lambda one: getattr(one.difference, name) if one.difference else np.nan
    columns = [Column("", "case", of=lambda one: one.name),
               *spread(lambda one: one.medians, ".4g", "median", "AB", ("(s)", "(s)")),
               *spread(lambda one: one.runs, "d", "runs", "AB"),
               Column("B / A", "", "ratio", of=lambda one: one.ratio, form=".3f")]
    if any(one.difference for one in verdicts):
        columns += [Column("low", "95 %", "ratio", of=of_test("low"), form=".3f"),
                    Column("high", "95 %", "ratio", of=of_test("high"), form=".3f"),
                    Column("p", "corrected", of=of_test("p"), form=".2g"),
                    Column("B is", of=lambda one: one.word)]
    return make_table("Times of B over those of A", columns, verdicts)


def comparison_notes(first: Cases, second: Cases, common: list[str],
                     verdicts: list[CaseVerdict]) -> list[str]:
    """State how the cases were compared, which were not, and what else differs."""
    tested = [one for one in verdicts if one.difference]
    text = []
    if tested:
        counts = {word: sum(one.word == word for one in tested)
                  for word in ("faster", "slower", "no difference shown")}
        text += [f"Of {len(tested)} cases B is faster in {counts['faster']}, slower in "
                 f"{counts['slower']}; in {counts['no difference shown']} no difference was "
                 f"shown.",
                 "Each run counts once, by the median of its repetitions. The ratio is that of "
                 "the geometric means over the runs, its interval and p are by Welch's t test on "
                 "the logarithms, whose error is at least that of all cases together; p is "
                 f"corrected for {len(tested)} cases by Holm's method and read at "
                 f"{100 * SIGNIFICANT:g} %. Runs that were not measured in turns have in their "
                 "difference also what the machine did meanwhile."]
    if len(tested) < len(verdicts):
        text.append(f"No verdict on {len(verdicts) - len(tested)} of {len(verdicts)} cases, which "
                    f"have fewer than {MIN_RUNS} runs a side: two runs of the same code differ by "
                    f"more than their repetitions do, and how much is not known from one.")
    for name, found, other in (("A", first, second), ("B", second, first)):
        alone = [case for case in found if case not in other]
        if alone:
            text.append(f"Only in {name}, {len(alone)}: {abbreviate(alone)}.")
        text += mixed_setting_warnings(name, [found[case] for case in common])
    runs = [timed.run for side in (first, second) for name in common for timed in side[name]]
    crowded = sum(map(is_crowded, runs))
    if crowded:
        waiting = any(recorded_variant(run.configuration).waits for run in runs)
        text.append(f"WARNING: in {crowded} of {len(runs)} runs ranks outnumber cores and take "
                    f"turns{', for all that is not waited for' * waiting}.")
    return text + differing_settings(first, second, common)


def mixed_setting_warnings(side: str, cases: Sequence[list]) -> list[str]:
    """Return a warning for each setting that differs among the runs of one side."""
    found: dict[str, None] = {}
    for word in SIDE_SETTINGS:
        for runs in cases:
            values = list(dict.fromkeys(
                str((timed.run.environment | timed.run.configuration).get(word, "not recorded"))
                for timed in runs))
            if len(values) > 1:
                found[f"WARNING: runs of {side} differ in {word}: {' and '.join(values)}."] = None
    return list(found)


def differing_settings(first: Cases, second: Cases, common: list[str]) -> list[str]:
    """List the settings and properties of the environment that differ between the sides."""
    found: dict[tuple[str, str, str], int] = {}
    for name in common:
        for group in ("configuration", "environment"):
            before, after = ([getattr(timed.run, group) for timed in side[name]]
                             for side in (first, second))
            words = {word for one in before + after for word in one}
            for word in sorted(words - IGNORED_SETTINGS):
                values = [" and ".join(dict.fromkeys(str(one.get(word, "not recorded"))
                                                     for one in side))
                          for side in (before, after)]
                if values[0] != values[1]:
                    found[word, *values] = found.get((word, *values), 0) + 1
    return [f"Differs: {word} is {a} in A and {b} in B" + (
        "." if count == len(common) else f" ({count} of {len(common)} cases).")
        for (word, a, b), count in found.items()] or [
        "Settings and environment are the same in both."]


def read_cases(paths: Sequence[str | Path]) -> tuple[ByTransport, list[str]]:
    """Read the runs of each case by name and transport, or StoreError; list unreadable files."""
    found: ByTransport = {}
    problems: list[str] = []
    seen = set()
    for path in paths:
        runs, unread = read_runs(path)
        problems += unread
        for run in runs:
            transport = str(run.configuration.get("transport", "not recorded"))
            # Of a row of the tables the times are those of whole steps.
            for name, timed in benchmark_points(run) if not isinstance(run, Run) else [
                    (run_name(run), Timed(float(np.median(run.steps)), run))]:
                key = name, transport, run.created
                if key not in seen:    # a run named twice is one run
                    found.setdefault((name, transport), []).append(timed)
                seen.add(key)
    if not found:
        raise StoreError(f"{' '.join(map(str, paths))} holds nothing that was timed repeatedly")
    return found, problems


def name_cases(*sides: ByTransport) -> list[Cases]:
    """Name the cases of each side, with the transport if a case on a side has several."""
    several = {name for found in sides
               for name, count in Counter(name for name, _ in found).items() if count > 1}
    return [{f"{name}, transport {transport}" if name in several else name: timed
             for (name, transport), timed in found.items()} for found in sides]


def benchmark_points(record: Measurements) -> Iterator[tuple[str, Timed]]:
    """Return the cases of a microbenchmark of any kind: the points of its samples."""
    what = _in_words(_settings(record))
    for variable in record.variables.values():
        if variable.units != "s" or "repetition" not in variable.dims:
            continue
        values, dims = np.asarray(variable.values, np.float64), list(variable.dims)
        if "edge" in dims:    # when each rank began and ended, from the first one's start
            values = values.take(-1, dims.index("edge"))
            dims.remove("edge")
        if "rank" in dims:
            values = np.fmax.reduce(values, axis=dims.index("rank"))
            dims.remove("rank")
        values = np.moveaxis(values, dims.index("repetition"), -1)
        dims.remove("repetition")
        for place in np.ndindex(values.shape[:-1]):
            where = " ".join(f"{dim} {record.scales[dim][k]}" for dim, k in zip(dims, place))
            samples = values[place][np.isfinite(values[place])]
            if samples.size and (median := float(np.median(samples))) > 0:    # else no divisor
                yield f"{record.kind} {where}" + f", {what}" * bool(what), Timed(median, record)


def _settings(record: Measurements) -> dict[str, Setting]:
    """Return the settings of a microbenchmark that name its cases, sorted."""
    return {name: value for name, value in sorted(record.configuration.items())
            if name not in MEASURING_SETTINGS}


def _in_words(settings: Mapping[str, Setting]) -> str:
    return " ".join(f"{name} {value}" for name, value in settings.items())


def shorten_names(cases: Cases) -> tuple[dict[str, str], str]:
    """Name cases without the settings that all microbenchmarks have in common, told apart."""
    found = {name: _settings(timed[0].run) for name, timed in cases.items()
             if not isinstance(timed[0].run, Run)}
    common = dict(set.intersection(*(set(one.items()) for one in found.values()))) if found else {}
    short = {name: name for name in cases}
    for name, settings in found.items():
        left = _in_words({key: value for key, value in settings.items() if key not in common})
        short[name] = name.replace(f", {_in_words(settings)}", f", {left}" * bool(left))
    return short, _in_words(dict(sorted(common.items())))


def common_cases(names: tuple[str, str], first: Cases, second: Cases) -> list[str]:
    """Return the cases of both sides; UsageError for none, or other work under the same name."""
    common = sorted(first.keys() & second.keys(), key=natural_key)
    if not common:
        short, _ = shorten_names({**first, **second})
        raise UsageError("nothing in common: " + "; ".join(
            f"{name} has {abbreviate([short[one] for one in found])}"
            for name, found in zip(names, (first, second))))
    differ = []
    for name in common:
        chosen = [timed.run.configuration for timed in first[name] + second[name]
                  if isinstance(timed.run, Run)]
        for word in WORK_SETTINGS:
            values = list(dict.fromkeys(one[word] for one in chosen if word in one))
            if len(values) > 1:
                differ.append(f"{name}: {word} {' and '.join(map(str, values))}")
    if differ:
        raise UsageError(f"different work under the same name cannot be compared: "
                         f"{abbreviate(differ, '; ')}")
    return common


def abbreviate(names: list[str], between: str = ", ") -> str:
    """Join the first few of `names`, of long ones the beginning, and the number of the others."""
    more = len(names) - MAX_NAMES
    return between.join(textwrap.shorten(name, MAX_LETTERS, placeholder=" ...")
                        for name in names[:MAX_NAMES]) + (
        f"{between}and {more} more" if more > 0 else "")
