"""Draw emulated rows beside published ones: against ranks, and their speed-ups for a talk."""

import math
from collections.abc import Callable, Sequence

from bench.cases.paper import HEADINGS, PROPOSED, title
from bench.records.folder import Results
from bench.reports import certainty, emulated
from bench.reports.emulated import Emulated
from bench.reports.emulated_tables import (STAR, ComparedRows, compared, emulated_rows,
                                           group_rows)
from bench.reports.figures.against_ranks import (TICKS, FigurePoint, counted_words, draw_intervals,
                                                 draw_line, make_rank_figure, scheme_style)
from bench.reports.figures.labels import Label, place_labels
from bench.reports.figures.style import (LIGHT_GREY, NoFigure, label_handles, label_plainly,
                                         make_figure)

# Read from the last row of a room: larger than the figures of a report.
LARGE = {"font.size": 14, "axes.titlesize": 16, "axes.labelsize": 14, "xtick.labelsize": 13,
         "ytick.labelsize": 13, "figure.titlesize": 18, "figure.titleweight": "bold",
         "legend.fontsize": 14, "lines.linewidth": 2.6, "lines.markersize": 10}
SMALL = 11    # points, of the remarks
DARK = "#1B1F24"
ASIDE, LETTER = 10, 4.1    # points: of a label from its marker, and half the width of a letter
ROOM = 2.6    # factor by which the ranks' axis extends beyond the most ranks, for labels
MARKS = (1, 1.5, 2, 3, 5, 7)    # of an axis, in each decade
MARGIN = 1.12    # factor by which an axis extends above and below the data
# Of a talk: one message on 16:9, in larger letters.
FOR_A_TALK = {"font.size": 22, "axes.titlesize": 22, "axes.labelsize": 20, "xtick.labelsize": 20,
              "ytick.labelsize": 22, "figure.titlesize": 32, "figure.titleweight": "bold",
              "legend.fontsize": 20}
REMARK = 15    # points
HEIGHT, GAP = 0.4, 0.9    # of a bar, and between tables


def comparable_rows(results: Results) -> list[Emulated]:
    """Return the emulated rows; NoFigure if they are of several clusters, machines or scales."""
    groups = group_rows(emulated_rows(results))
    if len(groups) != 1:
        raise NoFigure(f"rows were emulated on {len(groups)} clusters, machines or scales: one "
                       f"would do")
    return groups[0]


def draw_emulated(results: Results):
    """Draw seconds a sequence, published and emulated, and words a rank, against ranks.

    All axes are logarithmic, and the vertical ones of a row span the same ratio, so that equal
    slopes and gaps are equal ratios.  Raises NoFigure as `comparable_rows` does.
    """
    from matplotlib import rc_context
    from matplotlib.ticker import EngFormatter
    rows = [one for one in comparable_rows(results) if not one.row.like]
    cluster = rows[0].cluster
    where = cluster.describe() if cluster else "emulated"
    with rc_context(LARGE):
        figure, panels = make_rank_figure(2, 3, (16, 9), (
            f"{where[0].upper()}{where[1:]}: {emulated.MODELLED}"))
        labels, markers = [], []
        for line, table in zip(panels, HEADINGS):
            mine = [one for one in rows if one.row.table == table]
            for panel, draw in zip(line, (_published, _emulated, _words)):
                found = {scheme: draw(panel, [one for one in mine if one.row.scheme == scheme])
                         for scheme in results.schemes()}
                found = {scheme: points for scheme, points in found.items() if points}
                markers += [(panel, *point) for points in found.values() for point in points]
                labels += _multiples(panel, found, mine if draw is _emulated else ())
            _span_alike(line)
            line[0].set_ylabel(f"{HEADINGS[table].partition(', ')[2]}\nseconds a sequence")
            line[2].set_ylabel("words a sequence")
            line[2].yaxis.set_major_formatter(EngFormatter(sep=""))
        for panel, name in zip(panels[0], ("published", "emulated", "words of a rank")):
            panel.set_title(name)
        for panel, unit in zip(panels[1], ("GPUs", "ranks", "ranks")):
            panel.set_xlabel(unit)
        handles = label_handles(panels.flat)
        panels[0, 0].legend(handles.values(), handles.keys(), loc="upper left")
        marked = any(STAR in label.text for label in labels)
        figure.supxlabel("\n".join(_remarks(rows, marked)), fontsize=SMALL, color=DARK)
        place_labels(figure, labels, markers, size=LARGE["font.size"])
    return figure


def _published(panel, rows: Sequence[Emulated]) -> list[FigurePoint]:
    """Draw the seconds a sequence that the paper prints of a scheme; return the points."""
    return _line(panel, [one for one in rows if one.row.published],
                 lambda one: one.row.recomputed)


def _emulated(panel, rows: Sequence[Emulated]) -> list[FigurePoint]:
    """Draw a scheme's emulated seconds a sequence, open where software is above its bound."""
    if rows:
        draw_intervals(panel, rows[0].row.scheme, [(one.row.gpus, *one.interval) for one in rows])
    points = _line(panel, rows, lambda one: one.average)
    if above := [(one.row.gpus, one.average) for one in rows if not one.quotable]:
        draw_line(panel, rows[0].row.scheme, above, linestyle="", markerfacecolor="white",
                  markeredgewidth=2.0, label="_open")
    return points


def _words(panel, rows: Sequence[Emulated]) -> list[FigurePoint]:
    """Draw a scheme's words counted per rank and sequence; return the points."""
    return _line(panel, rows, lambda one: counted_words(one.run))


def _line(panel, rows: Sequence[Emulated],
          value: Callable[[Emulated], float]) -> list[FigurePoint]:
    points = sorted((one.row.gpus, value(one)) for one in rows)
    if points:
        draw_line(panel, rows[0].row.scheme, points)
    return points


def _multiples(panel, found: dict[str, list[FigurePoint]],
               rows: Sequence[Emulated]) -> list[Label]:
    """Label the points at the most ranks with multiples of 3-D's, of the runs of `rows` if any."""
    ranks, base = max(found.get(PROPOSED, [(0, math.nan)]))
    runs = {one.row.scheme: one for one in rows if one.row.gpus == ranks}
    labels = []
    for scheme, points in found.items():
        value = dict(points).get(ranks)
        if value is None:
            continue
        ratio, mark = value / base, ""
        if runs:
            pair = runs[scheme], runs[PROPOSED]
            ratio = certainty.speed_up(*(one.averages for one in pair)).ratio
            mark = STAR * (not all(one.quotable for one in pair))
        text = f"{title(scheme)}{f' {ratio:.1f}x{mark}' * (scheme != PROPOSED)}"
        middle = ASIDE + LETTER * len(text)
        labels.append(Label(panel, text, [((ranks, value), (middle, up)) for up in (
            0, 8, -8, 14, -14)], DARK, optional=True))
    return labels


def _span_alike(panels) -> None:
    """Let logarithmic vertical axes span the same ratio, each around its data."""
    ends = [(min(values), max(values)) for panel in panels
            if (values := [y for line in panel.lines for y in line.get_ydata()])]
    half = MARGIN * math.sqrt(max((high / low for low, high in ends), default=1.0))
    for panel in panels:
        panel.set_yscale("log")
        values = [y for line in panel.lines for y in line.get_ydata()]
        if values:
            middle = math.sqrt(min(values) * max(values))
            panel.set_ylim(middle / half, middle * half)
        label_plainly(panel.yaxis, marks=MARKS)
        panel.set_xlim(TICKS[0] / 1.25, TICKS[-1] * ROOM)


def _remarks(rows: Sequence[Emulated], marked: bool) -> list[str]:
    """State how the figure was measured and drawn; `marked` if labels have a `STAR`."""
    machine = rows[0].machine
    said = ["1.5x: times what 3-D takes. Logarithmic axes; the vertical ones of a row span the "
            "same ratio. Bars: 95 % intervals.",
            f"Messages take their time on emulated links; ranks wait for the seconds of "
            f"arithmetic that a model of {machine} states. Seconds are at its scale.",
            f"Batches, {_batches(rows)}."]
    if above := [one for one in rows if not one.quotable]:
        bounds = " or ".join(f"{100 * each:g} %" for each in sorted(
            {one.bound for one in above if one.bound > 0})) or "what is allowed"
        unknown = any(math.isnan(one.software) or math.isnan(one.bound) for one in above)
        said[-1] += (f" Open markers{f' and {STAR}' * marked}: software above {bounds} of a step"
                     + ", or unknown" * unknown + ", not to be quoted.")
    return said


def _batches(rows: Sequence[Emulated]) -> str:
    """Name the batches of each table's schemes, from the fewest ranks to the most."""
    found = []
    for table in HEADINGS:
        sizes: dict[str, list[int]] = {}
        for one in sorted(rows, key=lambda one: (title(one.row.scheme), one.row.gpus)):
            if one.row.table == table:
                sizes.setdefault(one.row.scheme, []).append(one.sizes.batch)
        found += [f"{table} " + ", ".join(
            f"{title(scheme)} {' to '.join(map(str, dict.fromkeys((own[0], own[-1]))))}"
            for scheme, own in sizes.items())] * bool(sizes)
    return "; ".join(found)


def draw_talk(results: Results):
    """Draw the seconds of other schemes as multiples of 3-D's; the title is what they show.

    Raises NoFigure as in `comparable_rows`, and without a speed-up.
    """
    from matplotlib import rc_context
    from matplotlib.patches import Patch
    rows = comparable_rows(results)
    found = compared_on_most(rows)
    if not found:
        raise NoFigure("no speed-up was measured: rows of 3-D beside others would do")
    own = scheme_style(PROPOSED)[0]
    with rc_context(FOR_A_TALK):
        figure, ((panel,),) = make_figure(1, 1, (16, 9), message(found))
        place, places = 0.0, []
        for number, one in enumerate(found):
            table = one.slow.row.table
            place += GAP * (number > 0 and table != found[number - 1].slow.row.table)
            places.append(place)
            bars = [(one.found.ratio, STAR * (not one.quotable), own)]
            if not math.isnan(one.published):
                bars.insert(0, (one.published, "", LIGHT_GREY))
            for bar, (value, mark, colour) in enumerate(bars):
                at = place + HEIGHT * (bar - (len(bars) - 1) / 2)
                panel.barh(at, value, HEIGHT, color=colour)
                panel.text(value + 0.03, at, f"{value:.2f}{mark}", va="center", color=DARK)
            place += 1.0
        panel.axvline(1, color=DARK, linewidth=2)
        panel.set_yticks(places, [
            f"{one.slow.row.table}: {one.over}{', equal batch' * bool(one.like)}"
            for one in found])
        panel.set(xlabel="times the seconds a sequence of 3-D (line: 1)",
                  xlim=(0, 1.12 * max(value for one in found for value in (
                      one.published, one.found.ratio) if not math.isnan(value))))
        panel.invert_yaxis()
        panel.grid(visible=False, axis="y")
        panel.legend(handles=[Patch(color=LIGHT_GREY, label="published, GPUs"),
                              Patch(color=own, label="emulated, ranks")], loc="lower right")
        where = rows[0].cluster.describe() if rows[0].cluster else "emulated"
        figure.supxlabel(f"Emulated: real messages on an {where}; modelled arithmetic of "
                         f"{rows[0].machine}. Batches as published, unless equal."
                         + f" {STAR} not to be quoted" * any(not one.quotable for one in found),
                         fontsize=REMARK, color=DARK)
    return figure


def compared_on_most(rows: Sequence[Emulated]) -> list[ComparedRows]:
    """Return the speed-ups on the most ranks of each table.

    Of equal batches those of the other scheme stand for both: 3-D gains by its own, larger ones.
    """
    found = []
    for table in HEADINGS:
        pairs = list(compared([one for one in rows if one.row.table == table]))
        most = max((one.slow.row.gpus for one in pairs), default=0)
        found += [one for one in pairs if one.slow.row.gpus == most and one.like != PROPOSED]
    return found


def message(found: Sequence[ComparedRows]) -> str:
    """Say over which schemes 3-D is faster: where all intervals are above 1, and may be quoted."""
    ranks = max(one.slow.row.gpus for one in found)
    schemes: dict[str, list[ComparedRows]] = {}
    for one in found:
        schemes.setdefault(one.over, []).append(one)
    faster = [name for name, own in schemes.items()
              if all(one.quotable and one.found.low > 1 for one in own)]
    published = all(one.published > 1 for name in faster for one in schemes[name]
                    if not math.isnan(one.published))
    if not faster:
        return f"{title(PROPOSED)} beside other schemes on {ranks} ranks"
    return (f"On {ranks} ranks 3-D is faster than {' and '.join(faster)}"
            + ", as published" * published)
