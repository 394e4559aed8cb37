"""Draw the parts of the time of steps, as shares, and the spans of a trace of --trace."""

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Iterable, Iterator, Sequence

from bench.cases.paper import HEADINGS, title
from bench.document import number_cell
from bench.instruments.chrome_trace import group_tracks, nanoseconds, read_trace
from bench.records.folder import Results
from bench.records.model_run import Run
from bench.reports import time_parts
from bench.reports.figures.against_ranks import scheme_label, write_caption
from bench.reports.figures.schedules import ACTION_KINDS
from bench.reports.figures.style import (BLUE, DARK_GREY, GREEN, LIGHT_GREY, ORANGE, PURPLE,
                                         SIDE_SHIFTS, SKY, VERMILION, YELLOW, Drawing, NoFigure,
                                         draw_stack, make_figure)
from bench.reports.time_parts import LABELS, part_title
from mm3d.tracing.events import PHASES

# Lost time is grey.
COLOURS = {"gemm": BLUE, "x": VERMILION, "y": ORANGE, "z": PURPLE, "elementwise": GREEN,
           "waiting": LIGHT_GREY, "other": DARK_GREY}
HATCHES = {"x": "//", "y": "\\\\", "z": "xx"}
PAIR = 0.62     # inches per pair of bars, where there are many
IN_FULL = 10    # up to this many pairs, each has its scheme written below
# For further directions, in the order of the grid.
FURTHER = (SKY, ".."), (YELLOW, "||"), (SKY, "--"), (YELLOW, "++")


def draw_time_shares(results: Results):
    """Draw the parts of forward and backward as shares; NoFigure when no run was traced."""
    traced = {key: found for key, run in results.runs.items()
              if (found := time_parts.mean_parts(run))}
    if not traced:
        raise NoFigure("no run says where its time went (it was measured before that was "
                       "recorded, or with --traced 0)")
    looks = part_styles(results.runs[key].directions for key in traced)
    most = max(sum(key[0] == table for key in traced) for table in HEADINGS)
    figure, panels = make_figure(2, 1, (max(10, 2.2 + PAIR * most), 7.2), (
        "Where the time goes, in the mean over ranks and traced repetitions"))
    for (panel,), table in zip(panels, HEADINGS):
        rows = [row for row in results.rows(table) if row.key in traced]
        runs = [results.get(row) for row in rows]
        for place, run in enumerate(runs):
            _stacked(panel, place, traced[table, run.configuration["scheme"], run.ranks], looks,
                     7.5 if most <= IN_FULL else 6.5)
        if most <= IN_FULL:
            panel.set_xticks(range(len(runs)), [
                f"{title(row.scheme)}\n{run.ranks} ranks" + "\nnot published" * (
                    not row.published) for row, run in zip(rows, runs)])
        else:
            _name_groups(panel, runs)
        panel.set(title=f"{HEADINGS[table]}, preset {results.title}: forward (left bars) and "
                  f"backward (right), seconds of a step above", ylabel="share of the phase (%)",
                  ylim=(0, 108), xlim=(-0.6, max(len(runs), 1) - 0.4))
        panel.grid(visible=False, axis="x")
        if not runs:
            panel.text(0.5, 0.5, "no results", transform=panel.transAxes, ha="center")
    _labels(figure, traced, looks)
    write_caption(figure, results)
    return figure


def _name_groups(panel, runs: list[Run]) -> None:
    """Write the ranks of each pair of bars below it, and the name of each scheme once."""
    panel.set_xticks(range(len(runs)), [str(run.ranks) for run in runs])
    places: dict[str, list[int]] = {}
    for place, run in enumerate(runs):
        places.setdefault(run.configuration["scheme"], []).append(place)
    for scheme, own in places.items():
        panel.annotate(scheme_label(scheme).replace(", ", ",\n"), (sum(own) / len(own), 0),
                       (0, -18), xycoords=("data", "axes fraction"), textcoords="offset points",
                       ha="center", va="top", fontsize=8.5)
        if own[0]:
            panel.axvline(own[0] - 0.5, color="0.6", linewidth=0.8, linestyle=":")


def part_styles(grids: Iterable[Sequence[str]]) -> dict[str, tuple[str, str | None]]:
    """Return colour and hatching of all parts on grids, by directions, from the stack's bottom."""
    # Larger grids first: they give the order of the directions.
    of_grids = sorted(grids, key=len, reverse=True)
    directions = dict.fromkeys(itertools.chain.from_iterable(of_grids))
    further = dict(zip((name for name in directions if name not in COLOURS),
                       itertools.cycle(FURTHER)))
    return {name: further.get(name) or (COLOURS[name], HATCHES.get(name))
            for name in time_parts.stacked_parts(directions)}


def _stacked(panel, place: int, shares: dict[str, dict[str, float]],
             looks: dict[str, tuple[str, str | None]], size: float) -> None:
    """Draw the bars of forward and backward, with their seconds in letters of this size."""
    for phase, side in zip(PHASES, SIDE_SHIFTS):
        whole = sum(shares[phase].values())
        draw_stack(panel, place + side, [(100 * shares[phase].get(name, 0.0) / whole, *look, "")
                                         for name, look in looks.items()])
        seconds = number_cell(whole, ".0f" if whole >= 100 else "#.2g")
        panel.text(place + side, 101, str(seconds), ha="center", va="bottom", fontsize=size)


def _labels(figure, traced: dict, looks: dict[str, tuple[str, str | None]]) -> None:
    """Draw the legend of all parts in the runs, from the top of the stack."""
    from matplotlib.patches import Patch
    used = [name for name in looks if any(shares[phase].get(name, 0) > 0
                                          for shares in traced.values() for phase in PHASES)]
    figure.legend(handles=[Patch(facecolor=looks[name][0], hatch=looks[name][1],
                                 edgecolor="white", label=time_parts.part_title(name))
                           for name in reversed(used)], loc="outside right center")


WIDTH, LANE, LANES = 13.0, 0.42, 12.0    # inches: of the figure, of a lane, at most of all lanes
NAMED = 9    # spans that are named above the first lane
APART = 0.055    # of the axis, between their names
LETTER = 0.007    # of the axis: width of a letter in a span


@dataclass(frozen=True)
class TracePiece:
    """A span of a lane: its part, its times in milliseconds, and those outside of inner spans."""

    name: str
    part: str
    start: float
    end: float
    own: float
    depth: int


def trace_drawing(path: str | Path) -> Drawing:
    """Read a trace, and return what draws it; errors are those of `read_trace`."""
    document = read_trace(path)
    return Drawing(Path(path).stem, "Spans of a traced step, by rank.",
                   lambda: draw_trace(document))


def draw_trace(document: dict[str, Any]):
    """Draw the spans of each track, inner ones on top, by their parts; NoFigure for none."""
    lanes = lanes_of(document["traceEvents"])
    pieces = [piece for lane in lanes.values() for piece in lane]
    if not pieces:
        raise NoFigure("the trace has no spans")
    end = max(piece.end for piece in pieces)
    height = min(LANE * len(lanes), LANES)
    figure, ((panel,),) = make_figure(1, 1, (WIDTH, height + 2.9), "")
    looks = _looks(pieces)
    for place, lane in enumerate(lanes.values()):
        for part, (colour, hatch) in looks.items():
            for depth in {piece.depth for piece in lane if piece.part == part}:
                panel.broken_barh(
                    [(piece.start, piece.end - piece.start) for piece in lane
                     if (piece.part, piece.depth) == (part, depth)],
                    (place - 0.42, 0.84), facecolor=colour, hatch=hatch, edgecolor="white",
                    linewidth=0.4, zorder=2 + depth)
    flat = all(piece.depth == 0 for piece in pieces)    # of a pipeline: its actions alone
    (_name_actions if flat else _name_spans)(panel, lanes, end)
    panel.set_yticks(range(len(lanes)), lanes)
    panel.set(xlim=(0, end), ylim=(len(lanes) - (0.5 if flat else 0.1), -0.6), xlabel="time (ms)")
    panel.grid(visible=False, axis="y")
    about = document.get("otherData", {})
    panel.set_title(str(about.get("title", "")), pad=8 if flat else 84, fontweight="bold")
    _legend(figure, pieces, len(lanes), looks)
    figure.supxlabel(_remark(about, flat))
    return figure


def lanes_of(events: list[dict[str, Any]]) -> dict[str, list[TracePiece]]:
    """Return the spans of each track by its name, in the order of the file."""
    names = {one["tid"]: one["args"]["name"] for one in events if one["name"] == "thread_name"}
    return {names[track]: list(_pieces(spans)) for (_, track), spans in group_tracks(
        events).items()}


def _pieces(spans: list[dict[str, Any]]) -> Iterator[TracePiece]:
    """Iterate over the spans of a track, whose own time is what no inner span takes."""
    inside: list[int] = [0] * len(spans)
    around: list[tuple[int, int]] = []    # ends of the spans around, and their numbers
    depths = []
    for number, one in enumerate(spans):
        start, end = nanoseconds(one)
        while around and start >= around[-1][0]:
            around.pop()
        if around:
            inside[around[-1][1]] += end - start
        depths.append(len(around))
        around.append((end, number))
    for one, taken, depth in zip(spans, inside, depths):
        start, end = nanoseconds(one)
        yield TracePiece(one["name"], _part(one), start / 1e6, end / 1e6,
                         (end - start - taken) / 1e6, depth)


def _part(span: dict[str, Any]) -> str:
    """Return the part of a span: an action of a pipeline, or one of `time_parts.stacked_parts`."""
    given = span["args"]
    kind = span["name"][:1] if "." in span["name"] and span["cat"] == "phase" else ""
    return kind if kind in ACTION_KINDS else (
        given["axis"] if span["cat"] == "collective" else str(given.get("part", "other")))


def _looks(pieces: list[TracePiece]) -> dict[str, tuple[str, str | None]]:
    used = dict.fromkeys(piece.part for piece in pieces)
    known = {kind: (colour, None) for kind, (_, colour) in ACTION_KINDS.items()}
    directions = sorted(used.keys() - known.keys() - LABELS.keys())
    known |= part_styles([directions])
    return {part: look for part, look in known.items() if part in used}


def _name_spans(panel, lanes: dict[str, list[TracePiece]], end: float) -> None:
    """Name the spans of the first lane that take longest themselves, and its phases."""
    lane, chosen = next(iter(lanes.values())), []
    for piece in sorted(lane, key=lambda piece: -piece.own):
        middle = (piece.start + piece.end) / 2
        if piece.depth and all(abs(middle - (other.start + other.end) / 2) > APART * end
                               for other in chosen):
            chosen.append(piece)
    for piece in chosen[:NAMED]:
        middle = (piece.start + piece.end) / 2
        panel.annotate(piece.name, (middle, -0.42), (0, 12), textcoords="offset points",
                       rotation=28, ha="left", va="bottom", fontsize=8, annotation_clip=False,
                       arrowprops={"arrowstyle": "-", "linewidth": 0.7, "color": "0.3"})
    for piece in lane:
        if piece.depth == 0:
            panel.axvline(piece.start, color="0.25", linewidth=1, zorder=1)
            panel.text(piece.start + 0.004 * end, len(lanes) - 0.45, piece.name, va="top",
                       fontsize=9, fontstyle="italic")


def _name_actions(panel, lanes: dict[str, list[TracePiece]], end: float) -> None:
    """Write the names of a pipeline's actions into their spans, where there is room."""
    for place, lane in enumerate(lanes.values()):
        for piece in lane:
            if piece.end - piece.start > LETTER * end * len(piece.name):
                panel.text((piece.start + piece.end) / 2, place, piece.name, ha="center",
                           va="center", fontsize=6.5, zorder=3, clip_on=True)


def _legend(figure, pieces: list[TracePiece], lanes: int,
            looks: dict[str, tuple[str, str | None]]) -> None:
    """Name the colours, with the mean milliseconds of a track in each part."""
    from matplotlib.patches import Patch
    handles = []
    for part, (colour, hatch) in looks.items():
        own = sum(piece.own for piece in pieces if piece.part == part) / lanes
        title = ACTION_KINDS[part][0] if part in ACTION_KINDS else part_title(part)
        handles.append(Patch(facecolor=colour, hatch=hatch, edgecolor="white",
                             label=f"{title}: {own:.3g} ms"))
    figure.legend(handles=handles, loc="outside upper center", ncols=4)


def _remark(about: dict[str, Any], flat: bool) -> str:
    """Say what the lanes are and what the legend states."""
    errors = about.get("clock_offset_error_s") or [0.0]
    said = ["Legend: the mean of all tracks, without inner spans."]
    if not flat:
        said[0] = said[0].replace("Legend", "Named: the longest of the first track. Legend")
        said.append("Before each collective the ranks of its direction wait at a barrier"
                    + (f"; clocks agree to {1e3 * max(errors):.2g} ms." if max(errors) else "."))
    return " ".join(said)
