"""Share the style of all figures, colours, axes and legends; write their files."""

import io
import math
import os
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Callable, Iterable, Iterator, Sequence

from bench.errors import UsageError
from bench.records import atomic
from bench.reports.figures import METADATA
from mm3d.console import complain, say

# Okabe and Ito's colours, told apart with every kind of colour vision; markers, for print.
VERMILION, GREEN, BLUE, ORANGE = "#D55E00", "#009E73", "#0072B2", "#E69F00"
PURPLE, SKY, YELLOW = "#CC79A7", "#56B4E9", "#F0E442"
LIGHT_GREY, DARK_GREY = "#BBBBBB", "#666666"
CYCLE = ((VERMILION, "o"), (GREEN, "s"), (BLUE, "^"), (ORANGE, "v"), (PURPLE, "D"), (SKY, "P"),
         ("black", "X"), (YELLOW, "*"))
IN_PANEL = 5    # lines of a legend in a panel; a longer one stands beside all panels
BESIDE = 1.9    # inches for it
SIDE_SHIFTS = (-0.21, 0.21)    # of a place, at which stacks of forward and backward stand


class NoFigure(Exception):
    """Raised for a figure that is not drawn; says why, such as which results are missing."""


class NotDrawn(NoFigure):
    """Raised for a figure that cannot be drawn or written, whatever the results."""


@contextmanager
def figure_style() -> Iterator[None]:
    """Return a context in which figures are made in the common style, whatever the user's is."""
    with resources.as_file(resources.files("bench.reports.figures") / "figures.mplstyle") as path:
        # The import reads a backend and settings of the user, and fails where it cannot.
        users = {name: os.environ.get(name) for name in ("MPLBACKEND", "MATPLOTLIBRC")}
        os.environ.update(MPLBACKEND="agg", MATPLOTLIBRC=str(path))
        try:
            from matplotlib import style as sheets
        finally:
            for name, value in users.items():
                os.environ.pop(name)
                os.environ.update({} if value is None else {name: value})
        with sheets.context(path, after_reset=True):
            yield


def draw_image(make: Callable[[], Any], form: str, **options: Any) -> bytes:
    """Make a figure and return it as the content of a file.

    `make` makes a matplotlib figure, `form` is one of `METADATA`, and `options` are arguments of
    ``Figure.savefig``.

    Raises NoFigure when results are missing; NotDrawn when matplotlib or the system fails.  Errors
    of `make`, which are errors of the program, stay what they are.
    """
    image = io.BytesIO()
    with ExitStack() as stack:
        # matplotlib may fail in any way where it reads its settings, fonts and style, and where it
        # lays out and writes; between them only as it is imported and reads files.
        with _not_drawn(Exception):
            stack.enter_context(figure_style())
        with _not_drawn(ImportError, OSError):
            figure = make()
        with _not_drawn(Exception):
            figure.savefig(image, format=form, metadata=METADATA[form], **options)
    return image.getvalue()


@contextmanager
def _not_drawn(*errors: type[Exception]) -> Iterator[None]:
    """Return a context in which these errors become NotDrawn, in one line."""
    try:
        yield
    except errors as error:
        raise NotDrawn(f"{type(error).__name__}: {' '.join(str(error).split())}") from error


def save_picture(path: str | os.PathLike, make: Callable[[], Any], **options: Any) -> Path:
    """Draw a figure into a file, by its ending; errors as of `check_picture` and `draw_image`."""
    check_picture(path)
    return _write(path, draw_image(make, Path(path).suffix[1:], **options))


def _write(path: str | os.PathLike, image: bytes) -> Path:
    """Write a picture into a file, whose folder is made if needed; see `save_picture`."""
    try:
        if not (folder := Path(path).parent).exists():
            folder.mkdir(parents=True, exist_ok=True)
        atomic.replace(path, image)
    except OSError as error:
        raise NotDrawn(f"{path} cannot be written ({error.strerror})") from error
    return Path(path)


def save_animation(path: str | os.PathLike,
                   frames: Iterable[tuple[Callable[[], Any], int]]) -> Path:
    """Draw frames, each with its milliseconds, into a GIF of 48 colours; see `save_picture`."""
    from PIL import Image    # which matplotlib needs, too
    makers, durations = zip(*frames)
    images = [Image.open(io.BytesIO(draw_image(make, "png", dpi=90))).convert("RGB")
              for make in makers]
    # The colours are chosen from those of three frames.
    joined = Image.new("RGB", (images[0].width, 3 * images[0].height))
    for place, image in enumerate((images[0], images[len(images) // 2], images[-1])):
        joined.paste(image, (0, place * image.height))
    palette = joined.quantize(48, dither=Image.Dither.NONE)
    first, *rest = (image.quantize(palette=palette, dither=Image.Dither.NONE) for image in images)
    found = io.BytesIO()
    first.save(found, "gif", save_all=True, append_images=rest, duration=durations, loop=0,
               optimize=True, disposal=1)    # a frame is what differs from the one before
    return _write(path, found.getvalue())


def check_picture(path: str | os.PathLike, moving: bool = False) -> None:
    """Check that the ending of a picture's name is a format, of one that is `moving` or not."""
    forms = [*METADATA, *["gif"] * moving]
    if Path(path).suffix[1:] not in forms:
        raise UsageError(f"{path}: a picture's name ends in "
                         f"{', '.join(f'.{form}' for form in forms[:-1])} or .{forms[-1]}")


def make_figure(rows: int, columns: int, size: tuple[float, float], heading: str, **more: Any):
    """Make a figure with its panels, (rows, columns); `more` as for ``Figure.subplots``."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(heading)
    return figure, figure.subplots(rows, columns, squeeze=False, **more)


def start_at_zero(panel) -> None:
    """Start the vertical axis at zero, with room for markers; end it at one for zeros alone."""
    top = max((max(drawn.get_ydata()) for drawn in panel.lines if len(drawn.get_ydata())),
              default=1.0)
    panel.set_ylim(0, 1.06 * top or 1.0)


def draw_bar(panel, place: float, bounds: Sequence[float], colour: str) -> None:
    """Draw a broad, pale bar from the least to the greatest of what is drawn at a place."""
    panel.plot([place] * 2, bounds, color=colour, linewidth=4, alpha=0.35, solid_capstyle="butt",
               label="_interval")


def draw_stack(panel, place: float, parts: Iterable[tuple[float, str, str | None, str]]) -> None:
    """Draw parts on each other, the first at the bottom: height, colour, hatching and label."""
    bottom = 0.0
    for height, colour, hatch, label in parts:
        panel.bar(place, height, 0.38, bottom, color=colour, edgecolor="white", linewidth=0.5,
                  hatch=hatch, label=label)
        bottom += height


def label_handles(panels) -> dict[str, Any]:
    """Return what has each label in some panels, for one legend of all."""
    return {label: handle for panel in panels for handle, label in zip(
        *panel.get_legend_handles_labels())}


def add_legends(figure, panels) -> None:
    """Draw the legend of every panel, or a long one once, beside them; say "no results"."""
    panels = list(panels)
    found = label_handles(panels)
    for panel in panels:
        if not panel.get_legend_handles_labels()[1]:
            panel.text(0.5, 0.5, "no results", transform=panel.transAxes, ha="center")
    if len(found) > IN_PANEL:
        figure.set_figwidth(figure.get_figwidth() + BESIDE)
        figure.legend(found.values(), found.keys(), loc="outside right center")
        return
    for panel in panels:
        if panel.get_legend_handles_labels()[1]:
            panel.legend()


def label_plainly(axis, base: float = 10.0, marks: tuple[float, ...] = (1, 2, 5)) -> None:
    """Label a logarithmic axis with plain numbers."""
    from matplotlib.ticker import LogLocator, NullFormatter
    axis.set_major_locator(LogLocator(base, marks))
    axis.set_major_formatter(lambda number, _: f"{number:g}")
    axis.set_minor_formatter(NullFormatter())


def label_powers(axis, base: int = 10) -> None:
    """Label a logarithmic axis of many decades with powers in plain text."""
    from matplotlib.ticker import LogLocator, NullFormatter
    raised = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
    axis.set_major_locator(LogLocator(base, (1,)))
    axis.set_major_formatter(
        lambda number, _: f"{base}{str(round(math.log(number, base))).translate(raised)}")
    axis.set_minor_formatter(NullFormatter())


def draw_pictures(draws: Iterable[Callable[[], Path]]) -> int:
    """Draw pictures and print their paths, or why one is not drawn (`NoFigure`): then return 1."""
    status = 0
    for draw in draws:
        try:
            say(draw())
        except NoFigure as why:
            complain(f"not drawn: {why}")
            status = 1
    return status


def report_drawn(files: Iterable[Path], left_out: Sequence[NoFigure]) -> int:
    """Print the pictures of a folder, and why others are not drawn; 1 if one cannot be, else 0."""
    for path in files:
        say(path)
    for why in left_out:
        (complain if isinstance(why, NotDrawn) else say)(f"not drawn: {why}")
    return int(any(isinstance(why, NotDrawn) for why in left_out))


@dataclass(frozen=True)
class Drawing:
    """A figure that can be drawn."""

    name: str    # such as "roofline-laptop"
    about: str    # the description of the figure
    make: Callable[[], Any]    # makes the matplotlib figure; raises `NoFigure` for want of results


def draw_each(drawings: Iterable[Drawing], draw: Callable[[Drawing], Iterable[Any]]) -> tuple[
        list[Any], list[NoFigure]]:
    """Draw figures; return all that `draw` makes of them, and why others are not drawn."""
    drawn: list[Any] = []
    left_out: list[NoFigure] = []
    for one in drawings:
        try:
            for found in draw(one):
                drawn.append(found)
        except NoFigure as why:
            left_out.append(type(why)(f"{one.name}: {why}"))
    return drawn, left_out


def save_drawings(drawings: Iterable[Drawing], folder: Path,
                  formats: Sequence[str] = ("png",)) -> tuple[list[Path], list[NoFigure]]:
    """Save drawings in a folder; return the files, and why others are not drawn."""
    return draw_each(drawings, lambda one: (
        save_picture(folder / f"{one.name}.{form}", one.make) for form in formats))
