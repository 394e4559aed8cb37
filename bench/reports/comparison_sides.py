"""Collect the two sides of a comparison: the runs of each case, and the common cases.

A case is a row of the tables or a point of a microbenchmark.  Each run counts with one number, the
median of its repetitions.
"""

import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Iterator, Mapping, Sequence

import numpy as np

from bench.errors import StoreError, UsageError
from bench.records import model_run
from bench.records.folder import EFFORT, natural_key, read_runs
from bench.records.measurements import Measurements, Setting
from bench.records.model_run import Run
from bench.reports.certainty import run_name

# Settings of a run's work, the same in all runs of a case. Differences in others become notes.
WORK_SETTINGS = ("layers", "hidden", "heads", "batch", "seq", "mlp_factor", "causal", "dtype",
                 "tf32", "grid", "grid_axes", "waited_machine", "waited_scale", "waited_shrink")
# Settings of a microbenchmark that say how it was measured, and name no case.
MEASURING_SETTINGS = EFFORT | {"transport", "one_process_threads", "one_process_cores"}
MAX_NAMES, MAX_LETTERS = 3, 120    # in lines that list cases


@dataclass(frozen=True)
class Timed:
    """The times of one run in a case.

    Attributes
    ----------
    samples : ndarray
        Seconds of every repetition, each of the slowest rank.
    """

    samples: np.ndarray
    run: Measurements

    @property
    def median(self) -> float:
        """Return the median in seconds."""
        return float(np.median(self.samples))


Cases = dict[str, list[Timed]]    # the runs of each case, in the order of their creation
ByTransport = dict[tuple[str, str], list[Timed]]


def read_cases(paths: Sequence[str | Path]) -> tuple[ByTransport, list[str]]:
    """Read the runs of each case by name and transport, and list unreadable files.

    Raises StoreError when a file or folder holds none.
    """
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
                    (run_name(run), Timed(model_run.step_times(run.times, 1), run))]:
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
            if samples.size and np.median(samples) > 0:    # by no time nothing can be divided
                yield f"{record.kind} {where}" + f", {what}" * bool(what), Timed(samples, record)


def _settings(record: Measurements) -> dict[str, Setting]:
    """Return the settings of a microbenchmark that name its cases, sorted."""
    return {name: value for name, value in sorted(record.configuration.items())
            if name not in MEASURING_SETTINGS}


def _in_words(settings: Mapping[str, Setting]) -> str:
    return " ".join(f"{name} {value}" for name, value in settings.items())


def shorten_names(cases: Cases) -> tuple[dict[str, str], str]:
    """Name the cases of microbenchmarks without the settings that all of these have in common.

    Returns
    -------
    dict of str to str, str
        The short name of each case, and the settings in common; "" for none.
    """
    found = {name: _settings(timed[0].run) for name, timed in cases.items()
             if not isinstance(timed[0].run, Run)}
    common = dict(set.intersection(*(set(one.items()) for one in found.values()))) if found else {}
    short = {name: name for name in cases}
    for name, settings in found.items():
        left = _in_words({key: value for key, value in settings.items() if key not in common})
        short[name] = name.replace(f", {_in_words(settings)}", f", {left}" * bool(left))
    return short, _in_words(dict(sorted(common.items())))


def common_cases(names: tuple[str, str], first: Cases, second: Cases) -> list[str]:
    """Return the cases that both sides have.

    Raises UsageError when there are none, or a case is not the same in all of its runs.
    """
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
