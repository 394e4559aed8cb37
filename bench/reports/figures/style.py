"""Share the style of all figures: colours, axes of ranks, intervals, captions."""

import io
import itertools
import math
import os
from contextlib import ExitStack, contextmanager
from importlib import resources
from pathlib import Path
from typing import Any, Callable, Iterator

from bench.cases.paper import PAPER, TITLES, title
from bench.errors import UsageError
from bench.records import atomic
from bench.records.folder import Results, most_oversubscribed, share_cores
from bench.reports import emulated

# Okabe and Ito's colours, distinguishable with every kind of colour vision; markers differ too,
# for print.
VERMILION, GREEN, BLUE, ORANGE = "#D55E00", "#009E73", "#0072B2", "#E69F00"
PURPLE, SKY, YELLOW = "#CC79A7", "#56B4E9", "#F0E442"
LIGHT_GREY, DARK_GREY = "#BBBBBB", "#666666"
CYCLE = ((VERMILION, "o"), (GREEN, "s"), (BLUE, "^"), (ORANGE, "v"), (PURPLE, "D"), (SKY, "P"),
         ("black", "X"), (YELLOW, "*"))
STYLES = dict(zip(TITLES, itertools.cycle(CYCLE)))    # the paper's schemes have the first
ASIDE = (-1, 0, 1, -2, 2, -3, 3, -4)    # where intervals of the schemes are, in this order
IN_PANEL = 5    # lines of a legend in a panel; a longer one stands beside all panels
BESIDE = 1.9    # inches for it
TICKS = (8, 16, 36, 64)
# Without what changes from day to day: the same figure is the same file.
METADATA = {"png": {"Software": None}, "svg": {"Date": None}, "pdf": {"CreationDate": None}}
Point = tuple[int, float]


class LeftOut(Exception):
    """Raised for a figure that is not drawn; says why, such as which results are missing."""


class NotDrawn(LeftOut):
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

    Parameters
    ----------
    make : callable
        Makes a matplotlib figure.
    form : str
        The format, one of `METADATA`.
    **options
        Of ``Figure.savefig``.

    Raises
    ------
    LeftOut
        When results are missing.
    NotDrawn
        When matplotlib or the system fails.  Errors of `make`, which are errors of the program,
        stay what they are.
    """
    image = io.BytesIO()
    with ExitStack() as stack:
        # The border: a library may fail in any way where it reads its settings, fonts and style,
        # and where it lays out and writes; between them only as it is imported and reads files.
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
    """Draw a figure into a file, in the format that the file's name ends in; return the file.

    Parameters and errors as those of `draw_image`; NotDrawn also when the file cannot be written.
    """
    image = draw_image(make, Path(path).suffix[1:], **options)
    try:
        if not (folder := Path(path).parent).exists():
            folder.mkdir(parents=True, exist_ok=True)
        atomic.replace(path, image)
    except OSError as error:
        raise NotDrawn(f"{path} cannot be written ({error.strerror})") from error
    return Path(path)


def check_name(path: str | os.PathLike) -> None:
    """Check the name of a picture; UsageError when its kind is none."""
    if Path(path).suffix[1:] not in METADATA:
        raise UsageError(f"{path}: a picture's name ends in .png, .svg or .pdf")


def scheme_style(scheme: str) -> tuple[str, str]:
    """Return colour and marker of `scheme`; grey dots if it is unknown."""
    return STYLES.get(scheme, ("grey", "."))


def scheme_label(scheme: str) -> str:
    """Return the title of `scheme` in a legend, which says if the paper has no figures of it."""
    return title(scheme) + ", not published" * (scheme not in PAPER)


def make_figure(rows: int, columns: int, size: tuple[float, float], heading: str):
    """Make a figure with its panels, (rows, columns)."""
    from matplotlib.figure import Figure
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(heading)
    return figure, figure.subplots(rows, columns, squeeze=False)


def make_rank_figure(rows: int, columns: int, size: tuple[float, float], heading: str):
    """Make a figure with the paper's numbers of ranks along its panels."""
    figure, panels = make_figure(rows, columns, size, heading)
    for panel in panels.flat:
        panel.set_xscale("log", base=2)
        panel.set_xticks(TICKS, [str(tick) for tick in TICKS])
        panel.minorticks_off()
        panel.set_xlim(TICKS[0] / 1.25, TICKS[-1] * 1.25)
    return figure, panels


def draw_line(panel, scheme: str, points: list[Point], **how) -> None:
    """Draw the points of a scheme, joined."""
    colour, marker = scheme_style(scheme)
    if points:
        panel.plot(*zip(*sorted(points)), **{"marker": marker, "color": colour,
                                             "label": scheme_label(scheme)} | how)


def draw_intervals(panel, scheme: str, points: list[tuple[int, float, float]]) -> None:
    """Draw the intervals of a scheme at numbers of ranks, slightly aside from other schemes."""
    aside = 1.035 ** dict(zip(STYLES, itertools.cycle(ASIDE))).get(scheme, 0)
    for ranks, *bounds in points:
        panel.plot([ranks * aside] * 2, bounds, color=scheme_style(scheme)[0], linewidth=4,
                   alpha=0.35, solid_capstyle="butt", label="_interval")


def draw_closed_form(panel, scheme: str, points: list[Point]) -> None:
    """Draw the closed form of a scheme, joined; dashes for one point, and for other schemes.

    These may have points on grids of different shapes, with no line between them.
    """
    joined = len(points) > 1 and scheme in PAPER
    draw_line(panel, scheme, points, alpha=0.6, label="_closed form", markersize=16,
              marker="" if joined else "_", linestyle="-" if joined else "")


def start_at_zero(panel) -> None:
    """Start the vertical axis at zero, with room above for the markers.

    It ends at one if all points are zero.
    """
    top = max((max(drawn.get_ydata()) for drawn in panel.lines if len(drawn.get_ydata())),
              default=1.0)
    panel.set_ylim(0, 1.06 * top or 1.0)


def add_legends(figure, panels) -> None:
    """Draw the legend of every panel, or a long one once, beside them.

    A panel without lines has a text that there are no results.
    """
    found: dict[str, Any] = {}
    panels = list(panels)
    for panel in panels:
        for handle, label in zip(*panel.get_legend_handles_labels()):
            found.setdefault(label, handle)
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


def write_caption(figure, results: Results, *remarks: str) -> None:
    """Write remarks below the panels, and a warning if ranks outnumbered cores or waited."""
    lines = list(remarks)
    runs = list(results.runs.values())
    inside, others = emulated.emulated_runs(runs), emulated.other_runs(runs)
    if inside:
        crowd = most_oversubscribed(inside)
        lines.append(f"Measured in an {emulated.describe_clusters(inside)}"
                     + (f", whose ranks {share_cores(crowd)}." if crowd else "."))
    crowd = most_oversubscribed(others)
    if crowd:
        some = f"{len(others)} of {len(runs)} rows measured" if inside else "Measured"
        lines.append(f"{some} with up to {crowd.ranks} ranks on {crowd.environment['cores']} "
                     f"cores, " + ("which they share for all that is not waited for."
                                   if results.variant.waits else
                                   "which take turns: not scaling results."))
    if results.variant.waits:
        lines.append("Ranks wait for the modelled seconds of their work; only collectives are "
                     "real.")
    if lines:
        figure.supxlabel("\n".join(lines), fontsize=8.5)
