"""Draw the process cube: which rank holds which block of A, B and C."""

import itertools
from pathlib import Path

from bench.reports.figures import style
from mm3d.grid.layout import Layout
from mm3d.grid.shape import GridShape

# One for each rank of the 2 x 2 x 2 cube.
COLOURS = (style.ORANGE, style.SKY, style.GREEN, style.YELLOW, style.BLUE, style.VERMILION,
           style.PURPLE, style.LIGHT_GREY)
MATRICES = {"A": ("xy,z", "rows by x, then y; columns by z", "all-gathered along y"),
            "B": ("z,yx", "rows by z; columns by y, then x", "all-gathered along x"),
            "C": ("xz,y", "rows by x, then z; columns by y", "reduce-scattered along z")}


def draw_cube(path: str | Path) -> Path:
    """Draw the 2 x 2 x 2 cube and the blocks of C = A B on it, computed from the layouts.

    Parameters
    ----------
    path : path
        The picture to write; a .png, .svg or .pdf.

    Raises
    ------
    UsageError
        When the name has another ending.
    LeftOut
        When it cannot be drawn.
    """
    style.check_name(path)
    return style.save_picture(path, _cube, dpi=150)


def _cube():
    from matplotlib.figure import Figure
    figure = Figure(figsize=(10, 5.2))
    _ranks(figure.add_axes((0.01, 0.05, 0.36, 0.8)))
    _product(figure.add_axes((0.39, 0.02, 0.6, 0.86)))
    figure.suptitle("C = A B on a 2 x 2 x 2 cube of ranks (i, j, l): every rank stores "
                    "an eighth of each matrix", y=0.96)
    return figure


def _colour(i: int, j: int, l: int) -> str:  # noqa: E741  (the paper's index)
    return COLOURS[(i * 2 + j) * 2 + l]


def _ranks(panel) -> None:
    """Draw the eight ranks as boxes, from back to front (larger x)."""
    def project(x, y, z):
        return y - 0.42 * x, -z - 0.36 * x

    for i, l, j in itertools.product((0, 1), (1, 0), (0, 1)):  # noqa: E741
        def point(a, b, c):
            return project(2.2 * i + a, 1.5 * j + b, 2.1 * l + c)

        faces = {"front": ((1, 0, 0), (1, 1, 0), (1, 1, 1), (1, 0, 1)),
                 "top": ((0, 0, 0), (0, 1, 0), (1, 1, 0), (1, 0, 0)),
                 "side": ((0, 1, 0), (0, 1, 1), (1, 1, 1), (1, 1, 0))}
        for face, shade in zip(faces.values(), (0, 0.35, 0.15)):
            corners = [*zip(*(point(*corner) for corner in face))]
            panel.fill(*corners, facecolor=_colour(i, j, l), edgecolor="black", linewidth=0.8)
            panel.fill(*corners, facecolor="white", alpha=shade, edgecolor="none")
        panel.text(*point(0.5, 0.5, 0), f"{i}{j}{l}", ha="center", va="center", fontsize=11)
    start = project(0.6, -1.5, 0)
    for name, end in (("x (i)", (1.6, -1.5, 0)), ("y (j)", (0.6, -0.7, 0)),
                      ("z (l)", (0.6, -1.5, 0.8))):
        end = project(*end)
        panel.annotate("", end, start, arrowprops={"arrowstyle": "->", "linewidth": 1.5})
        panel.text(start[0] + 1.35 * (end[0] - start[0]), start[1] + 1.35 * (end[1] - start[1]),
                   name, ha="center", va="center", fontsize=10)
    panel.set(aspect="equal", xlim=(-2.6, 2.7), ylim=(-4.3, 0.2))
    panel.axis("off")


def _product(panel) -> None:
    """Draw the three matrices as in a product by hand: A to the left of C, B above C."""
    shape, n = GridShape("xyz", (2, 2, 2)), 4
    places = {"A": (0, 0), "B": (5.2, 5.4), "C": (5.2, 0)}
    for name, (left, bottom) in places.items():
        spec, divided, moved = MATRICES[name]
        layout = Layout(spec)
        for coords in shape.all_coordinates():
            i, j, l = coords.values()  # noqa: E741
            rows, columns = layout.slices(shape, (n, n), coords)
            width, height = columns.stop - columns.start, rows.stop - rows.start
            x, y = left + columns.start, bottom + n - rows.stop
            panel.fill((x, x + width, x + width, x), (y, y, y + height, y + height),
                       facecolor=_colour(i, j, l), edgecolor="black", linewidth=0.8)
            panel.text(x + width / 2, y + height / 2, f"{i}{j}{l}", ha="center", va="center",
                       fontsize=9)
        text = f'{name}  Layout("{spec}")\n{divided}\n{moved}'
        if name == "A":
            panel.text(left, bottom + n + 0.25, text, va="bottom", fontsize=9.5)
        else:
            panel.text(left + n + 0.25, bottom + n / 2, text, va="center", fontsize=9.5)
    panel.set(aspect="equal", xlim=(-0.2, 14.5), ylim=(-0.2, 9.6))
    panel.axis("off")
