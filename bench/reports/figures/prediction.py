"""Draw predicted words, time and memory to a million ranks, and maps of grids and of meshes."""

import math
from functools import partial
from pathlib import Path
from typing import Callable, Sequence

import numpy as np

from bench.cases.paper import HEADINGS, PAPER
from bench.cases.selection import select_rows
from bench.prediction import machine_model, memory_fit, planner
from bench.prediction.closed_form_plan import GridPlan, screen_grid
from bench.prediction.meshes.kind_map import BOX, LINE, MapPlace
from bench.prediction.published import paper_fit
from bench.prediction.published.scaling import (Curves, find_crossovers, plan_families,
                                                predict_step_time, strong_sizes, weak_sizes)
from bench.prediction.training_plans.choices import Training
from bench.reports.figures import style
from bench.reports.plans.kind_map import GB, map_heading
from mm3d.model import cost
from mm3d.model.stack import Stack

FAMILY_STYLES = {"1-D": (style.VERMILION, "o"), "1-D, sequence": (style.ORANGE, "v"),
                 "2-D": (style.GREEN, "s"), "data, sharded (P x 1 x 1)": (style.PURPLE, "D"),
                 "3-D cube": (style.BLUE, "^"), "3-D, best grid": ("black", ".")}


def draw_plans(folder: str, ranks: int, machine: machine_model.Machine,
               stack: Stack) -> list[Callable[[], Path]]:
    """Return what draws words, time, memory and the map of grids of one model, each to a PNG."""
    found = plan_families(machine, stack)
    text = ", ".join([*(f"{key} {value}" for key, value in stack.sizes.items()), stack.dtype,
                      f"recompute {stack.recompute}"])
    drawings = [partial(_save, folder, f"plan-{name}.png",
                        partial(draw, found=found, machine=machine, stack=stack), text)
                for name, draw in (("words", _words), ("time", _time), ("memory", _memory))]
    grids = [screen_grid("3d", grid, machine, stack)
             for _, grid in planner.list_candidates(ranks, "3d")]
    return [*drawings, partial(_save, folder, f"plan-grids-{ranks}.png",
                               partial(_map, found=grids, ranks=ranks, machine=machine.name),
                               text)]


def _save(folder: str, name: str, draw: Callable, text: str,
          size: tuple[float, float] = (8.5, 5.6), columns: int = 1) -> Path:
    """Draw on a number of panels, with a line of text below them; return the PNG file."""
    def make():
        figure, panels = style.make_figure(1, columns, size, "")
        draw(*panels.flat)
        figure.supxlabel(text)
        return figure
    return style.save_picture(Path(folder) / name, make)


def _lines(panel, found: Curves, value: Callable[[GridPlan], float]) -> None:
    for family, points in found.items():
        colour, marker = FAMILY_STYLES[family]
        panel.plot([r for r, _ in points], [value(p) for _, p in points], color=colour,
                   marker=marker, markersize=4.5, linewidth=1.2, label=family)
    panel.set(xscale="log", yscale="log", xlabel="ranks")
    for axis in (panel.xaxis, panel.yaxis):
        style.label_powers(axis)


def _words(panel, found: Curves, machine: machine_model.Machine, stack: Stack) -> None:
    _lines(panel, found, lambda p: sum(p.words.values()))
    ranks = [r for r, _ in found["1-D"]]
    every = cost.list_products(stack.sizes).items()
    bound = [3 * sum(times * cost.lower_bound(*product.extents, r) for product, times in every)
             for r in ranks]
    panel.plot(ranks, bound, "--", color="grey", label="lower bound of each product by itself")
    panel.set(title="Words of a step, per rank, by closed forms (bucket algorithm)",
              ylabel="words")
    panel.legend()


def _time(panel, found: Curves, machine: machine_model.Machine, stack: Stack) -> None:
    _lines(panel, found, lambda p: p.seconds)
    changes = find_crossovers(found)
    for ranks, family in changes[1:]:
        panel.axvline(ranks, color=FAMILY_STYLES[family][0], linestyle=":", linewidth=1)
    panel.set(title=f"Predicted step time on {machine.name} (a model)", ylabel="seconds")
    named = "\n".join(f"from {ranks}: {family}" for ranks, family in changes)
    panel.legend(fontsize=8.5, loc="lower left",
                 title=f"fastest but for the best grid\n{named}", title_fontsize=8.5)


def _memory(panel, found: Curves, machine: machine_model.Machine, stack: Stack) -> None:
    _lines(panel, found,
           lambda p: memory_fit.predict_peak(p.scheme, p.grid, stack) / 2**30)
    panel.axhline(machine.memory_bytes / 2**30, color="grey", linestyle="--",
                  label=f"a rank of {machine.name}")
    panel.set(title="Peak memory of a rank, by dry runs", ylabel="GiB")
    panel.legend()


def _map(panel, found: list[GridPlan], ranks: int, machine: str) -> None:
    """Draw predicted seconds over X and Y; Z follows from the ranks."""
    xs, ys = (sorted({p.grid[c] for p in found}) for c in "xy")
    cells = np.full((len(ys), len(xs)), np.nan)
    for p in found:
        cells[ys.index(p.grid["y"]), xs.index(p.grid["x"])] = p.seconds
    best = min(found, key=lambda p: p.seconds)
    panel.grid(False)
    image = panel.imshow(np.log10(cells), origin="lower", cmap="viridis_r", aspect="auto")
    if len(xs) <= 16:
        middle = np.nanmean(np.log10(cells))
        for p in found:
            dark = math.log10(p.seconds) > middle
            panel.text(xs.index(p.grid["x"]), ys.index(p.grid["y"]),
                       f"{p.seconds:.3g}" + ("\nbest" if p is best else ""), ha="center",
                       va="center", fontsize=8, color="white" if dark else "black")
    panel.set_xticks(range(len(xs)), xs, rotation=90 if len(xs) > 16 else 0)
    panel.set_yticks(range(len(ys)), ys)
    panel.set(xlabel="X", ylabel="Y", title=(
        f"Predicted seconds of a step of X x Y x Z grids of {ranks} ranks on {machine}: "
        f"best {best.grid}"))
    panel.title.set_fontsize(10)
    panel.figure.colorbar(image, label="log10 of seconds")


def draw_predicted_scaling(folder: str, outcome: paper_fit.Outcome) -> Path:
    """Draw both tables as published and as predicted, to 4096 GPUs."""
    text = (f"Predicted on the model of {outcome.machine.name}, fitted on every other published "
            f"row; beyond 64 GPUs nothing was measured.")

    def draw(*panels) -> None:
        for panel, name in zip(panels, HEADINGS):
            _scaling(panel, name, outcome)
    return _save(folder, "predicted-scaling.png", draw, text, (10, 5), 2)


def _scaling(panel, name: str, outcome: paper_fit.Outcome) -> None:
    ticks = {"1d": (8, 16, 36, 64, 256, 1024, 4096), "2d": (16, 36, 64, 256, 1024, 4096),
             "3d": (8, 64, 512, 4096)}
    of = weak_sizes if name == "weak" else strong_sizes
    for scheme, family in zip(PAPER, ("1-D", "2-D", "3-D cube")):
        colour, marker = FAMILY_STYLES[family]
        points = [(p, predict_step_time(outcome, scheme, p, of(scheme, p))) for p in ticks[scheme]]
        panel.plot(*zip(*points), color=colour, linewidth=1.2, label=f"{family}, predicted")
        rows = select_rows(name, scheme)
        panel.plot([r.gpus for r in rows], [r.recomputed for r in rows], linestyle="",
                   marker=marker, color=colour, label=f"{family}, published")
    panel.set(xscale="log", yscale="log", xlabel="GPUs", title=HEADINGS[name],
              ylabel="average step time (s)")
    panel.set_xticks((8, 64, 512, 4096), ("8", "64", "512", "4096"))
    marks = [m * 10.0**e for e in (-3, -2, -1, 0, 1) for m in (1, 2, 5)]
    low, high = panel.get_ylim()
    panel.set_yticks(marks, [f"{mark:g}" for mark in marks])
    panel.set_ylim(low, high)
    panel.minorticks_off()
    panel.legend()


LEAST = 2.0    # per cent of the darkest shade, so that small differences look small


def draw_map(folder: str, asked: Training, places: Sequence[MapPlace]) -> Path:
    """Draw a map into a folder: blue and bold where X x Y x Z is faster; return the PNG file."""
    name = f"kind-map-{asked.gpt.name}-{asked.machine.name}.png"
    return style.save_picture(Path(folder) / name, lambda: _figure(asked, places))


def _figure(asked: Training, places: Sequence[MapPlace]):
    from matplotlib.colors import LinearSegmentedColormap
    gpus, rates = (sorted({getattr(one, name) for one in places}) for name in ("gpus", "rate"))
    figure, panels = style.make_figure(1, 1, (1.9 + 1.55 * len(gpus), 2.2 + 0.72 * len(rates)), "")
    panel = panels.flat[0]
    gains = np.full((len(rates), len(gpus)), np.nan)
    for one in places:
        if one.gain is not None:
            gains[rates.index(one.rate), gpus.index(one.gpus)] = 100 * one.gain
    most = max(LEAST, *(abs(100 * one.gain) for one in places if one.gain is not None), 0.0)
    colours = LinearSegmentedColormap.from_list(
        "kinds", [style.ORANGE, "white", style.BLUE]).with_extremes(bad="0.9")
    panel.grid(False)
    image = panel.imshow(gains, origin="lower", cmap=colours, vmin=-most, vmax=most,
                         aspect="auto", interpolation="nearest")
    for one in places:
        panel.text(gpus.index(one.gpus), rates.index(one.rate), _text(one), ha="center",
                   va="center", fontsize=8.5, fontweight="bold" if (one.gain or 0) > 0 else None)
    panel.set_xticks(range(len(gpus)), gpus)
    panel.set_yticks(range(len(rates)), [f"{rate / GB:g}" for rate in rates])
    panel.set(xlabel="GPUs", ylabel="GB/s of a node to all others, in one direction")
    panel.set_title(f"Where {BOX} is faster than {LINE}, each with its best pipeline (a model)\n"
                    + map_heading(asked))
    figure.colorbar(image, label=f"% more steps by {BOX} than by {LINE}")
    figure.supxlabel(f"bold: {BOX} is faster; estimates by closed forms, of plans that fit the "
                     f"memory; nothing here was measured")
    return figure


def _text(one: MapPlace) -> str:
    """Say the faster kind, by how much, and its grid and stages."""
    if not one.best:
        return "none fits"
    kind, best = min(one.best.items(), key=lambda item: item[1].seconds)
    choice = best.choice
    grid = choice.grid.compact if kind == BOX else f"1x{choice.grid.ranks}x1"
    ratio = 1 + (one.gain or 0.0)
    by = ("the other\ndoes not fit" if one.gain is None else
          f"{100 * (max(ratio, 1 / ratio) - 1):.1f} % faster")
    stages = f"{choice.stages} stage{'s' * (choice.stages > 1)}"
    return f"{grid}, {stages}\n{by}"
