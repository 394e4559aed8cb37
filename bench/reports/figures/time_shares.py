"""Draw the shares of the parts in the time of a step."""

import itertools
from typing import Iterable, Sequence

from bench.cases.paper import HEADINGS, title
from bench.document import number_cell
from bench.records.folder import Results
from bench.records.model_run import Run
from bench.reports import time_parts
from bench.reports.figures.by_scheme import scheme_label, write_caption
from bench.reports.figures.style import (BLUE, DARK_GREY, GREEN, LIGHT_GREY, NoFigure, ORANGE,
                                         PURPLE, SIDE_SHIFTS, SKY, VERMILION, YELLOW, draw_stack,
                                         make_figure)
from mm3d.tracing.events import PHASES

# Lost time is grey.
COLOURS = {"gemm": BLUE, "x": VERMILION, "y": ORANGE, "z": PURPLE, "elementwise": GREEN,
           "waiting": LIGHT_GREY, "other": DARK_GREY}
HATCHES = {"x": "//", "y": "\\\\", "z": "xx"}
PAIR = 0.62     # inches per pair of bars, where there are many
IN_FULL = 10    # up to this many pairs, each has its scheme written below
# For further directions, in the order of the grid.
FURTHER = (SKY, ".."), (YELLOW, "||"), (SKY, "--"), (YELLOW, "++")


def draw_time_shares(results: Results):
    """Draw the parts of forward and backward as shares, with the seconds above them.

    Raises NoFigure when no run was traced.
    """
    traced = {key: found for key, run in results.runs.items()
              if (found := time_parts.mean_parts(run))}
    if not traced:
        raise NoFigure("no run says where its time went (it was measured before that was "
                       "recorded, or with --traced 0)")
    looks = part_styles(results.runs[key].directions for key in traced)
    most = max(sum(key[0] == table for key in traced) for table in HEADINGS)
    figure, panels = make_figure(2, 1, (max(10, 2.2 + PAIR * most), 7.2), (
        "Where the time goes, in the mean over ranks and traced repetitions"))
    for (panel,), table in zip(panels, HEADINGS):
        rows = [row for row in results.rows(table) if row.key in traced]
        runs = [results.get(row) for row in rows]
        for place, run in enumerate(runs):
            _stacked(panel, place, traced[table, run.configuration["scheme"], run.ranks], looks,
                     7.5 if most <= IN_FULL else 6.5)
        if most <= IN_FULL:
            panel.set_xticks(range(len(runs)), [
                f"{title(row.scheme)}\n{run.ranks} ranks" + "\nnot published" * (
                    not row.published) for row, run in zip(rows, runs)])
        else:
            _name_groups(panel, runs)
        panel.set(title=f"{HEADINGS[table]}, preset {results.title}: forward (left bars) and "
                  f"backward (right), seconds of a step above", ylabel="share of the phase (%)",
                  ylim=(0, 108), xlim=(-0.6, max(len(runs), 1) - 0.4))
        panel.grid(visible=False, axis="x")
        if not runs:
            panel.text(0.5, 0.5, "no results", transform=panel.transAxes, ha="center")
    _labels(figure, traced, looks)
    write_caption(figure, results)
    return figure


def _name_groups(panel, runs: list[Run]) -> None:
    """Write the ranks of each pair of bars below it, and the name of each scheme once."""
    panel.set_xticks(range(len(runs)), [str(run.ranks) for run in runs])
    places: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        places.setdefault(run.configuration["scheme"], []).append(place)
    for scheme, own in places.items():
        panel.annotate(scheme_label(scheme).replace(", ", ",\n"), (sum(own) / len(own), 0),
                       (0, -18), xycoords=("data", "axes fraction"), textcoords="offset points",
                       ha="center", va="top", fontsize=8.5)
        if own[0]:
            panel.axvline(own[0] - 0.5, color="0.6", linewidth=0.8, linestyle=":")


def part_styles(grids: Iterable[Sequence[str]]) -> dict[str, tuple[str, str | None]]:
    """Return colour and hatching of all parts on grids, by directions, from the stack's bottom."""
    # Larger grids first: they give the order of the directions.
    of_grids = sorted(grids, key=len, reverse=True)
    directions = dict.fromkeys(itertools.chain.from_iterable(of_grids))
    further = dict(zip((name for name in directions if name not in COLOURS),
                       itertools.cycle(FURTHER)))
    return {name: further.get(name) or (COLOURS[name], HATCHES.get(name))
            for name in time_parts.stacked_parts(directions)}


def _stacked(panel, place: int, shares: dict[str, dict[str, float]],
             looks: dict[str, tuple[str, str | None]], size: float) -> None:
    """Draw the bars of forward and backward, with their seconds in letters of this size."""
    for phase, side in zip(PHASES, SIDE_SHIFTS):
        whole = sum(shares[phase].values())
        draw_stack(panel, place + side, [(100 * shares[phase].get(name, 0.0) / whole, *look, "")
                                         for name, look in looks.items()])
        seconds = number_cell(whole, ".0f" if whole >= 100 else "#.2g")
        panel.text(place + side, 101, str(seconds), ha="center", va="bottom", fontsize=size)


def _labels(figure, traced: dict, looks: dict[str, tuple[str, str | None]]) -> None:
    """Draw the legend of all parts in the runs, from the top of the stack."""
    from matplotlib.patches import Patch
    used = [name for name in looks if any(shares[phase].get(name, 0) > 0
                                          for shares in traced.values() for phase in PHASES)]
    figure.legend(handles=[Patch(facecolor=looks[name][0], hatch=looks[name][1],
                                 edgecolor="white", label=time_parts.part_title(name))
                           for name in reversed(used)], loc="outside right center")
