"""Draw where X x Y x Z is faster than 1 x t x 1 with a pipeline, over GPUs and rates of links."""

from pathlib import Path
from typing import Sequence

import numpy as np

from bench.prediction.meshes.kind_map import BOX, LINE, MapPlace
from bench.prediction.training_plans.choices import Training
from bench.reports.figures import style
from bench.reports.plans.kind_map import GB, map_heading

LEAST = 2.0    # per cent of the darkest shade, so that small differences look small


def draw_map(folder: str, asked: Training, places: Sequence[MapPlace]) -> Path:
    """Draw a map into a folder; return the PNG file.

    Cells are blue, and bold, where X x Y x Z does more steps, orange where 1 x t x 1 does; each
    has the grid and the stages of the faster, and by how much it is.
    """
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
