"""Draw the parts of a layer of experts, and the effect of a balance loss on trainings."""

import itertools
from functools import partial
from typing import Iterator, Sequence

import numpy as np

from bench.records.measurements import Measurements
from bench.reports.figures import style

COLOURS = {"router": style.ORANGE, "dispatch": style.VERMILION, "experts": style.BLUE,
           "combine": style.PURPLE}


def draw_parts(record: Measurements):
    """Draw the seconds of the parts by routing and phase; and the pairs of each expert."""
    found = {name: variable.values for name, variable in record.variables.items()}
    routings = record.scales["routing"]
    chosen = record.configuration
    figure, (panels,) = style.make_figure(1, 2, (11, 4.8), (
        f"{chosen['count']} experts, top {chosen['top']}, {chosen['hidden']} features, "
        f"{chosen['batch'] * chosen['seq']} tokens: {record.environment['ranks']} ranks, "
        f"{chosen['replicas']} replicas of {chosen['scheme']} {chosen['grid']}"))
    seconds = found["part_seconds"][..., 0]
    for r in range(len(routings)):
        for p, side in enumerate(style.SIDE_SHIFTS):
            style.draw_stack(panels[0], r + side, [
                (1e3 * took, COLOURS[name], None, name if r == p == 0 else "_")
                for name, took in zip(record.scales["part"], seconds[r, p])])
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
    """Return trainings that differ only in the coefficient of the balance loss and in the seed.

    They are the latest complete one for each coefficient and seed, in this order; [] for fewer
    than two coefficients.
    """
    alike: dict[tuple, dict[tuple[float, int], Measurements]] = {}
    for record in sorted(records, key=lambda one: one.created):
        chosen = record.configuration
        if (record.kind == "training" and "experts_balance" in chosen
                and len(record.scales["step"]) == chosen["steps"]):
            same = tuple((name, chosen[name]) for name in sorted(chosen) if name in (
                "layers", "hidden", "heads", "batch", "microbatches", "seq", "steps", "dtype",
                "tied", "dropout", "optimizer", "lr", "warmup", "momentum", "weight_decay", "clip",
                "text_digest") or name.startswith("experts_") and name != "experts_balance")
            alike.setdefault(same, {})[balance_of(record), int(chosen["seed"])] = record

    def coefficients(found: dict[tuple[float, int], Measurements]) -> int:
        return len({balance for balance, _ in found})
    found = max(alike.values(), key=coefficients, default={})
    return [found[key] for key in sorted(found)] if coefficients(found) > 1 else []


def make_balance_drawings(records: Sequence[Measurements]) -> Iterator[style.Drawing]:
    """List the figure of trainings that differ in the balance of their experts; none without."""
    if trainings := comparable_trainings(records):
        yield style.Drawing("balance-of-experts", "Last validation loss and use of the experts, "
                            "against the coefficient of the balance loss.",
                            partial(draw_balance, trainings))


def balance_of(record: Measurements) -> float:
    """Return the coefficient of the balance loss of a training."""
    return float(record.configuration["experts_balance"])


def draw_balance(records: Sequence[Measurements]):
    """Draw the last validation loss, and the use of the experts, against the coefficient."""
    chosen = records[0].configuration
    capacity = chosen.get("experts_capacity")
    figure, (panels,) = style.make_figure(1, 2, (11, 4.8), (
        f"{chosen['layers']} layers of {chosen['hidden']} features, {chosen['experts_count']} "
        f"experts in 1 of {chosen['experts_every']} layers, top {chosen['experts_top']}, gate "
        f"{chosen['experts_gate']}\n"
        + ("nothing dropped" if capacity is None else f"capacity {capacity:g}")
        + f", z-loss {chosen['experts_z']:g}, learning rate {chosen['lr']:g}, {chosen['steps']} "
          f"steps of {chosen['batch']} x {chosen['seq']} bytes"))
    coefficients = sorted({balance_of(record) for record in records})
    seeds = sorted({int(record.configuration["seed"]) for record in records})
    values = np.full((2, len(seeds), len(coefficients)), np.nan)
    for record in records:
        place = (slice(None), seeds.index(record.configuration["seed"]),
                 coefficients.index(balance_of(record)))
        entropy = record.variables["entropy"].values
        values[place] = (record.variables["validation_loss"].values[-1],
                         entropy[-max(1, len(entropy) // 10):].mean())
    places = np.arange(len(coefficients))
    for panel, of_seed in zip(panels, values):
        means = [np.mean(column[np.isfinite(column)]) for column in of_seed.T]
        panel.plot(places, means, color=style.DARK_GREY, linewidth=1.5, zorder=1,
                   label="mean" if len(seeds) > 1 else "_")
        for seed, line, (colour, marker) in zip(seeds, of_seed, itertools.cycle(style.CYCLE)):
            panel.plot(places, line, color=colour, marker=marker, markersize=8, linestyle="",
                       label=f"seed {seed}")
        panel.set_xticks(places, [f"{one:g}" for one in coefficients])
        panel.set(xlabel="coefficient of the balance loss (1)", xlim=(-0.4, places[-1] + 0.4))
    panels[0].set(ylabel="validation loss (nats a byte)",
                  title="held-out text after the last step, without the routers' losses")
    panels[1].axhline(1, color=style.DARK_GREY, linestyle="--", label="equal shares")
    panels[1].set(ylabel="entropy over that of equal shares (1)", ylim=(0, 1.06),
                  title="use of the experts, of the least even layer, last 10 % of the steps")
    panels[0].legend()
    panels[1].legend()
    return figure
