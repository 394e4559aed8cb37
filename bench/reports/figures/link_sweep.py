"""Draw seconds a sequence against the rate of links, with the rates at which schemes cross."""

import math
import re
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Callable, Iterator, Sequence

import numpy as np

from bench.cases.variants import recorded_variant
from bench.document import Part
from bench.records import run_file
from bench.records.at_rates import join_rates
from bench.records.folder import cluster_of, read_folder
from bench.records.kinds import sweep
from bench.records.measurements import Measurements
from bench.reports.figures import style
from mm3d.console import say

BEYOND = 4.0    # times the greatest rate: where links without a limit are drawn


def group_sweeps(records: Sequence[Measurements]) -> list[list[Measurements]]:
    """Group the sweeps that share a picture: tables measured alike on one cluster."""
    groups: dict[tuple, list[Measurements]] = {}
    for record in records:
        if record.kind == "sweep":
            chosen = record.configuration
            key = (cluster_of(record), record.environment["ranks"], chosen.get("preset"),
                   recorded_variant(chosen), chosen["recompute"], chosen["waited_machine"],
                   chosen["waited_scale"])
            groups.setdefault(key, []).append(record)
    return list(groups.values())


def picture_name(records: Sequence[Measurements]) -> str:
    """Name the picture of sweeps; all of them wait for their work, which is left out."""
    chosen = records[0].configuration
    tables = "-".join(str(record.configuration["table"]) for record in records)
    variant = replace(recorded_variant(chosen), work="compute")
    again = f"-recompute-{chosen['recompute']}" * (chosen["recompute"] != "none")
    # A record may contain any text.
    return re.sub(r"[^\w.-]", "-", f"where-each-is-fastest-{tables}-p"
                  f"{records[0].environment['ranks']:03d}-{chosen['preset']}{variant.slug}{again}")


def draw_sweeps(records: Sequence[Measurements]):
    """Draw the records of a group, a panel each; return the figure."""
    figure, panels = style.make_figure(1, len(records), (7.5 * len(records), 5.8), "")
    for panel, record in zip(panels.flat, records):
        _panel(panel, record)
    above = any((one.share > one.bound).any() for record in records
                for one in sweep.read_curves(record))
    figure.supxlabel(
        "ranks wait for modelled work and send real bytes; they share "
        f"{records[0].environment['cores']} cores for all else, software;\n"
        f"under each rate its share of a step, and the most allowed"
        f"{' (open markers: more)' * above}; bars: least to greatest sample")
    return figure


def make_sweep_drawings(records: Sequence[Measurements]) -> Iterator[style.Drawing]:
    """List the figures of sweeps over rates of links; those of one name are numbered."""
    names: Counter[str] = Counter()
    for group in group_sweeps(records):
        name = picture_name(group)
        names[name] += 1
        yield style.Drawing(
            f"{name}-{names[name]}" if names[name] > 1 else name,
            "Milliseconds a sequence of each scheme and grid against the rate of links, and the "
            "rates at which schemes of one batch cross.", partial(draw_sweeps, group))


def show_rates(folder: Path, show: Callable[[list[Part]], None]) -> int:
    """Print tables of rows at several rates, and draw them; return 1 if anything is left out."""
    found = read_folder(folder)
    records = join_rates(found.rows)
    say()
    show(sweep.tables(records))
    say()
    return max(run_file.report_left_out(found.problems),
               style.report_drawn(*style.save_drawings(make_sweep_drawings(records), folder)))


def _panel(panel, record: Measurements) -> None:
    links, curves = sweep.read_links(record), sweep.read_curves(record)
    limited = [link for link in links if not math.isinf(link)]
    places = [BEYOND * max(limited, default=1e9) if math.isinf(link) else link for link in links]
    for curve, (colour, marker) in zip(curves, style.CYCLE * 2):
        panel.plot(places, 1e3 * curve.medians, color=colour, marker=marker, label=curve.plan.name)
        above = curve.share > curve.bound
        panel.plot(np.array(places)[above], 1e3 * curve.medians[above], color=colour,
                   marker=marker, linestyle="", markerfacecolor="white")
        for place, samples in zip(places, 1e3 * curve.seconds):
            style.draw_bar(panel, place, (np.nanmin(samples), np.nanmax(samples)), colour)
    named: list[str] = []
    marks: dict[tuple[float, float], list[int]] = {}    # several crossings may be at one place
    found = sorted(sweep.list_crossovers(record, curves), key=lambda one: one[0])
    for number, (rate, slow, fast) in enumerate(found, 1):
        place = math.sqrt(max(limited) * max(places)) if math.isinf(rate) else rate
        height = 1e3 * math.exp(np.interp(math.log(place), np.log(places), np.log(fast.medians)))
        marks.setdefault((place, height), []).append(number)
        where = ("without a limit" if math.isinf(rate) else
                 f"from {sweep.rate_name(float(f'{rate:.2g}'))}")
        named.append(f"{number}: {where}, {_short(fast)} overtakes {_short(slow)}")
    for (place, height), numbers in marks.items():
        panel.text(place, height, ", ".join(map(str, numbers)), ha="center", va="center",
                   fontsize=7.5, bbox={"boxstyle": "round", "facecolor": "white"})
    panel.set(xscale="log", yscale="log", ylabel="ms a sequence", xlabel="rate of each link"
              + "".join(f"\n{line}" for line in named))
    panel.set_xticks(places, [
        "\n".join([sweep.rate_name(link), *_software([one.share[at] for one in curves],
                                                     [one.bound[at] for one in curves])])
        for at, link in enumerate(links)])
    panel.minorticks_off()
    style.label_plainly(panel.yaxis)
    panel.set_title(sweep.sweep_heading(record).replace("; ", "\n"))
    panel.legend()


def _software(shares: Sequence[float], bounds: Sequence[float]) -> list[str]:
    """Say which shares of a step software takes in rows of one rate, and their bounds."""
    def percent(found: Sequence[float]) -> str:
        return " to ".join(dict.fromkeys(f"{100 * end(found):.0f}" for end in (min, max))) + " %"
    return [f"{word} {percent(found)}"
            for word, found in (("software", shares), ("allowed", bounds))
            if not np.isnan(found).any()]


def _short(curve: sweep.SweptCurve) -> str:
    return re.sub(r"(?<=\d) x (?=\d)", "x", curve.plan.name)
