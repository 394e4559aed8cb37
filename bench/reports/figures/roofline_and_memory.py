"""Draw runs beside their limits: the roofline, and memory beside closed forms."""

import math
from typing import Iterable

import numpy as np

from bench.cases.paper import HEADINGS
from bench.records.folder import Results
from bench.records.model_run import Run
from bench.reports import merit, time_parts
from bench.reports.figures.against_ranks import (FigurePoint, draw_closed_form, draw_line,
                                                 make_rank_figure, measured_runs, scheme_label,
                                                 scheme_style, step_rate, write_caption)
from bench.reports.figures.labels import Label, places_beside, place_labels
from bench.reports.figures.style import (NoFigure, add_legends, label_plainly, make_figure,
                                         start_at_zero)

NOT_RECORDED = "no run that is shown has recorded"
WORKERS = ("alone", "together")    # one rank while the others sleep, or all ranks
ROOFS = {"alone": "-", "together": "--"}
# Memory kept between forward and backward, and peak memory.
KEPT, PEAK = ("parameters", "gradients", "saved"), ("pool_peak",)


def draw_roofline(results: Results):
    """Draw rates of a rank in matrix products and over whole steps, under its machine's roofs.

    A rank that multiplies has a core to itself as often as others wait, so its rate is compared
    with one rank alone, and the rate of a step with that of a rank when all work at once.

    Raises NoFigure when no run was traced and has the machine's peaks.
    """
    lie = {key: at for key, run in results.runs.items() if (at := roofline_point(run))}
    if not lie:
        raise NoFigure(f"{NOT_RECORDED} the machine's peaks and where its time went")
    figure, panels = make_figure(1, 2, (11, 5.2), (
        "Roofline: rates of a rank against operations for each byte of the products' operands and "
        "results"))
    texts, markers, lines = [], [], []
    for panel, table in zip(panels[0], HEADINGS):
        for scheme in results.schemes():
            colour = scheme_style(scheme)[0]
            found = [(row.gpus, lie[row.key]) for row in results.rows(table, scheme)
                     if row.key in lie]
            for what, face in ((1, colour), (2, "white")):
                draw_line(panel, scheme, [(at[0], at[what]) for _, at in found], linestyle="",
                          markerfacecolor=face, **{} if what == 1 else {"label": "_step"})
                markers += [(panel, at[0], at[what]) for _, at in found]
                texts += [Label(panel, str(ranks), places_beside(at[0], at[what]), colour)
                          for ranks, at in found]
        panel.set(xscale="log", yscale="log", title=f"{HEADINGS[table]}, preset {results.title}",
                  xlabel="flop/byte", ylabel="GFLOP/s a rank")
        for axis in (panel.xaxis, panel.yaxis):
            label_plainly(axis)
        for roof, flat in _roofs(panel, [results.runs[key] for key in lie if key[0] == table]):
            texts.append(roof)
            lines.append(flat)
    _roofline_legend(figure, [scheme for scheme in results.schemes()
                              if any(key[1] == scheme for key in lie)])
    write_caption(figure, results, (
        "Numbers: ranks. Roofs: rate of products, and bandwidth of memory beyond the caches where "
        "known, of the same runs (medians);"), "of all at work that of all cores over the ranks.")
    place_labels(figure, texts, markers, lines)
    return figure


def roofline_point(run: Run) -> tuple[float, float, float] | None:
    """Return flops a byte, and GFLOP/s of a rank in products and in the step; None if unknown."""
    lie = merit.roofline_points(run)
    if lie is None or not all(machine_rates(run, who)[0] > 0 for who in WORKERS):
        return None
    intensity, speed = lie["step"]
    return intensity, speed / 1e9, step_rate(run) / run.ranks / 1e9


def machine_rates(run: Run, who: str) -> tuple[float, float]:
    """Read peak operations and bytes a second of a rank, of one of `WORKERS`; NaN if unknown."""
    return tuple(time_parts.machine_rate(run, f"{name}_{who}") for name in ("gemm", "memory"))


def _roofs(panel, runs: list[Run]) -> list[tuple[Label, tuple]]:
    """Draw the roof of one rank alone, and one for each number of ranks that share the machine.

    A roof is level if the rate of memory is unknown.  Return their labels, each with the flat
    part of the roof: panel, left, right, height.
    """
    left, right = panel.get_xlim()
    found = []
    for ranks in [1, *sorted({run.ranks for run in runs})] if runs else []:
        who = WORKERS[ranks > 1]
        multiply, memory = np.median([machine_rates(run, who) for run in runs
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
    """Draw the legend beside the panels: schemes, filled and open markers, and their roofs."""
    from matplotlib.lines import Line2D
    marks = [Line2D([], [], linestyle="", color=colour, marker=marker, label=scheme_label(scheme))
             for scheme in schemes for colour, marker in [scheme_style(scheme)]]
    marks += [Line2D([], [], linestyle="", color="black", marker="o", markerfacecolor=face,
                     label=text) for face, text in (
        ("black", "while in products:\nunder the roof of\none rank alone"),
        ("white", "useful operations over\nthe whole step: under\nthe roof of so many ranks"))]
    marks += [Line2D([], [], color="0.45", linewidth=0.9, linestyle=ROOFS[who], label=text)
              for who, text in zip(WORKERS, ("roof, the others sleep", "roof, all at work"))]
    figure.legend(handles=marks, loc="outside right center", labelspacing=0.9)


def draw_memory(results: Results):
    """Draw the memory that a rank keeps beside its closed form, and its peak beside a dry run's.

    Raises NoFigure when no run has its memory.
    """
    if not any("memory" in run.groups for run in results.runs.values()):
        raise NoFigure(f"{NOT_RECORDED} its memory")
    figure, panels = make_rank_figure(2, 2, (9, 7.2), "Memory of the rank that has the most: "
                                      "measured, and expected")
    for row, table in zip(panels, HEADINGS):
        for panel, names, what in zip(row, (KEPT, PEAK), (
                "parameters, gradients, saved", "peak of all arrays")):
            for scheme in results.schemes():
                runs = measured_runs(results, results.rows(table, scheme))
                expected = _mebibytes(runs, [f"expected_{name}" for name in names])
                draw_closed_form(panel, scheme, expected)
                draw_line(panel, scheme, _mebibytes(runs, names), linestyle="", markersize=7)
            if panel.lines:
                panel.plot([], [], "-", color="grey",
                           label="dry run" if names is PEAK else "closed form")
            panel.set(title=f"{HEADINGS[table]}: {what}", xlabel="ranks", ylabel="MiB a rank")
            start_at_zero(panel)
    add_legends(figure, panels.flat)
    figure.supxlabel(f"Preset {results.title}. The closed form of what is kept is the mean "
                     f"rank's; the peak is beside that of a dry run, by way of MPI.")
    return figure


def _mebibytes(runs: list[Run], names: Iterable[str]) -> list[FigurePoint]:
    """Sum variables by number of ranks, each of the rank that has the most of it."""
    points = [(run.ranks, sum(run.most("memory", name) for name in names) / 2 ** 20)
              for run in runs]
    return [point for point in points if math.isfinite(point[1])]
