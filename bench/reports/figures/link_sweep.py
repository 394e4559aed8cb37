"""Draw seconds a sequence against the rate of links, with the rates at which schemes cross."""

import math
import os
import re
from pathlib import Path
from typing import Sequence

import numpy as np

from bench.records.measurements import Measurements
from bench.reports import link_sweep
from bench.reports.figures import style
from bench.reports.figures.schedules import check_name

BEYOND = 4.0    # times the greatest rate: where links without a limit are drawn


def draw_sweep(path: str | os.PathLike, records: Sequence[Measurements]) -> Path:
    """Draw a panel for each record.

    Raises
    ------
    UsageError
        When the file's name ends in no kind of picture.
    """
    check_name(path)
    with style.figure_style():
        figure, panels = style.make_figure(1, len(records), (7.5 * len(records), 5.8), "")
        for panel, record in zip(panels.flat, records):
            _panel(panel, record)
        figure.supxlabel(
            "ranks wait for modelled work and send real bytes; they share "
            f"{records[0].environment['cores']} cores for all else, which is what fast links "
            "show; bars: least to greatest sample", fontsize=8.5)
        style.save_figure(figure, path, dpi=110)
    return Path(path)


def _panel(panel, record: Measurements) -> None:
    links, curves = link_sweep.read_links(record), link_sweep.read_curves(record)
    limited = [link for link in links if not math.isinf(link)]
    places = [BEYOND * max(limited, default=1e9) if math.isinf(link) else link for link in links]
    for curve, (colour, marker) in zip(curves, style.CYCLE * 2):
        panel.plot(places, 1e3 * curve.medians, color=colour, marker=marker, label=curve.name)
        for place, samples in zip(places, 1e3 * curve.seconds):
            panel.plot([place] * 2, [samples.min(), samples.max()], color=colour, linewidth=4,
                       alpha=0.35, solid_capstyle="butt", label="_samples")
    named = []
    found = sorted(link_sweep.list_crossovers(record, curves), key=lambda one: one[0])
    for number, (rate, slow, fast) in enumerate(found, 1):
        place = math.sqrt(max(limited) * max(places)) if math.isinf(rate) else rate
        height = 1e3 * math.exp(np.interp(math.log(place), np.log(places), np.log(fast.medians)))
        panel.plot(place, height, marker="o", markersize=11, markerfacecolor="white",
                   color="black", label="_crossing")
        panel.text(place, height, str(number), ha="center", va="center", fontsize=7.5)
        where = ("without a limit" if math.isinf(rate) else
                 f"from {link_sweep.rate_name(float(f'{rate:.2g}'))}")
        named.append(f"{number}: {where}, {_short(fast)} overtakes {_short(slow)}")
    panel.set(xscale="log", yscale="log", ylabel="ms a sequence", xlabel="rate of each link"
              + "".join(f"\n{line}" for line in named))
    panel.set_xticks(places, [link_sweep.rate_name(link).replace("/s", "").replace(" ", "\n")
                              for link in links])
    panel.minorticks_off()
    style.label_plainly(panel.yaxis)
    panel.set_title(link_sweep.heading(record).replace("; ", "\n"))
    panel.legend()


def _short(curve: link_sweep.Curve) -> str:
    return re.sub(r"(?<=\d) x (?=\d)", "x", curve.name)
