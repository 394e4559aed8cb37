"""Figures of what a step is made of: where its time goes."""

from bench import parts
from bench.cases import HEADINGS, title
from bench.panels import LeftOut, blank, caption
from bench.results import Results
from mm3d.store import PHASES, Run

# Okabe and Ito's colours again; what is lost is grey.
COLOURS = {"gemm": "#0072B2", "x": "#D55E00", "y": "#E69F00", "z": "#CC79A7",
           "elementwise": "#009E73", "waiting": "#BBBBBB", "other": "#666666"}
HATCHES = {"x": "//", "y": "\\\\", "z": "xx"}


def where(results: Results):
    """The parts of forward and backward as shares, with the seconds above.

    Raises
    ------
    LeftOut
        When no run was traced.
    """
    traced = {key: found for key, run in results.runs.items() if (found := parts.parts(run))}
    if not traced:
        raise LeftOut("no run says where its time went (it was measured before that was "
                      "recorded, or with --traced 0)")
    figure, panels = blank(2, 1, (10, 7.2), "Where the time goes, in the mean over ranks and "
                           "traced repetitions")
    for (panel,), table in zip(panels, HEADINGS):
        rows = [row for row in results.rows(table) if (row.table, row.scheme, row.gpus) in traced]
        runs = [results.get(row) for row in rows]
        for place, run in enumerate(runs):
            _stacked(panel, place, run, traced[table, run.configuration["scheme"], run.ranks])
        panel.set_xticks(range(len(runs)), [
            f"{title(run.configuration['scheme'])}\n{run.ranks} ranks" for run in runs])
        panel.set(title=f"{HEADINGS[table]}, preset {results.title}: forward (left bars) and "
                  f"backward (right), seconds of a step above", ylabel="share of the phase (%)",
                  ylim=(0, 108), xlim=(-0.6, max(len(runs), 1) - 0.4))
        panel.grid(visible=False, axis="x")
        if not runs:
            panel.text(0.5, 0.5, "no results", transform=panel.transAxes, ha="center")
    _labels(figure, traced)
    caption(figure, results)
    return figure


def _stacked(panel, place: int, run: Run, shares: dict[str, dict[str, float]]) -> None:
    for phase, side in zip(PHASES, (-0.21, 0.21)):
        whole, bottom = sum(shares[phase].values()), 0.0
        for name, colour in COLOURS.items():
            share = 100 * shares[phase][name] / whole
            panel.bar(place + side, share, 0.38, bottom, color=colour, edgecolor="white",
                      linewidth=0.5, hatch=HATCHES.get(name))
            bottom += share
        panel.text(place + side, 101, f"{whole:.2g}", ha="center", va="bottom", fontsize=7.5)


def _labels(figure, traced: dict) -> None:
    """A legend of the parts that any run has, in the order of the stack from above."""
    from matplotlib.patches import Patch
    used = [name for name in COLOURS if any(shares[phase][name] > 0 for shares in traced.values()
                                            for phase in PHASES)]
    figure.legend(handles=[Patch(facecolor=COLOURS[name], hatch=HATCHES.get(name),
                                 edgecolor="white", label=parts.LABELS[name])
                           for name in reversed(used)], loc="outside right center")
