"""Draw the speed-ups of 3-D on the most ranks for a talk: 16:9, large letters, one message."""

import math
from dataclasses import dataclass

from bench.cases.paper import HEADINGS, PROPOSED, title
from bench.records.folder import Results
from bench.reports.emulated_tables import STAR, speed_ups_table
from bench.reports.figures.by_scheme import scheme_style
from bench.reports.figures.emulation import DARK, comparable_rows
from bench.reports.figures.style import LIGHT_GREY, NoFigure, make_figure

SIZE = (16, 9)    # inches
LETTERS = {"font.size": 22, "axes.titlesize": 22, "axes.labelsize": 20, "xtick.labelsize": 20,
           "ytick.labelsize": 22, "figure.titlesize": 32, "figure.titleweight": "bold",
           "legend.fontsize": 20}
REMARK = 15    # points
HEIGHT, GAP = 0.4, 0.9    # of a bar, and between tables


@dataclass(frozen=True)
class ComparedSpeedUp:
    """A speed-up of 3-D: over what, and by how much, published (NaN if it is not) and emulated."""

    table: str
    over: str
    ranks: int
    published: float
    emulated: float
    low: float
    quotable: bool


def draw_talk(results: Results):
    """Draw the seconds of other schemes as multiples of 3-D's; the title is what they show.

    Raises NoFigure as in `emulation.comparable_rows`, and without a speed-up.
    """
    from matplotlib import rc_context
    rows = comparable_rows(results)
    found = speed_ups(rows)
    if not found:
        raise NoFigure("no speed-up was measured: rows of 3-D beside others would do")
    with rc_context(LETTERS):
        figure, ((panel,),) = make_figure(1, 1, SIZE, message(found))
        place, places = 0.0, []
        for number, one in enumerate(found):
            place += GAP * (number > 0 and one.table != found[number - 1].table)
            places.append(place)
            bars = [(one.emulated, STAR * (not one.quotable), scheme_style(PROPOSED)[0])]
            if not math.isnan(one.published):
                bars.insert(0, (one.published, "", LIGHT_GREY))
            for bar, (value, mark, colour) in enumerate(bars):
                at = place + HEIGHT * (bar - (len(bars) - 1) / 2)
                panel.barh(at, value, HEIGHT, color=colour)
                panel.text(value + 0.03, at, f"{value:.2f}{mark}", va="center", color=DARK)
            place += 1.0
        panel.axvline(1, color=DARK, linewidth=2)
        panel.set_yticks(places, [f"{one.table}: {one.over}" for one in found])
        panel.set(xlabel="times the seconds a sequence of 3-D (line: 1)",
                  xlim=(0, 1.12 * max(value for one in found for value in (
                      one.published, one.emulated) if not math.isnan(value))))
        panel.invert_yaxis()
        panel.grid(visible=False, axis="y")
        panel.legend(handles=_legend(), loc="lower right")
        where = rows[0].cluster.describe() if rows[0].cluster else "emulated"
        figure.supxlabel(f"Emulated: real messages on an {where}; modelled arithmetic of "
                         f"{rows[0].machine}. Batches as published, unless equal."
                         + f" {STAR} not to be quoted" * any(not one.quotable for one in found),
                         fontsize=REMARK, color=DARK)
    return figure


def _legend() -> list:
    from matplotlib.patches import Patch
    return [Patch(color=LIGHT_GREY, label="published, GPUs"),
            Patch(color=scheme_style(PROPOSED)[0], label="emulated, ranks")]


def speed_ups(rows) -> list[ComparedSpeedUp]:
    """Return the speed-ups on the most ranks of each table, as the tables of text have them.

    Of equal batches those of the other scheme stand for both: 3-D gains by its own, larger ones.
    """
    found = []
    for table in HEADINGS:
        own = [one for one in rows if one.row.table == table]
        lines = speed_ups_table("", own, True).rows if own else []
        most = max((line[1] for line in lines), default=0)
        for over, ranks, published, _, _, emulated, low, *_ in lines:
            name, _, like = over.removeprefix("over ").partition(", batch of ")
            if ranks == most and like != title(PROPOSED):
                found.append(ComparedSpeedUp(table, name + ", equal batch" * bool(like), ranks,
                                             published.value, emulated.value, low.value,
                                             STAR not in emulated.text))
    return found


def message(found: list[ComparedSpeedUp]) -> str:
    """Say over which schemes 3-D is faster: where all intervals are above 1, and may be quoted."""
    ranks = max(one.ranks for one in found)
    schemes: dict[str, list[ComparedSpeedUp]] = {}
    for one in found:
        schemes.setdefault(one.over.partition(",")[0], []).append(one)
    faster = [name for name, own in schemes.items()
              if all(one.quotable and one.low > 1 for one in own)]
    published = all(one.published > 1 for name in faster for one in schemes[name]
                    if not math.isnan(one.published))
    if not faster:
        return f"{title(PROPOSED)} beside other schemes on {ranks} ranks"
    return (f"On {ranks} ranks 3-D is faster than {' and '.join(faster)}"
            + ", as published" * published)
