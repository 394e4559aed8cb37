"""The paper's Tables 1 and 2, with what was measured beside what was published."""

import math
import textwrap
from pathlib import Path

import numpy as np

from bench import intervals
from bench.cases import HEADINGS, load, select, title
from bench.results import Results, collect
from mm3d import timing
from mm3d.store import PHASES, Run

WIDTH = 100


def tables(folder: str | Path) -> str:
    """Both tables, for every preset that `folder` has results of, with notes.

    Raises
    ------
    StoreError
        When there are no results in `folder`.
    """
    found, problems = collect(folder)
    parts = [part for results in found for part in one_preset(results)]
    if problems:
        parts.append(_note("Left out:", problems))
    return "\n\n".join(parts)


def one_preset(results: Results) -> list[str]:
    """The tables and notes of one preset."""
    about = load().presets[results.preset].about if results.preset in load().presets else ""
    parts = [f"Preset {results.preset}: {about}"]
    for name in HEADINGS:
        parts += [table(name, results), speed_ups(name, results)]
    return parts + [_note("About the published figures:", published_notes()),
                    _note("About the measured figures:", measured_notes(results))]


def table(name: str, results: Results) -> str:
    """The rows of the table `name`; "missing" where nothing was measured."""
    rows = results.rows(name)
    runs = [results.get(row) for row in rows]
    forward, backward = (_column([run and timing.typical(run.samples[phase]) for run in runs])
                         for phase in PHASES)
    average = _column([run and measured_average(run) for run in runs])
    lines = []
    for row, run, *times in zip(rows, runs, forward, backward, average):
        sizes = [run.configuration[s] for s in ("batch", "hidden")] if run else ["", ""]
        printed = [f"{row.forward:.3f}", f"{row.backward:.3f}",
                   f"{row.average:.3f}{' ' if row.consistent else '*'}"]
        known = [row.batch, row.hidden, *printed] if row.published else ["-"] * 5
        lines.append([title(row.scheme), row.gpus, *known, "|", *sizes, *times])
    columns = ["batch", "hidden", "forward", "backward", "average"]
    units = ["size", "size", "time (s)", "time (s)", "step (s)"]
    heads = [["", "# GPUs", *columns, "|", *columns], ["scheme", "or ranks", *units, "|", *units]]
    groups = {"published (GPUs)": (2, 7), "measured (ranks)": (8, 13)}
    parts = [HEADINGS[name], aligned(heads, lines, groups)]
    heads, lines = intervals.certainty(rows, runs)
    return "\n\n".join(parts + [aligned(heads, lines, {})] * bool(lines))


def speed_ups(name: str, results: Results) -> str:
    """The speed-up of 3-D over the others at the most GPUs, published and measured."""
    rows = {row.scheme: row for row in select(name) if row.gpus == 64}
    lines = []
    for other in ("1d", "2d"):
        pair = rows[other], rows["3d"]
        runs = [results.get(row) for row in pair]
        measured = (["missing", ""] if None in runs else
                    [_ratio(*map(measured_average, runs)), intervals.verdict(*runs)])
        lines.append([f"over {title(other)}", _ratio(*(row.average for row in pair)),
                      _ratio(*(row.recomputed for row in pair)), *measured])
    heads = [["speed-up of 3-D at 64", "printed", "recomputed", "measured", "differs"]]
    return aligned(heads, lines, {})


def measured_average(run: Run) -> float:
    """Average step time in seconds per sequence (equation 6), of medians."""
    return timing.average_step_time(run.samples, run.configuration["batch"])


def published_notes() -> list[str]:
    """The paper's inconsistencies, from its own figures."""
    wrong = [row for row in load().rows if not row.consistent]
    notes = [f"* {HEADINGS[row.table]}, {title(row.scheme)} on {row.gpus} GPUs: the paper prints "
             f"{row.average:.3f} s, but its own times give ({row.forward:.3f} + "
             f"{row.backward:.3f}) / {row.batch} = {row.recomputed:.3f} s (equation 6), as "
             f"all other rows do." for row in wrong]
    ratios = {}
    for name in HEADINGS:
        rows = {row.scheme: row for row in select(name) if row.gpus == 64}
        for kind in ("average", "recomputed"):
            ratios[name, kind] = " and ".join(
                _ratio(getattr(rows[other], kind), getattr(rows["3d"], kind))
                for other in ("1d", "2d"))
    notes.append(f"The paper's speed-ups of 3-D over 1-D and 2-D, {ratios['weak', 'average']}, "
                 f"are given for strong scaling (Section 4.2.2), but they are the ratios of "
                 f"Table 1, weak scaling, with the wrong figure; with the recomputed one Table 1 "
                 f"has {ratios['weak', 'recomputed']}. Table 2, strong scaling, itself has "
                 f"{ratios['strong', 'average']}.")
    return notes


def measured_notes(results: Results) -> list[str]:
    """How the measured figures came about, and what they do not show."""
    runs = list(results.runs.values())
    if not runs:
        return [f"None but {_count(results.overridden, 'run')} with sizes given by hand."]
    notes = [f"Model: layers {_all(runs, 'layers')}, sequence {_all(runs, 'seq')}, "
             f"{_all(runs, 'dtype')}, MLP {_all(runs, 'mlp_factor')} x hidden. The published "
             f"figures are from V100 GPUs at the published sizes: compare ratios, not seconds.",
             f"Times: of the slowest rank, the median of at least {_all(runs, 'repetitions')} "
             f"repetitions after {_all(runs, 'warmup')} to warm up. Every result was first "
             f"verified against the serial scheme: the largest relative error is "
             f"{max(check.error for run in runs for check in run.checks):.1g}."]
    notes += intervals.notes(runs)
    crowded = [run for run in runs if run.environment["oversubscribed"]]
    if crowded:
        most = max(crowded, key=lambda run: run.environment["ranks_per_core"])
        notes.append(f"NOT SCALING RESULTS: in {len(crowded)} of {len(runs)} rows ranks outnumber "
                     f"cores, with up to {most.ranks} ranks on {most.environment['cores']} cores. "
                     f"The ranks take turns, so more ranks cannot be faster; such times compare "
                     f"the total work, copying and waiting of the schemes, nothing else.")
    smaller = [run for run in runs if not run.configuration["verified_measured_model"]]
    if smaller:
        notes.append(f"In {len(smaller)} rows a smaller model of the same scheme and grid was "
                     f"verified, because a serial model of the measured size does not fit.")
    differ = [_title(key) for key, run in results.runs.items() if not words_agree(run)]
    if differ:
        notes.append(f"The words moved differ from the closed form in: {', '.join(differ)}.")
    missing = [_title((row.table, row.scheme, row.gpus)) for row in load().rows
               if results.get(row) is None]
    if missing:
        notes.append(f"Missing, {len(missing)} of {len(load().rows)} rows: {', '.join(missing)}.")
    if results.earlier:
        notes.append(f"Of each row the latest run is shown; the folder also has "
                     f"{_count(results.earlier, 'earlier run')}.")
    if results.overridden:
        notes.append(f"Not shown: {_count(results.overridden, 'run')} with sizes given by hand.")
    return notes + machines(runs)


def machines(runs: list[Run]) -> list[str]:
    """A line for each environment that the runs have."""
    lines = []
    for run in runs:
        env = run.environment
        commit = env["git_commit"][:12] + ("" if env["git_clean"] else " with changes")
        lines.append(f"Machine: {env['cpu_model']}, {env['cores']} cores; {env['mpi']}; "
                     f"{env['blas']} with {env['blas_architecture']} kernels, "
                     f"{_count(env['blas_threads'], 'thread')} a rank; backend {env['backend']}, "
                     f"NumPy {env['numpy_version']}, Python {env['python']}; source {commit}.")
    return list(dict.fromkeys(lines))


def words_agree(run: Run) -> bool:
    """Whether the words counted on all ranks are those of the closed form."""
    return np.array_equal(run.traffic["words"].sum(axis=1), run.expected_words)


def _title(key: tuple[str, str, int]) -> str:
    return f"{key[0]} {title(key[1])} {key[2]}"


def _all(runs: list[Run], setting: str) -> str:
    """The value that a setting has in all runs, or its values."""
    return " or ".join(map(str, sorted({run.configuration[setting] for run in runs})))


def _ratio(slow: float, fast: float) -> str:
    return f"{slow / fast:.2f}x"


def _column(seconds: list[float | None]) -> list[str]:
    """Seconds with as many decimals as give the least of them three significant digits."""
    found = [value for value in seconds if value]
    decimals = min(9, max(0, 2 - math.floor(math.log10(min(found))))) if found else 0
    return [f"{value:.{decimals}f}" if value else "missing" for value in seconds]


def aligned(heads: list[list], lines: list[list], groups: dict[str, tuple[int, int]]) -> str:
    """Columns under headings, the first to the left; `groups` are titles over some of them."""
    rows = [[str(cell) for cell in row] for row in [*heads, *lines]]
    widths = [max(map(len, column)) for column in zip(*rows)]
    text = ["  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width
                                                  in zip(row[1:], widths[1:]))]).rstrip()
            for row in rows]
    text.insert(len(heads), "  ".join("-" * width for width in widths))
    over = ""
    for heading, (first, last) in groups.items():
        over = over.ljust(sum(widths[:first]) + 2 * first)
        over += f" {heading} ".center(sum(widths[first:last]) + 2 * (last - first - 1), "-")
    return "\n".join([over, *text] if over else text)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _note(heading: str, notes: list[str]) -> str:
    lines = [textwrap.fill(note, WIDTH, initial_indent="  - ", subsequent_indent="    ",
                           break_long_words=False, break_on_hyphens=False) for note in notes]
    return "\n".join([heading, *lines])
