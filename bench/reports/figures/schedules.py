"""Draw pipeline schedules: a row a rank, a colour a kind."""

import os
from functools import partial
from pathlib import Path
from typing import Mapping

from bench.reports.figures import style
from mm3d.training.schedules.clock import Timeline

ACTION_KINDS = {"F": ("forward", style.SKY), "B": ("backward, input", style.ORANGE),
                "W": ("backward, weights", style.GREEN), "BW": ("backward, both", style.YELLOW)}
BUBBLE = "#DDDDDD"
PALER = 0.55
LETTERS = 7.0    # points of the numbers of micro-batches; fewer in narrow boxes
LEAST = 5.0    # points below which numbers are left out
DIGIT, APART = 0.64, 0.3    # widths of a digit and of the gap between numbers, in letters
WIDTH = 14.0    # inches
LONG_TITLE = 100    # letters; what the schedule costs stands below a longer one


def picture(path: str | os.PathLike, timelines: Mapping[str, Timeline],
            unit: str | None = None, row: str = "rank") -> Path:
    """Write the figure of `draw_timelines`; path and errors are those of `style.save_picture`."""
    return style.save_picture(path, partial(draw_timelines, timelines, unit, row), dpi=110)


def draw_timelines(timelines: Mapping[str, Timeline], unit: str | None = None, row: str = "rank"):
    """Draw when each action runs, a panel a schedule, all with the same axis of time in `unit`."""
    end = max(float(max(ends[-1] for ends in one.ends)) for one in timelines.values())
    height = sum(0.8 + 0.28 * one.schedule.ranks for one in timelines.values())
    figure, panels = style.make_figure(len(timelines), 1, (WIDTH, height), "")
    for panel, (title, timeline) in zip(panels.flat, timelines.items()):
        _rows(panel, timeline, end)
        panel.set_ylabel(row)
        panel.set_xlabel(f"time ({unit})" if unit else "time")
        cost = f"{float(timeline.cost):.4g}{f' {unit}' if unit else ''}"
        space = " " if len(title) < LONG_TITLE else "\n"
        panel.set_title(f"{title}:{space}cost {cost}, "
                        f"bubble {float(timeline.bubble_rate):.1%} of it")
    _legend(figure, timelines.values())
    return figure


def _rows(panel, timeline: Timeline, end: float) -> None:
    """Draw the actions of each rank, those of the second chunk in a paler colour."""
    schedule = timeline.schedule
    digits = len(str(schedule.microbatches - 1))
    for rank, row in enumerate(schedule.rows):
        for index, action in enumerate(row):
            start, stop = (float(every[rank][index]) for every in (timeline.starts, timeline.ends))
            joined = action.joined, index + 1 < len(row) and row[index + 1].joined
            bottom, height = rank - 0.45 + 0.45 * joined[0], 0.45 if any(joined) else 0.9
            panel.broken_barh([(start, stop - start)], (bottom, height),
                              facecolor=ACTION_KINDS[action.kind][1], edgecolor="white",
                              linewidth=0.4, alpha=1 if action.chunk == 0 else PALER)
            room = (stop - start) / end * (WIDTH - 1) * 72    # points
            size = min(LETTERS, room / (DIGIT * digits + APART), LETTERS * height / 0.6)
            if size >= LEAST:
                panel.text((start + stop) / 2, bottom + height / 2, str(action.micro), ha="center",
                           va="center", fontsize=size, clip_on=True)
    panel.set(xlim=(0, end), ylim=(schedule.ranks - 0.5, -0.5))
    panel.set_yticks(range(schedule.ranks))
    panel.grid(False)
    panel.set_facecolor(BUBBLE)


def _legend(figure, timelines) -> None:
    from matplotlib.patches import Patch
    used = {action.kind for one in timelines for row in one.schedule.rows for action in row}
    patches = [Patch(facecolor=colour, label=label)
               for kind, (label, colour) in ACTION_KINDS.items() if kind in used]
    chunked = any(one.schedule.chunks > 1 for one in timelines)
    patches += [Patch(facecolor=patches[0].get_facecolor(), alpha=PALER,
                      label="paler: further chunks")] * chunked
    figure.legend(handles=[*patches, Patch(facecolor=BUBBLE, label="bubble")], ncols=6,
                  loc="outside lower right")
