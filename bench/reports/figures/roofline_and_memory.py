"""Draw runs beside their limits: the roofline, and memory beside closed forms."""

import math
from typing import Iterable

import numpy as np

from bench.cases.paper import HEADINGS, title
from bench.records.folder import Results
from bench.records.run_file import Run
from bench.reports import merit, time_parts
from bench.reports.figures.against_ranks import found_runs, rate
from bench.reports.figures.labels import Label, beside, place
from bench.reports.figures.style import (LeftOut, Point, against_ranks, blank, caption, curve,
                                         finish, from_zero, line, plain_log, style)
from bench.reports.merit_rows import most

NOT_RECORDED = "no run that is shown has recorded"
WORKERS = ("alone", "together")    # one rank while the others sleep; each while all work
ROOFS = {"alone": "-", "together": "--"}
# What a rank keeps between forward and backward, and the most that it had.
KEPT, PEAK = ("parameters", "gradients", "saved"), ("pool_peak",)


def roofline(results: Results):
    """Draw rates of a rank in matrix products and over whole steps, under its machine's roofs.

    A rank that multiplies has a core to itself as often as others wait, so its rate is compared
    with that of one rank alone; that of a step with what each rank has when all work at once.

    Raises
    ------
    LeftOut
        When no run was traced and has the machine's peaks.
    """
    lie = {key: at for key, run in results.runs.items() if (at := placed(run))}
    if not lie:
        raise LeftOut(f"{NOT_RECORDED} the machine's peaks and where its time went")
    figure, panels = blank(1, 2, (11, 5.2), "Roofline: rates of a rank against operations for "
                           "each byte of the products' operands and results")
    texts, markers, lines = [], [], []
    for panel, table in zip(panels[0], HEADINGS):
        for scheme in results.schemes():
            found = [(p, lie[table, scheme, p])
                     for p, _ in found_runs(results, results.rows(table, scheme))
                     if (table, scheme, p) in lie]
            for what, face in ((1, style(scheme)[0]), (2, "white")):
                line(panel, scheme, [(at[0], at[what]) for _, at in found], linestyle="",
                     markerfacecolor=face, **{} if what == 1 else {"label": "_step"})
                markers += [(panel, at[0], at[what]) for _, at in found]
                texts += [Label(panel, str(ranks), beside(at[0], at[what]), style(scheme)[0])
                          for ranks, at in found]
        panel.set(xscale="log", yscale="log", title=f"{HEADINGS[table]}, preset {results.title}",
                  xlabel="flop/byte", ylabel="GFLOP/s a rank")
        for axis in (panel.xaxis, panel.yaxis):
            plain_log(axis)
        for roof, flat in _roofs(panel, [results.runs[key] for key in lie if key[0] == table]):
            texts.append(roof)
            lines.append(flat)
    _roofline_legend(figure, [scheme for scheme in results.schemes()
                              if any(key[1] == scheme for key in lie)])
    caption(figure, results, "Numbers: ranks. Roofs: rate of products, and bandwidth of memory "
            "beyond the caches where known, of the same runs (medians);", "of all at work that of "
            "all cores over the ranks.")
    place(figure, texts, markers, lines)
    return figure


def placed(run: Run) -> tuple[float, float, float] | None:
    """Operations a byte, GFLOP/s of a rank in products, and in the whole step; None where it was
    not recorded."""
    lie = merit.roofline(run)
    if lie is None or not all(peaks(run, who)[0] > 0 for who in WORKERS):
        return None
    intensity, speed = lie["step"]
    return intensity, speed / 1e9, rate(run) / run.ranks / 1e9


def peaks(run: Run, who: str) -> tuple[float, float]:
    """Read operations and bytes a second of a rank, `who` being of `WORKERS`; NaN if unknown.
    """
    return tuple(time_parts.peak(run, f"{name}_{who}") for name in ("gemm", "memory"))


def _roofs(panel, runs: list[Run]) -> list[tuple[Label, tuple]]:
    """A roof of one rank alone, and one for each number of ranks, as they share the machine;
    level ones where the rate of memory is not known.

    Their labels, and the flat part of each: from where to where, and how high.
    """
    left, right = panel.get_xlim()
    found = []
    for ranks in [1, *sorted({run.ranks for run in runs})] if runs else []:
        who = WORKERS[ranks > 1]
        multiply, memory = np.median([peaks(run, who) for run in runs
                                      if ranks in (1, run.ranks)], axis=0)
        ridge = left if math.isnan(memory) else multiply / memory
        at = np.array([min(left, ridge / 4), ridge, max(right, ridge * 4)])
        panel.plot(at, np.fmin(multiply, memory * at) / 1e9, color="0.45", linewidth=0.9,
                   zorder=1, label="_roof", linestyle=ROOFS[who])
        # From the ridge to the right, above the roof, then below it.
        along = np.geomspace(ridge, max(right, ridge * 4), 9)[1:-1]
        label = Label(panel, f"{ranks} ranks" if ranks > 1 else "one rank alone", [
            ((x, multiply / 1e9), (0, side)) for side in (6, -6) for x in along], "0.35")
        found.append((label, (panel, ridge, at[-1], multiply / 1e9)))
    return found


def _roofline_legend(figure, schemes: list[str]) -> None:
    """Beside the panels: schemes, what filled and open markers are, and which roof is theirs."""
    from matplotlib.lines import Line2D
    marks = [Line2D([], [], linestyle="", color=style(scheme)[0], marker=style(scheme)[1],
                    label=title(scheme)) for scheme in schemes]
    marks += [Line2D([], [], linestyle="", color="black", marker="o", markerfacecolor=face,
                     label=text) for face, text in (
        ("black", "while in products:\nunder the roof of\none rank alone"),
        ("white", "useful operations over\nthe whole step: under\nthe roof of so many ranks"))]
    marks += [Line2D([], [], color="0.45", linewidth=0.9, linestyle=ROOFS[who], label=text)
              for who, text in zip(WORKERS, ("roof, the others sleep", "roof, all at work"))]
    figure.legend(handles=marks, loc="outside right center", labelspacing=0.9)


def memory(results: Results):
    """Draw what a rank keeps, with the closed form, and its peak, with a dry run's.

    Raises
    ------
    LeftOut
        When no run has its memory.
    """
    if not any("memory" in run.groups for run in results.runs.values()):
        raise LeftOut(f"{NOT_RECORDED} its memory")
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
    figure.supxlabel(f"Preset {results.title}. The closed form of what is kept is the mean "
                     f"rank's; the peak is beside that of a dry run, by way of MPI.",
                     fontsize=8.5)
    return figure


def _mebibytes(runs: list[Run], names: Iterable[str]) -> list[Point]:
    """Sum some variables by ranks, each of the rank that has the most of it."""
    points = []
    for run in runs:
        points.append((run.ranks, sum(most(run, name) for name in names) / 2 ** 20))
    return [point for point in points if math.isfinite(point[1])]
