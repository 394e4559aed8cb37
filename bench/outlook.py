"""Figures beyond this machine: words, time and memory to a million ranks, and a map of grids."""

import math
from pathlib import Path
from typing import Callable, Iterator

import msgspec
import numpy as np

from bench import model, plan, predict
from bench.cases import HEADINGS, PAPER, load, select
from bench.panels import look, powers
from mm3d import cost, dry

# Okabe and Ito's colours; markers differ too, for print.
FAMILIES = {"1-D": ("#D55E00", "o"), "1-D, sequence": ("#E69F00", "v"),
            "2-D": ("#009E73", "s"), "data, sharded (P x 1 x 1)": ("#CC79A7", "D"),
            "3-D cube": ("#0072B2", "^"), "3-D, best grid": ("black", ".")}
Curves = dict[str, list[tuple[int, plan.Plan]]]


def grid_of(family: str, ranks: int) -> tuple[str, tuple[int, ...]] | None:
    """Scheme and grid of a family on so many ranks; None where it has none."""
    root, side = math.isqrt(ranks), round(ranks ** (1 / 3))
    return {"1-D": ("1d", (ranks,)), "1-D, sequence": ("1d-sp", (ranks,)),
            "2-D": ("2d", (root, root)) if root ** 2 == ranks else None,
            "data, sharded (P x 1 x 1)": ("3d", (ranks, 1, 1)),
            "3-D cube": ("3d", (side,) * 3) if side ** 3 == ranks else None}.get(family)


def curves(machine: model.Machine, dtype: str, recompute: str, sizes: dict[str, int],
           most: int = 2**21) -> Curves:
    """The plans, by closed forms, of each family at powers of two up to `most` ranks."""
    found: Curves = {family: [] for family in FAMILIES}
    ranks = 2
    while ranks <= most:
        for family in FAMILIES:
            chosen = grid_of(family, ranks)
            if chosen:
                one = plan.screen(*chosen, machine, dtype, recompute, sizes)
                found[family].append((ranks, one))
        best = min((plan.screen(*each, machine, dtype, recompute, sizes)
                    for each in plan.candidates(ranks, "3d")), key=lambda p: p.seconds)
        found["3-D, best grid"].append((ranks, best))
        ranks *= 2
    return found


def crossovers(found: Curves) -> list[tuple[int, str]]:
    """From how many ranks on which family, of those with one grid, is the fastest.

    A family that has no grid at some ranks is interpolated between those where it has one; as
    far as all of them reach.
    """
    lines = {family: np.log([(ranks, p.seconds) for ranks, p in points]).T
             for family, points in found.items() if family != "3-D, best grid"}
    changes: list[tuple[int, str]] = []
    reach = min(points[-1][0] for points in found.values())
    for ranks in (ranks for ranks, _ in found["3-D, best grid"] if ranks <= reach):
        at = {family: np.interp(math.log(ranks), *line) for family, line in lines.items()
              if line[0][0] <= math.log(ranks) <= line[0][-1]}
        fastest = min(at, key=at.get)
        if not changes or changes[-1][1] != fastest:
            changes.append((ranks, fastest))
    return changes


def planned(folder: str, machine: model.Machine, arguments, sizes: dict) -> Iterator[Path]:
    """Draw words, time, memory and the map of grids of one model; the PNG files."""
    found = curves(machine, arguments.dtype, arguments.recompute, sizes)
    text = ", ".join([*(f"{key} {value}" for key, value in sizes.items()), arguments.dtype,
                      f"recompute {arguments.recompute}"])
    for name, draw in (("words", _words), ("time", _time), ("memory", _memory)):
        yield _save(folder, f"plan-{name}.png",
                    lambda panel: draw(panel, found, machine, sizes), text)
    yield _save(folder, f"plan-grids-{arguments.ranks}.png", lambda panel: _map(
        panel, arguments.ranks, machine, arguments, sizes), text)


def _save(folder: str, name: str, draw: Callable, text: str,
          size: tuple[float, float] = (8.5, 5.6), columns: int = 1) -> Path:
    """Draw on so many panels, with a line of text below them; the PNG file."""
    from matplotlib.figure import Figure
    with look():
        figure = Figure(figsize=size, layout="constrained")
        draw(*figure.subplots(1, columns, squeeze=False).flat)
        figure.supxlabel(text, fontsize=8.5)
        Path(folder).mkdir(parents=True, exist_ok=True)
        path = Path(folder) / name
        figure.savefig(path)
    return path


def _lines(panel, found: Curves, value: Callable[[plan.Plan], float]) -> None:
    for family, points in found.items():
        colour, marker = FAMILIES[family]
        panel.plot([r for r, _ in points], [value(p) for _, p in points], color=colour,
                   marker=marker, markersize=4.5, linewidth=1.2, label=family)
    panel.set(xscale="log", yscale="log", xlabel="ranks")
    for axis in (panel.xaxis, panel.yaxis):
        powers(axis)


def _words(panel, found: Curves, machine: model.Machine, sizes: dict) -> None:
    _lines(panel, found, lambda p: sum(p.words.values()))
    ranks = [r for r, _ in found["1-D"]]
    bound = [3 * sizes["layers"] * sum(cost.lower_bound(*product.extents, r)
                                       for product in plan.products(sizes)) for r in ranks]
    panel.plot(ranks, bound, "--", color="grey", label="lower bound of each product by itself")
    panel.set(title="Words of a step, per rank, by closed forms (bucket algorithm)",
              ylabel="words")
    panel.legend()


def _time(panel, found: Curves, machine: model.Machine, sizes: dict) -> None:
    _lines(panel, found, lambda p: p.seconds)
    changes = crossovers(found)
    for ranks, family in changes[1:]:
        panel.axvline(ranks, color=FAMILIES[family][0], linestyle=":", linewidth=1)
    panel.set(title=f"Predicted step time on {machine.name} (a model)", ylabel="seconds")
    named = "\n".join(f"from {ranks}: {family}" for ranks, family in changes)
    panel.legend(fontsize=8.5, loc="lower left",
                 title=f"fastest but for the best grid\n{named}", title_fontsize=8.5)


def _memory(panel, found: Curves, machine: model.Machine, sizes: dict) -> None:
    _lines(panel, found, lambda p: p.memory / 2**30)
    panel.axhline(machine.memory_bytes / 2**30, color="grey", linestyle="--",
                  label=f"a rank of {machine.name}")
    panel.set(title="Peak memory of a rank, by closed forms", ylabel="GiB")
    panel.legend()


def _map(panel, ranks: int, machine: model.Machine, arguments, sizes: dict) -> None:
    """Predicted seconds over X and Y; Z is what is left."""
    found = [plan.screen("3d", grid, machine, arguments.dtype, arguments.recompute, sizes)
             for _, grid in plan.candidates(ranks, "3d")]
    xs, ys = (sorted({p.grid[k] for p in found}) for k in (0, 1))
    cells = np.full((len(ys), len(xs)), np.nan)
    for p in found:
        cells[ys.index(p.grid[1]), xs.index(p.grid[0])] = p.seconds
    best = min(found, key=lambda p: p.seconds)
    panel.grid(False)
    image = panel.imshow(np.log10(cells), origin="lower", cmap="viridis_r", aspect="auto")
    if len(xs) <= 16:
        middle = np.nanmean(np.log10(cells))
        for p in found:
            dark = math.log10(p.seconds) > middle
            panel.text(xs.index(p.grid[0]), ys.index(p.grid[1]),
                       f"{p.seconds:.3g}" + ("\nbest" if p is best else ""), ha="center",
                       va="center", fontsize=8, color="white" if dark else "black")
    panel.set_xticks(range(len(xs)), xs, rotation=90 if len(xs) > 16 else 0)
    panel.set_yticks(range(len(ys)), ys)
    panel.set(xlabel="X", ylabel="Y", title=(
        f"Predicted seconds of a step of X x Y x Z grids of {ranks} ranks on {machine.name}: "
        f"best {' x '.join(map(str, best.grid))}"))
    panel.title.set_fontsize(10)
    panel.figure.colorbar(image, label="log10 of seconds")


def weak_sizes(scheme: str, ranks: int) -> dict[str, int]:
    """Table 1's sizes, and beyond its last row: features grow with the root of the ranks, the
    batch too but for 1-D, whose memory lets it fall."""
    for row in select("weak", scheme):
        if row.gpus == ranks:
            heads = load().settings.heads[row.hidden]
            return dict(hidden=row.hidden, heads=heads, batch=row.batch, seq=512)
    root = math.sqrt(ranks)
    hidden = 64 * round(16 * root)
    batch = max(1, round(240 / root if scheme == "1d" else 48 * root))
    return dict(hidden=hidden, heads=hidden // 64, batch=batch, seq=512)


def strong_sizes(scheme: str, ranks: int) -> dict[str, int]:
    """Table 2's sizes, whatever the ranks."""
    return dict(hidden=3072, heads=64, batch=12 if scheme == "1d" else 24, seq=512)


def scaling(folder: str, outcome: predict.Outcome) -> Path:
    """Draw both tables as published and as predicted, to 4096 GPUs."""
    text = (f"Predicted on the model of {outcome.machine.name}, fitted on every other published "
            f"row; beyond 64 GPUs nothing was measured.")

    def draw(*panels) -> None:
        for panel, name in zip(panels, HEADINGS):
            _scaling(panel, name, outcome)
    return _save(folder, "predicted-scaling.png", draw, text, (10, 5), 2)


def _scaling(panel, name: str, outcome: predict.Outcome) -> None:
    """One table."""
    ticks = {"1d": (8, 16, 36, 64, 256, 1024, 4096), "2d": (16, 36, 64, 256, 1024, 4096),
             "3d": (8, 64, 512, 4096)}
    of = weak_sizes if name == "weak" else strong_sizes
    for scheme, family in zip(PAPER, ("1-D", "2-D", "3-D cube")):
        colour, marker = FAMILIES[family]
        points = [(p, _average(outcome, scheme, p, of(scheme, p))) for p in ticks[scheme]]
        panel.plot(*zip(*points), color=colour, linewidth=1.2, label=f"{family}, predicted")
        rows = select(name, scheme)
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


def _average(outcome: predict.Outcome, scheme: str, ranks: int, sizes: dict) -> float:
    """Predicted average step time of the fitted model."""
    fit = outcome.fit
    tuned = msgspec.structs.replace(outcome.machine, achieved=fit.achieved)
    trace = dry.extended(scheme, ranks, layers=fit.layers, dtype=load().settings.dtype, **sizes)
    return sum(model.step_seconds(tuned, trace, fit.recompute[scheme]).values()) / sizes["batch"]
