"""Draw the words of distributed products against ranks, and against the memory of a rank."""

import math
from typing import Iterator

import numpy as np

from bench.records.kinds.products import closed_form_words, record_grids
from bench.records.measurements import Measurements
from bench.reports.figures import against_ranks, style
from mm3d.grid.grid import Grid
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.schemes import algorithms_with_products, registry
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.transport.communicators import DryCommunicator

RANKS = tuple(sorted({n ** 3 for n in range(2, 17)} | {2 ** n for n in range(2, 13)}))
LARGER = 4096    # ranks of the panel of closed forms alone
EDGE = 16384     # of its square matrices
LAYERED = "2.5d-sd"    # shown with several numbers of layers
WIDTHS = (4.2, 2.2, 0.9)    # of lines in one place, the widest drawn first
TOGETHER = 2 ** 0.2    # lines whose ends differ by less than this factor share a label
MatrixShape = tuple[int, int, int]


def draw_words_against_ranks(record: Measurements):
    """Draw closed forms against ranks, the counts of the record on them, and the lower bound."""
    form, shape = record.configuration["form"], _shape(record)
    ranks, names = len(record.scales["rank"]), record.scales["scheme"]
    figure, panels = style.make_figure(1, 1, (9, 6), _heading(record))
    panel = panels[0, 0]
    lines = {name: points for name in _styles() if (points := [
        (count, words / count) for count in RANKS
        if not math.isnan(words := _default_words(name, form, shape, count))])}
    drawn: list[list[tuple[int, float]]] = []
    for name, points in lines.items():
        colour, marker = _styles()[name]
        below = drawn.count(points)
        alone = list(lines.values()).count(points) == 1
        panel.plot(*zip(*points), color=colour, zorder=2 + below / 9,
                   linewidth=1.6 if alone else WIDTHS[min(below, len(WIDTHS) - 1)],
                   linestyle="-" if name in registry() else ":",
                   label="_" if name in names else name)
        drawn.append(points)
        if name in names:
            words = record.variables["words"].values[names.index(name)]
            panel.plot([ranks] * 2, [words.mean(), words.max()], color=colour, label="_most")
            panel.plot([ranks], [words.mean()], color=colour, marker=marker, markersize=9,
                       fillstyle="none", markeredgewidth=1.6, linestyle="",
                       label=f"{name} {record_grids(names, record.configuration['grids'])[name]}")
    bounds = [cost.lower_bound(*shape, count) for count in RANKS]
    panel.plot(RANKS, bounds, "--", color="white", linewidth=1.8, zorder=3, label="_")
    panel.plot(RANKS, bounds, "--", color="0.3", linewidth=1, zorder=3,
               label="lower bound, any memory")
    _name_ends(panel, [(points[-1][1], name) for name, points in lines.items()])
    _label_axes(panel, "ranks")
    panel.legend(ncols=2)
    figure.supxlabel("Lines: closed forms, mean of the ranks, at rank counts that an algorithm "
                     "fits; dotted: products without layers.\nMarks: counted in verified "
                     "products, the mean, with a line up to the busiest rank's, of which the "
                     "bound is.")
    return figure


def _name_ends(panel, ends: list[tuple[float, str]]) -> None:
    """Write the names of lines at their right ends; lines that end together share a label."""
    groups: list[list[tuple[float, str]]] = []
    for end in sorted(ends):
        if groups and end[0] <= groups[-1][-1][0] * TOGETHER:
            groups[-1].append(end)
        else:
            groups.append([end])
    for group in groups:
        height = math.exp(sum(math.log(words) for words, _ in group) / len(group))
        panel.annotate(",\n".join(name for _, name in group), (RANKS[-1], height), (7, 0),
                       textcoords="offset points", va="center", fontsize=8, annotation_clip=False)


def draw_words_against_memory(record: Measurements):
    """Draw words against the peak memory of a rank, as measured and on many more ranks."""
    form, ranks = record.configuration["form"], len(record.scales["rank"])
    names = record.scales["scheme"]
    grids = record_grids(names, record.configuration["grids"])
    figure, panels = style.make_figure(1, 2, (13, 6), _heading(record))
    left, right = panels[0]
    item = np.dtype(record.configuration["dtype"]).itemsize
    counted = [(name, grids[name], alone / item, words.max()) for name, alone, words in zip(
        names, record.variables["memory_alone"].values, record.variables["words"].values)]
    _draw_trade(left, counted, _shape(record), ranks,
                f"{ranks} ranks, words counted on the busiest")
    square = (EDGE, EDGE, EDGE)
    modelled = [(name, sizes, *_modelled(name, form, sizes, square))
                for name, sizes in _larger_grids()]
    _draw_trade(right, modelled, square, LARGER,
                f"{LARGER} ranks, {EDGE} x {EDGE} x {EDGE}, closed forms, mean of the ranks")
    figure.supxlabel("Memory: most bytes of arrays at one time, by dry runs, over those of A, B "
                     "and C without copies. Dashed: Al Daas and others,\nany memory; dotted: "
                     "Irony, Toledo and Tiskin, this memory, where it says much. Joined: "
                     "more layers of 2.5d-sd.")
    return figure


def _draw_trade(panel, points: list[tuple[str, GridShape, float, float]], shape: MatrixShape,
                ranks: int, heading: str) -> None:
    """Draw words against memory in units of the matrices' share, with both bounds."""
    M, N, K = shape
    share = (M * N + N * K + M * K) / ranks
    styles = _styles()
    for name, sizes, memory, words in points:
        colour, marker = styles[name]
        every = sorted(other.sizes[-1] for known, other, *_ in points if known == name)
        label = f"{name} {sizes}" if len(every) == 1 else "_" if sizes.sizes[-1] > every[0] else (
            f"{name}, {', '.join(map(str, every))} layers")
        panel.plot([memory / share], [words], color=colour, marker=marker, markersize=9,
                   fillstyle="none", markeredgewidth=1.6, linestyle="", label=label)
    layered = [(memory / share, words) for name, _, memory, words in points if name == LAYERED]
    if len(layered) > 1:
        panel.plot(*zip(*sorted(layered)), color=styles[LAYERED][0], linewidth=1, label="_")
    most = 1.5 * max(memory / share for _, _, memory, _ in points)
    least = cost.lower_bound(*shape, ranks)
    panel.plot([1, most], [least] * 2, "--", color="black", label="_any memory")
    memories = np.geomspace(1, most, 200)
    bounds = [cost.lower_bound_with_memory(*shape, ranks, memory * share) for memory in memories]
    panel.plot(memories, [bound if bound > least / 20 else math.nan for bound in bounds], ":",
               color="black", label="_its memory")
    panel.set_title(heading)
    _label_axes(panel, "peak memory a rank / (matrices / P)")
    panel.legend(fontsize=8)


def _label_axes(panel, across: str) -> None:
    """Draw words against something, both in powers of two."""
    panel.set_xscale("log", base=2)
    panel.set_yscale("log", base=2)
    panel.set(xlabel=across, ylabel="words a rank, forward")
    style.label_plainly(panel.xaxis, 2, (1,))
    style.label_powers(panel.yaxis, 2)


def _larger_grids() -> Iterator[tuple[str, GridShape]]:
    """List grids of `LARGER` ranks: each algorithm's default, and `LAYERED` with other layers."""
    for name, cls in algorithms_with_products().items():
        if (sizes := against_ranks.own_grid(cls, LARGER)) is None:
            continue
        yield name, sizes
        for layers in (1, 4):
            shape = GridShape("xyz", (math.isqrt(LARGER // layers),) * 2 + (layers,))
            if name == LAYERED and shape != sizes:
                yield name, shape


def _modelled(name: str, form: str, sizes: GridShape, shape: MatrixShape) -> tuple[float, float]:
    """Return the peak words of the first and last rank, and the mean words that a rank moves."""
    memory = max(_peak_bytes(name, form, sizes, shape, rank)
                 for rank in (0, sizes.ranks - 1)) / 4
    return memory, closed_form_words(name, form, sizes, shape) / sizes.ranks


def _peak_bytes(name: str, form: str, sizes: GridShape, shape: MatrixShape, rank: int) -> int:
    """Return the peak bytes of a rank's float32 arrays, by a dry run of the forward product."""
    grid = Grid(DryCommunicator(sizes.ranks, rank), DryBackend(), **sizes)
    product = algorithms_with_products()[name].matrix_product(grid, form, shape)
    blocks = {}
    for matrix, direction in product.directions.items():
        layout, whole = product.layouts[matrix], product.shapes[matrix]
        space = layout.split(grid, whole, direction) if direction else grid.backend
        blocks[matrix] = space.empty(layout.local_shape(grid, whole), "float32")
    grid.backend.reset_peak()
    result = product.forward(blocks["A"], blocks["B"])
    peak = grid.backend.memory()["peak"]
    del result
    return peak


def _default_words(name: str, form: str, shape: MatrixShape, ranks: int) -> float:
    """Return the closed form on an algorithm's default grid; NaN without such grid or form."""
    sizes = against_ranks.own_grid(algorithms_with_products()[name], ranks)
    return math.nan if sizes is None else closed_form_words(name, form, sizes, shape)


def _styles() -> dict[str, tuple[str, str]]:
    """Return colour and marker of every product: the paper's schemes as in other figures."""
    names = list(algorithms_with_products())
    known = {name: against_ranks.STYLES[name] for name in names if name in against_ranks.STYLES}
    free = [one for one in style.CYCLE if one not in known.values()]
    more = [("#882255", "<"), ("#44AA99", ">"), ("#999933", "h"), (style.DARK_GREY, "p")]
    others = [name for name in names if name not in known]
    return known | dict(zip(others, free + more * len(others)))


def _shape(record: Measurements) -> MatrixShape:
    return tuple(record.configuration[letter] for letter in "MNK")


def _heading(record: Measurements) -> str:
    M, N, K = _shape(record)
    return f"Words of distributed products, {record.configuration['form']} {M} x {N} x {K}"
