"""Draw losses by step, of trainings on meshes and with experts, and seconds of their steps."""

import itertools
import os
from functools import partial
from pathlib import Path
from typing import Iterator, Sequence

import numpy as np

from bench.records.kinds import combined
from bench.records.measurements import Measurements
from bench.reports.figures import style

SIZE = (9.0, 4.6)    # inches
FLOOR = 20           # differences below eps over this are drawn as 0


def training_picture(path: str | os.PathLike, record: Measurements) -> Path:
    """Draw the losses of a training, beside PyTorch's if it trained too; see `save_picture`."""
    found = {name: variable.values for name, variable in record.variables.items()}
    steps, validated = (np.array(record.scales[name]) for name in ("step", "validated"))
    chosen = record.configuration

    def make():
        figure, panels = style.make_figure(1, 1, SIZE, (
            f"{chosen['layers']} layers of {chosen['hidden']} features learn the bytes of "
            f"{chosen['text']}"))
        panel = panels.flat[0]
        panel.plot(steps, found["loss"], color=style.LIGHT_GREY, linewidth=0.8,
                   label="training batch")
        if "torch_validation_loss" in found:
            panel.plot(validated, found["torch_validation_loss"], color=style.VERMILION,
                       marker="o", markersize=8, fillstyle="none", label="validation, PyTorch")
        panel.plot(validated, found["validation_loss"], color=style.BLUE, marker="^",
                   markersize=4, label="validation, mm3d")
        panel.set(xlabel="step", ylabel="cross entropy (nats a byte)", xlim=(0, None))
        panel.legend()
        return figure
    return style.save_picture(path, make, dpi=110)


def meshes_picture(path: str | os.PathLike, record: Measurements) -> Path:
    """Draw the losses of meshes, and how far they are from one rank's; see `save_picture`."""
    from bench.records.kinds.training_meshes import allowed_differences, loss_differences
    losses, steps = record.variables["loss"].values, np.array(record.scales["step"])
    apart = loss_differences(record)
    count, dtype = len(losses), str(record.configuration["dtype"])
    eps, allowed = np.finfo(dtype).eps, allowed_differences(record).get("loss", 1e-12)
    floor = eps / FLOOR    # the sum of the loss is float64, so a difference may be smaller

    def make():
        figure, (panels,) = style.make_figure(
            1, 2, (11.0, 4.6), f"The same training on {count} meshes, {dtype}")
        for n in range(count):
            colour, marker = style.CYCLE[n % len(style.CYCLE)]
            width = 1 + 7 * (1 - n / count)    # lines below show at the edges of those above
            panels[0].plot(steps, losses[n], color=colour, linewidth=width,
                           solid_capstyle="butt")
            if n:
                panels[1].plot(steps, np.maximum(apart[n], floor), color=colour, marker=marker,
                               markersize=4, linewidth=0.8)
        panels[0].set(xlabel="step", ylabel="cross entropy (nats a byte)",
                      title="losses of all meshes, on each other")
        panels[1].axhline(allowed, color=style.DARK_GREY, linestyle="--", label="allowed")
        panels[1].axhline(eps, color=style.DARK_GREY, linestyle=":", label=f"eps of {dtype}")
        panels[1].set(xlabel="step", ylabel="relative difference of the loss (1)", yscale="log",
                      ylim=(floor / 2, 10 * allowed),
                      title=f"to the loss of one rank (at the bottom: below eps / {FLOOR})")
        style.label_powers(panels[1].yaxis)
        panels[1].legend()
        return figure
    return style.save_picture(path, make, dpi=110)


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
    """Return trainings that differ in the balance loss and the seed alone; [] for one balance."""
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
