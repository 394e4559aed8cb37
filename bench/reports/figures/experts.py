"""Draw the parts of a layer of experts, and what a balance loss does to trainings with experts."""

from typing import Sequence

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


def comparable_trainings(records: Sequence[Measurements]) -> list[Measurements]:
    """Return the trainings that differ in the coefficient of the balance loss alone.

    In the order of the coefficients, of each the latest; [] where there are fewer than two.
    """
    alike: dict[tuple, dict[float, Measurements]] = {}
    for record in sorted(records, key=lambda one: one.created):
        chosen = record.configuration
        if record.kind == "training" and "experts_balance" in chosen:
            same = tuple((name, chosen[name]) for name in sorted(chosen) if name in (
                "layers", "hidden", "heads", "batch", "seq", "steps", "seed", "dtype", "lr",
                "text_digest") or name.startswith("experts_") and name != "experts_balance")
            alike.setdefault(same, {})[float(chosen["experts_balance"])] = record
    found = max(alike.values(), key=len, default={})
    return [found[balance] for balance in sorted(found)] if len(found) > 1 else []


def draw_balance(records: Sequence[Measurements]):
    """Draw validation loss and entropy of utilisation by step, of trainings with experts."""
    chosen = records[0].configuration
    figure, (panels,) = style.make_figure(1, 2, (11, 4.8), (
        f"{chosen['layers']} layers of {chosen['hidden']} features, {chosen['experts_count']} "
        f"experts every {chosen['experts_every']} layers, top {chosen['experts_top']}, gate "
        f"{chosen['experts_gate']}"))
    for record, (colour, marker) in zip(records, style.CYCLE):
        name = f"balance {record.configuration['experts_balance']:g}"
        found = {key: variable.values for key, variable in record.variables.items()}
        panels[0].plot(record.scales["validated"], found["validation_loss"], color=colour,
                       marker=marker, markersize=4, label=name)
        steps, entropy = np.array(record.scales["step"]), found["entropy"]
        panels[1].plot(steps, entropy, color=colour, linewidth=1.0, label=name)
    panels[0].set(xlabel="step", ylabel="validation loss (nats a byte)",
                  title="held-out text, without the routers' losses")
    panels[1].set(xlabel="step", ylabel="entropy over that of equal shares (1)", ylim=(0, 1.02),
                  title="use of the experts, of the layer that uses them least evenly")
    panels[0].legend()
    panels[1].legend()
    return figure
