"""Figures of runs beside their limits: the roofline, and memory beside what is expected."""

import math
from typing import Iterable

import numpy as np

from bench import merit, parts
from bench.cases import HEADINGS
from bench.curves import found_runs, rate
from bench.overview import most
from bench.panels import (LeftOut, Point, against_ranks, blank, caption, curve, finish, from_zero,
                          line, plain_log, style)
from bench.results import Results
from mm3d.store import Run

OLD = "no run that is shown has recorded"
# What a rank keeps between forward and backward, and the most that it had.
KEPT, PEAK = ("parameters", "gradients", "saved"), ("pool_peak",)


def roofline(results: Results):
    """Rates of a rank in matrix products and over whole steps, under the machine's roofs.

    Raises
    ------
    LeftOut
        When no run was traced and has the machine's peaks.
    """
    lie = {key: place for key, run in results.runs.items() if (place := placed(run))}
    if not lie:
        raise LeftOut(f"{OLD} the machine's peaks and where its time went")
    figure, panels = blank(1, 2, (10, 5), "Roofline: rates of a rank against operations for each "
                           "byte of the products' operands and results")
    for panel, table in zip(panels[0], HEADINGS):
        for scheme in results.schemes():
            found = [(p, lie[table, scheme, p])
                     for p, _ in found_runs(results, results.rows(table, scheme))
                     if (table, scheme, p) in lie]
            for what, place, face in (("in products", 1, style(scheme)[0]), ("step", 2, "white")):
                line(panel, scheme, [(at[0], at[place]) for _, at in found], linestyle="",
                     markerfacecolor=face, **{} if place == 1 else {"label": "_step"})
            for ranks, at in found:
                panel.annotate(ranks, at[:2], xytext=(5, -3), fontsize=7,
                               textcoords="offset points")
        panel.set(xscale="log", yscale="log", title=f"{HEADINGS[table]}, preset {results.preset}",
                  xlabel="flop/byte", ylabel="GFLOP/s a rank")
        for axis in (panel.xaxis, panel.yaxis):
            plain_log(axis)
        _roofs(panel, [results.runs[key] for key in lie if key[0] == table])
        finish(panel)
    caption(figure, results, "Filled: while in matrix products. Open: useful operations over the "
            "whole step. Numbers: ranks.", "Roofs: rate of products, and bandwidth of memory "
            "beyond the caches where known, of all cores over the ranks, of the same runs "
            "(medians).")
    return figure


def placed(run: Run) -> tuple[float, float, float] | None:
    """Operations a byte, GFLOP/s of a rank in products, and in the whole step; None where it was
    not recorded."""
    lie = merit.roofline(run)
    if lie is None or not peaks(run)[0] > 0:
        return None
    intensity, speed = lie["step"]
    return intensity, speed / 1e9, rate(run) / run.ranks / 1e9


def peaks(run: Run) -> tuple[float, float]:
    """Operations and bytes a second of a rank with all at work; NaN where not known."""
    return tuple(parts.peak(run, f"{name}_together") for name in ("gemm", "memory"))


def _roofs(panel, runs: list[Run]) -> None:
    """A roof for each number of ranks, as they share the machine; a level one where the rate of
    memory is not known."""
    left, right = panel.get_xlim()
    for ranks in sorted({run.ranks for run in runs}):
        multiply, memory = np.median([peaks(run) for run in runs if run.ranks == ranks], axis=0)
        # Without a rate of memory it is that of products alone.
        ridge = left if math.isnan(memory) else multiply / memory
        at = np.array([min(left, ridge / 4), ridge, max(right, ridge * 4)])
        panel.plot(at, np.fmin(multiply, memory * at) / 1e9, color="0.45", linewidth=0.9,
                   zorder=1, label="_roof")
        # At the ridge: what is measured lies further right.
        panel.annotate(f"roof of {ranks} ranks", (ridge, multiply / 1e9), xytext=(2, 2),
                       textcoords="offset points", fontsize=7, color="0.35")


def memory(results: Results):
    """What a rank keeps, with the closed form, and the most that it has, with a dry run's.

    Raises
    ------
    LeftOut
        When no run has its memory.
    """
    if not any("memory" in run.groups for run in results.runs.values()):
        raise LeftOut(f"{OLD} its memory")
    figure, panels = against_ranks(2, 2, (9, 7.2), "Memory of the rank that has the most: "
                                   "measured, and expected")
    for row, table in zip(panels, HEADINGS):
        for panel, names, what in zip(row, (KEPT, PEAK), (
                "parameters, gradients, saved", "peak of all arrays")):
            for scheme in results.schemes():
                runs = [run for _, run in found_runs(results, results.rows(table, scheme))]
                curve(panel, scheme, _mebibytes(runs, [f"expected_{name}" for name in names]))
                line(panel, scheme, _mebibytes(runs, names), linestyle="", markersize=7)
            if panel.lines:
                panel.plot([], [], "-", color="grey",
                           label="dry run" if names is PEAK else "closed form")
            panel.set(title=f"{HEADINGS[table]}: {what}", xlabel="ranks", ylabel="MiB a rank")
            from_zero(panel)
            finish(panel)
    figure.supxlabel(f"Preset {results.preset}. The closed form of what is kept is the mean "
                     f"rank's; the peak is beside that of a dry run, by way of MPI.",
                     fontsize=8.5)
    return figure


def _mebibytes(runs: list[Run], names: Iterable[str]) -> list[Point]:
    """By ranks the sum of some variables, each of the rank that has the most of it."""
    points = []
    for run in runs:
        points.append((run.ranks, sum(most(run, name) for name in names) / 2 ** 20))
    return [point for point in points if math.isfinite(point[1])]
