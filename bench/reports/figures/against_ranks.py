"""Draw figures against ranks: step time, speed-up and efficiency, words; and share their style."""

import itertools
import textwrap
from typing import Any

from bench.cases.paper import HEADINGS, PAPER, TITLES, Row, load_tables, title
from bench.cases.selection import select_rows
from bench.cases.variants import recorded_variant
from bench.records.folder import Results, most_oversubscribed, share_cores
from bench.records.model_run import Run
from bench.records.notes import words_note
from bench.reports import emulated, merit
from bench.reports.figures.style import (CYCLE, add_legends, draw_bar, label_plainly, make_figure,
                                         start_at_zero)
from bench.statistics import Interval, median_interval
from mm3d import ModelSizes
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.schemes import registry

STYLES = dict(zip(TITLES, itertools.cycle(CYCLE)))    # the paper's schemes have the first
ASIDE = (-1, 0, 1, -2, 2, -3, 3, -4)    # horizontal shifts of the schemes' intervals
TICKS = (8, 16, 36, 64)
FigurePoint = tuple[int, float]


def draw_step_times(results: Results):
    """Draw average step time against GPUs or ranks: weak and strong, published and measured."""
    figure, panels = make_rank_figure(2, 2, (9, 7.2), (
        "Average step time of a sequence, (forward + backward) / batch"))
    for row, table in enumerate(HEADINGS):
        published, measured = panels[row]
        for scheme in results.schemes():
            rows = results.rows(table, scheme)
            draw_line(published, scheme, [(r.gpus, r.average) for r in rows if r.published])
            averages = [(run.ranks, step_time_interval(run))
                        for run in measured_runs(results, rows)]
            draw_line(measured, scheme, [(p, one.median) for p, one in averages])
            draw_intervals(measured, scheme, [(p, one.low, one.high) for p, one in averages])
        for wrong in (r for r in select_rows(table) if not r.consistent):
            draw_line(published, wrong.scheme, [(wrong.gpus, wrong.recomputed)], linestyle="",
                      markerfacecolor="white", label=f"{title(wrong.scheme)}, recomputed")
        published.set(title=f"{HEADINGS[table]}: published", xlabel="GPUs",
                      ylabel="average step time (s)")
        measured.set(title=f"{HEADINGS[table]}: {_measured(results)}", xlabel="ranks",
                     ylabel="average step time (s)")
        for panel in panels[row]:
            start_at_zero(panel)
    add_legends(figure, panels.flat)
    write_caption(figure, results, "Measured: medians of whole steps; bars: their 95 % confidence "
                  "intervals.", "The tables add the medians of forward and of backward.")
    return figure


def _measured(results: Results) -> str:
    """Return the title of the measured panel; a long preset name gets a line of its own."""
    between = "\n" if len(results.title) > 20 else " "
    return f"measured,{between}preset {results.title}"


def draw_scaling(results: Results):
    """Draw speed-up of strong scaling, and efficiency of weak scaling: published and measured.

    Both follow from the useful floating-point operations of all ranks over the step's time,
    relative to the scheme's fewest ranks, where speed-up is the rank count and efficiency is 1.
    """
    figure, panels = make_rank_figure(2, 2, (9, 7.2), (
        "Speed-up and efficiency, relative to each scheme's fewest ranks"))
    for row, (table, whole) in enumerate((("strong", True), ("weak", False))):
        published, measured = panels[row]
        for scheme in results.schemes():
            rows = [r for r in results.rows(table, scheme) if r.published]
            points = [(r.gpus, paper_rate(r)) for r in rows]
            draw_line(published, scheme, relative_rates(points, whole))
            found = sorted(measured_runs(results, results.rows(table, scheme)),
                           key=lambda run: run.ranks)
            averages = list(map(step_time_interval, found))
            rates = relative_rates([(run.ranks, rate_of_time(run, one.median))
                                    for run, one in zip(found, averages)], whole)
            draw_line(measured, scheme, rates)
            draw_intervals(measured, scheme, [
                (p, y * one.median / one.low, y * one.median / one.high)
                for (p, y), one in zip(rates, averages)])
        for panel, what, unit in ((published, "published", "GPUs"),
                                  (measured, _measured(results), "ranks")):
            panel.plot(TICKS, TICKS if whole else [1] * len(TICKS), ":", color="black",
                       linewidth=1, label="ideal")
            panel.set(title=f"{HEADINGS[table]}: {what}", xlabel=unit,
                      ylabel="speed-up" if whole else "efficiency")
            if whole:
                panel.set_yscale("log", base=2)
                label_plainly(panel.yaxis, 2.0, (1,))
            else:
                start_at_zero(panel)
        limits = [bound for panel in panels[row] for bound in panel.get_ylim()]
        for panel in panels[row]:
            panel.set_ylim(min(limits), max(limits))
    add_legends(figure, panels.flat)
    write_caption(figure, results, "Measured: by the medians of whole steps; bars: by their 95 % "
                  "confidence intervals, with the fewest ranks' median taken as exact.")
    return figure


def draw_words(results: Results):
    """Draw words counted per rank and sequence against ranks, with the closed form."""
    from matplotlib.ticker import EngFormatter
    figure, panels = make_rank_figure(1, 2, (9, 4.9), (
        "Words of a step, per rank and sequence: counted, bucket algorithm, and by the closed "
        "form"))
    for panel, table in zip(panels[0], HEADINGS):
        for scheme in results.schemes():
            runs = measured_runs(results, results.rows(table, scheme))
            draw_closed_form(panel, scheme, closed_form_points(runs, table))
            points = [(run.ranks, counted_words(run)) for run in runs]
            draw_line(panel, scheme, points, linestyle="", markersize=7)
        if any(results.get(row) for row in results.rows(table)):
            panel.plot([], [], "-", color="grey", label="closed form")
        panel.set(title=f"{HEADINGS[table]}, preset {results.title}", xlabel="ranks",
                  ylabel="words per rank and sequence")
        start_at_zero(panel)
        panel.yaxis.set_major_formatter(EngFormatter(sep=""))
    add_legends(figure, panels.flat)
    note = words_note(map(merit.transport_name, results.runs.values()))
    figure.supxlabel(textwrap.fill(note, 130))
    return figure


def measured_runs(results: Results, rows: list[Row]) -> list[Run]:
    """List the runs of the rows that were measured."""
    return list(filter(None, map(results.get, rows)))


def step_time_interval(run: Run) -> Interval:
    """Compute the median average step time of whole steps, and its 95 % confidence interval."""
    return median_interval(run.steps / run.batch)


def step_rate(run: Run) -> float:
    """Compute the useful operations a second of all ranks."""
    return rate_of_time(run, run.average)


def rate_of_time(run: Run, average: float) -> float:
    """Compute the useful operations a second at an average step time of `average` seconds."""
    return int(run.values("flops")) / (average * run.batch)


def paper_rate(row: Row) -> float:
    """Compute the useful operations a second of a published row from its own times."""
    settings = load_tables().settings
    sizes = ModelSizes(settings.layers, row.hidden, settings.heads[row.hidden], row.batch,
                       settings.seq)
    return sum(cost.flops(sizes).values()) / (row.forward + row.backward)


def relative_rates(points: list[FigurePoint], whole: bool) -> list[FigurePoint]:
    """Divide rates, or unless `whole` rates per rank, by the rate per rank at the fewest ranks."""
    if not points:
        return []
    ranks, base = min(points)
    return [(p, y / base * (ranks if whole else ranks / p)) for p, y in sorted(points)]


def counted_words(run: Run) -> float:
    """Count the words of a step for each sequence, the mean over ranks."""
    return run.traffic["words"].sum() / run.ranks / run.batch


def closed_form_points(runs: list[Run], table: str) -> list[FigurePoint]:
    """Compute the closed form at the runs' ranks, and of the paper's schemes between these."""
    points = {run.ranks: run.expected_words.sum() / run.ranks / run.batch for run in runs}
    if table == "strong" and runs and runs[-1].configuration["scheme"] in PAPER:
        chosen = runs[-1].configuration
        sizes = ModelSizes.from_settings(chosen)
        for grid in grids_between(chosen["scheme"]):
            forms = cost.words(chosen["scheme"], grid, sizes, chosen.get("recompute", "none"),
                               **recorded_variant(chosen).options(chosen["scheme"]))
            total = sum(sum(form.values()) for form in forms.values())
            points.setdefault(grid.ranks, total / grid.ranks / chosen["batch"])
    return sorted(points.items())


def grids_between(scheme: str) -> list[GridShape]:
    """List the default grids of `scheme` for 8 to 64 ranks."""
    known = registry().get(scheme)
    ranks = range(TICKS[0], TICKS[-1] + 1) if known else ()
    return [grid for count in ranks if (grid := own_grid(known, count)) is not None]


def scheme_style(scheme: str) -> tuple[str, str]:
    """Return colour and marker of `scheme`; grey dots if it is unknown."""
    return STYLES.get(scheme, ("grey", "."))


def scheme_label(scheme: str) -> str:
    """Return the legend title of `scheme`, which says if it is not published."""
    return title(scheme) + ", not published" * (scheme not in PAPER)


def own_grid(algorithm: Any, ranks: int) -> GridShape | None:
    """Return the grid that a scheme or product chooses for so many ranks; None without one."""
    try:
        return algorithm.grid_shape(algorithm.default_grid(ranks))
    except ValueError:
        return None


def make_rank_figure(rows: int, columns: int, size: tuple[float, float], heading: str):
    """Make a figure with the paper's numbers of ranks along its panels."""
    figure, panels = make_figure(rows, columns, size, heading)
    for panel in panels.flat:
        panel.set_xscale("log", base=2)
        panel.set_xticks(TICKS, [str(tick) for tick in TICKS])
        panel.minorticks_off()
        panel.set_xlim(TICKS[0] / 1.25, TICKS[-1] * 1.25)
    return figure, panels


def draw_line(panel, scheme: str, points: list[FigurePoint], **how) -> None:
    """Draw the points of a scheme, joined."""
    colour, marker = scheme_style(scheme)
    if points:
        panel.plot(*zip(*sorted(points)), **{"marker": marker, "color": colour,
                                             "label": scheme_label(scheme)} | how)


def draw_intervals(panel, scheme: str, points: list[tuple[int, float, float]]) -> None:
    """Draw the intervals of a scheme at numbers of ranks, slightly aside from other schemes."""
    aside = 1.035 ** dict(zip(STYLES, itertools.cycle(ASIDE))).get(scheme, 0)
    for ranks, *bounds in points:
        draw_bar(panel, ranks * aside, bounds, scheme_style(scheme)[0])


def draw_closed_form(panel, scheme: str, points: list[FigurePoint]) -> None:
    """Draw the closed form of a scheme, joined; dashes where grids may be of different shapes."""
    joined = len(points) > 1 and scheme in PAPER
    draw_line(panel, scheme, points, alpha=0.6, label="_closed form", markersize=16,
              marker="" if joined else "_", linestyle="-" if joined else "")


def write_caption(figure, results: Results, *remarks: str) -> None:
    """Write remarks below the panels, and a warning if ranks outnumbered cores or waited."""
    lines = list(remarks)
    runs = list(results.runs.values())
    inside, others = emulated.emulated_runs(runs), emulated.other_runs(runs)
    if inside:
        crowd = most_oversubscribed(inside)
        lines.append(f"Measured in an {emulated.describe_clusters(inside)}"
                     + (f", whose ranks {share_cores(crowd)}." if crowd else "."))
    crowd = most_oversubscribed(others)
    if crowd:
        some = f"{len(others)} of {len(runs)} rows measured" if inside else "Measured"
        lines.append(f"{some} with up to {crowd.ranks} ranks on {crowd.environment['cores']} "
                     f"cores, " + ("which they share for all that is not waited for."
                                   if results.variant.waits else
                                   "which take turns: not scaling results."))
    if results.variant.waits:
        lines.append("Ranks wait for the modelled seconds of their work; only collectives are "
                     "real.")
    if lines:
        figure.supxlabel("\n".join(lines))
