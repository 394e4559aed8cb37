"""Draw measured and predicted seconds of training steps on meshes."""

from functools import partial
from typing import Iterator, Sequence

import numpy as np

from bench.records.kinds import combined
from bench.records.measurements import Measurements
from bench.reports.figures import style

WIDTH, LINE = 9.0, 0.3    # inches


def make_combined_drawings(records: Sequence[Measurements]) -> Iterator[style.Drawing]:
    """List the figure of all training steps of kind "combined"; none without any."""
    found = combined.row_groups(one for one in records if one.kind == "combined")
    if found:
        yield style.Drawing(
            "training-steps-on-meshes", "Seconds of a training step on meshes of all dimensions, "
            "measured, where that is stated on an emulated cluster, beside predicted before.",
            partial(_draw, found))


def _draw(found: Sequence[Sequence[combined.CombinedRow]]):
    """Draw a panel for each group: a bar for each mesh, with a mark for its prediction."""
    heights = [1.4 + len(rows) for rows in found]
    how = {rows[0].waits: ("ranks waiting for modelled work on an emulated cluster" if
                           rows[0].waits else "ranks computing") for rows in found}
    figure, panels = style.make_figure(
        len(found), 1, (WIDTH, LINE * sum(heights) + 1.3),
        f"Training steps of GPT, {' or '.join(how.values())}:\n"
        "measured, and predicted before", height_ratios=heights)
    for panel, rows in zip(panels.flat, found):
        _panel(panel, rows)
    labelled = style.label_handles(panels.flat)
    figure.legend(labelled.values(), labelled, loc="outside lower center", ncols=4)
    return figure


def _panel(panel, rows: Sequence[combined.CombinedRow]) -> None:
    places = np.arange(len(rows))
    panel.barh(places, [row.seconds for row in rows], color=style.SKY, label="measured, median")
    if rows[0].waits:
        panel.barh(places, [row.work for row in rows], height=0.35, color=style.BLUE,
                   label="of it work of the busiest rank")
    for at, row in zip(places, rows):
        samples = row.record.values("samples") / combined.slowed(row.record)
        panel.plot([samples.min(), samples.max()], [at] * 2, color="black", linewidth=1.5,
                   label="least to greatest sample" if not at else "_samples")
    if any(row.is_predicted for row in rows):
        panel.plot([row.predicted for row in rows], places, color=style.VERMILION, marker="D",
                   linestyle="none", label="predicted before")
    panel.set_yticks(places, [
        f"{row.record.configuration['mesh']}{f' ({row.marks})' if row.marks else ''}"
        for row in rows], fontsize=8.5)
    panel.invert_yaxis()
    panel.set_xlim(0, None)
    panel.set_xlabel("seconds of a step")
    chosen, env = rows[0].record.configuration, rows[0].record.environment
    how = "" if rows[0].waits else ", computing"
    panel.set_title(f"{env['ranks']} ranks, {chosen['group']}, {chosen['hidden']} features{how}",
                    fontsize=10)
