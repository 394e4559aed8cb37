"""Draw the parts of a layer of experts, and how many tokens each expert gets."""

import numpy as np

from bench.records.measurements import Measurements
from bench.reports.figures import style

COLOURS = {"router": style.ORANGE, "dispatch": style.VERMILION, "experts": style.BLUE,
           "combine": style.PURPLE}


def draw_parts(record: Measurements):
    """Draw the seconds of the parts by routing and phase; and the pairs of each expert."""
    found = {name: variable.values for name, variable in record.variables.items()}
    routings, phases = record.scales["routing"], record.scales["phase"]
    chosen = record.configuration
    figure, (panels,) = style.make_figure(1, 2, (11, 4.8), (
        f"{chosen['count']} experts, top {chosen['top']}, {chosen['hidden']} features, "
        f"{chosen['batch'] * chosen['seq']} tokens: {record.environment['ranks']} ranks, "
        f"{chosen['replicas']} replicas of {chosen['scheme']} {chosen['grid']}"))
    seconds = found["part_seconds"][..., 0]
    for r in range(len(routings)):
        for p, side in zip(range(len(phases)), (-0.21, 0.21)):
            bottom = 0.0
            for part, name in enumerate(record.scales["part"]):
                value = 1e3 * seconds[r, p, part]
                panels[0].bar(r + side, value, 0.38, bottom, color=COLOURS[name],
                              edgecolor="white", linewidth=0.5,
                              label=name if r == p == 0 else "_")
                bottom += value
    panels[0].set_xticks(range(len(routings)), routings)
    panels[0].set(ylabel="time (ms)", title="forward (left bars) and backward (right), medians "
                                            "of the slowest rank")
    panels[0].legend()
    width = 0.8 / len(routings)
    experts = np.arange(found["tokens"].shape[2])
    for r, (routing, (colour, _)) in enumerate(zip(routings, style.CYCLE)):
        got = found["tokens"][r].sum(0)
        place = experts + (r - (len(routings) - 1) / 2) * width
        panels[1].bar(place, got, width, color=style.LIGHT_GREY)
        panels[1].bar(place, got - found["dropped"][r], width, color=colour, label=routing)
    panels[1].set(xlabel="expert", ylabel="(token, choice) pairs",
                  title="what each expert gets (grey: dropped)")
    panels[1].legend()
    return figure
