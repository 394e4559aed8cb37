"""Figures: average step time, and words moved beside their closed form."""

import itertools
import math
from pathlib import Path

from bench.cases import HEADINGS, TITLES, Row, select, title
from bench.results import Results, gather
from bench.tables import measured_average
from mm3d import SCHEMES, cost
from mm3d.store import Run

# Okabe and Ito's colours, which are told apart with every kind of colour vision; markers differ
# too, for print.
CYCLE = (("#D55E00", "o"), ("#009E73", "s"), ("#0072B2", "^"), ("#E69F00", "v"),
         ("#CC79A7", "D"), ("#56B4E9", "P"), ("black", "X"), ("#F0E442", "*"))
STYLES = dict(zip(TITLES, itertools.cycle(CYCLE)))    # the paper's schemes have the first
TICKS = (8, 16, 36, 64)


def plots(folder: str | Path) -> list[Path]:
    """Draw the figures of every preset that `folder` has results of, into `folder`.

    Returns
    -------
    list of Path
        The PNG files.

    Raises
    ------
    StoreError
        When there are no results in `folder`.
    """
    import matplotlib
    matplotlib.use("Agg")
    drawn = []
    for results in gather(folder).results:
        for name, draw in (("average-step-time", step_times), ("words-per-rank", words)):
            path = Path(folder) / f"{name}-{results.preset}.png"
            figure = draw(results)
            figure.savefig(path, dpi=150)
            matplotlib.pyplot.close(figure)
            drawn.append(path)
    return drawn


def step_times(results: Results):
    """Average step time against GPUs or ranks: weak and strong, published and measured."""
    figure, panels = _panels(2, 2, (9, 7.2))
    figure.suptitle("Average step time of a sequence, (forward + backward) / batch")
    for row, table in enumerate(HEADINGS):
        published, measured = panels[row]
        for scheme in results.schemes():
            rows = results.rows(table, scheme)
            _line(published, scheme, [(r.gpus, r.average) for r in rows if r.published])
            found = [(r.gpus, results.get(r)) for r in rows]
            _line(measured, scheme, [(p, measured_average(run)) for p, run in found if run])
        for wrong in (r for r in select(table) if not r.consistent):
            _correction(published, wrong)
        published.set(title=f"{HEADINGS[table]}: published", xlabel="GPUs",
                      ylabel="average step time (s)")
        measured.set(title=f"measured, preset {results.preset}", xlabel="ranks",
                     ylabel="average step time (s)")
        for panel in panels[row]:
            panel.set_ylim(bottom=0)
            _legend(panel)
    _caption(figure, results)
    return figure


def words(results: Results):
    """Words moved per rank and sequence against ranks, with the closed form."""
    from matplotlib.ticker import EngFormatter
    figure, panels = _panels(1, 2, (9, 4.4))
    figure.suptitle("Words moved in a step, per rank and sequence: "
                    "measured, and by the closed form")
    for panel, table in zip(panels[0], HEADINGS):
        for scheme in results.schemes():
            runs = [run for run in map(results.get, results.rows(table, scheme)) if run]
            colour, marker = style(scheme)
            points = [(run.ranks, moved(run)) for run in runs]
            curve = closed_form(runs, table)
            if curve:
                panel.plot(*zip(*curve), "-", color=colour, alpha=0.6, linewidth=1.5)
            if points:
                panel.plot(*zip(*points), linestyle="", marker=marker, color=colour,
                           markersize=7, label=title(scheme))
        if any(results.get(row) for row in results.rows(table)):
            panel.plot([], [], "-", color="grey", label="closed form")
        panel.set(title=f"{HEADINGS[table]}, preset {results.preset}", xlabel="ranks",
                  ylabel="words per rank and sequence")
        panel.set_ylim(bottom=0)
        panel.yaxis.set_major_formatter(EngFormatter(sep=""))
        _legend(panel)
    return figure


def style(scheme: str) -> tuple[str, str]:
    """Colour and marker of `scheme`; grey dots when it is not known here."""
    return STYLES.get(scheme, ("grey", "."))


def moved(run: Run) -> float:
    """Words moved in a step, the mean over ranks, over the batch."""
    return run.traffic["words"].sum() / run.ranks / run.configuration["batch"]


def closed_form(runs: list[Run], table: str) -> list[tuple[int, float]]:
    """The closed form at the runs' ranks; where sizes stay the same, at the ranks between too."""
    points = {run.ranks: run.expected_words.sum() / run.ranks / run.configuration["batch"]
              for run in runs}
    if table == "strong" and runs:
        chosen = runs[-1].configuration
        for grid in grids_between(chosen["scheme"]):
            forms = cost.transformer_words(
                chosen["scheme"], grid, *(chosen[name] for name in (
                    "layers", "hidden", "heads", "batch", "seq")))
            ranks = math.prod(grid.values())
            total = sum(sum(form.values()) for form in forms.values())
            points[ranks] = total / ranks / chosen["batch"]
    return sorted(points.items())


def grids_between(scheme: str) -> list[dict[str, int]]:
    """The grids that `scheme` has for 8 to 64 ranks."""
    known = SCHEMES.get(scheme)
    grids = []
    for ranks in range(TICKS[0], TICKS[-1] + 1) if known else ():
        try:
            grids.append(dict(zip(known.directions, known.default_grid(ranks))))
        except ValueError:    # no grid of so many
            continue
    return grids


def _panels(rows: int, columns: int, size: tuple[float, float]):
    from matplotlib import pyplot
    figure, panels = pyplot.subplots(rows, columns, figsize=size, squeeze=False,
                                     layout="constrained")
    for panel in panels.flat:
        panel.set_xscale("log", base=2)
        panel.set_xticks(TICKS, [str(tick) for tick in TICKS])
        panel.minorticks_off()
        panel.set_xlim(TICKS[0] / 1.25, TICKS[-1] * 1.25)
        panel.grid(alpha=0.3)
    return figure, panels


def _line(panel, scheme: str, points: list[tuple[int, float]]) -> None:
    colour, marker = style(scheme)
    if points:
        panel.plot(*zip(*points), marker=marker, color=colour, label=title(scheme))


def _legend(panel) -> None:
    if panel.lines:
        panel.legend()
    else:
        panel.text(0.5, 0.5, "no results", transform=panel.transAxes, ha="center")


def _correction(panel, row: Row) -> None:
    """The figure that the row's own times give, beside the wrong one."""
    colour, marker = style(row.scheme)
    panel.plot(row.gpus, row.recomputed, marker=marker, color=colour, markerfacecolor="white",
               linestyle="", label=f"{title(row.scheme)}, recomputed")


def _caption(figure, results: Results) -> None:
    """Below the panels: when the measured times are no scaling results."""
    crowded = [run for run in results.runs.values() if run.environment["oversubscribed"]]
    if crowded:
        most = max(crowded, key=lambda run: run.environment["ranks_per_core"])
        figure.supxlabel(f"Measured with up to {most.ranks} ranks on {most.environment['cores']} "
                         f"cores, which take turns: not scaling results.", fontsize=9)
