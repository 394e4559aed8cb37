"""Compare two sides of runs, case by case.

The unit is a run, whose repetitions share its placement, its neighbours and its minutes.  With
fewer than three runs a side only medians are shown; from three on differences are tested.
"""

from dataclasses import dataclass, replace
from typing import Callable, Sequence

import numpy as np

from bench.cases.variants import recorded_variant
from bench.document import Column, Notes, Part, Table, make_table, spread
from bench.errors import UsageError
from bench.records.folder import EFFORT, SAME, is_crowded
from bench.reports.certainty import SIGNIFICANT
from bench.reports.comparison_sides import (Cases, abbreviate, common_cases, name_cases,
                                            read_cases, shorten_names)
from bench.statistics import Difference, compare_runs

MIN_RUNS = 3    # runs of each side that a verdict needs
# Settings that differ from run to run without meaning, or are stated elsewhere.
IGNORED_SETTINGS = {"command", "clock_resolution_s", "clock_offset_error_s", "git_clean"} | (
    EFFORT - {"seed"})
# Settings that the runs of one side should have in common.
SIDE_SETTINGS = (*SAME, "transport")


@dataclass(frozen=True)
class CaseVerdict:
    """The comparison of one case.

    Attributes
    ----------
    medians : tuple of float
        Seconds of A and of B: the median of the runs' medians.
    difference : Difference or None
        B over A, with p after Holm's correction; None if there are too few runs.
    """

    name: str
    medians: tuple[float, float]
    runs: tuple[int, int]
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

    Parameters
    ----------
    first, second : sequence of str
        The files and folders of A and of B.
    limit : float, optional
        Per cent by which a case may be slower; then B must have each case of A.

    Returns
    -------
    list, list of str, list of str
        The table of verdicts, and notes; a line for each case in which B is slower by more than
        the limit, or that B lacks; and a message for each file that was left out.

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
