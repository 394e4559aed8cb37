"""Draw measurements of schemes against ranks: colours, lines, intervals, captions."""

import itertools
from typing import Any

from bench.cases.paper import PAPER, TITLES, title
from bench.records.folder import Results, most_oversubscribed, share_cores
from bench.reports import emulated
from bench.reports.figures.style import CYCLE, draw_bar, make_figure
from mm3d.grid.shape import GridShape

STYLES = dict(zip(TITLES, itertools.cycle(CYCLE)))    # the paper's schemes have the first
ASIDE = (-1, 0, 1, -2, 2, -3, 3, -4)    # horizontal shifts of the schemes' intervals
TICKS = (8, 16, 36, 64)
FigurePoint = tuple[int, float]


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
    """Draw the closed form of a scheme, joined; dashes for one point or an unpublished scheme.

    The latter may have points on grids of different shapes, with no line between them.
    """
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
