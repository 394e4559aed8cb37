"""Say in a few lines what was judged, and what was found first."""

import numpy as np

from bench.document import Column, Notes, Part, Rows, Table, number_cell
from bench.experiments.dump.causes import explain
from bench.experiments.dump.dumps import StepDump
from bench.experiments.dump.envelopes import ALARMS, SAMPLES, Distance
from bench.experiments.dump.verdicts import PLURALS, Judged, Verdict, type_of


def tell(dump: StepDump, verdict: Verdict) -> list[str]:
    """Return the lines of a verdict."""
    model = dump.model
    lines = [f"{dump.folder}: {dump.family}, {model.layers} layers of {model.hidden} features, "
             f"{model.batch} x {model.seq} tokens, {type_of(dump, verdict)}"]
    if verdict.imitated:
        lines.append(f"envelope: of {SAMPLES} steps in float64 with the roundings of its types; "
                     f"1 of {1 / ALARMS:.0f} right dumps has a tensor outside")
    outside = {kind: [one.outside for one in verdict.judged if one.place.kind == kind]
               for kind in PLURALS}
    lines.append("inside: " + ", ".join(f"{each.count(False)} of {len(each)} {PLURALS[kind]}" if (
        len(each) > 1) else f"{PLURALS[kind]} {'outside' if each[0] else 'inside'}"
        for kind, each in outside.items() if each))
    lines += [f"not judged: {name}: {why}" for name, why in verdict.left.items()]
    lines += [f"not seen by the program: {one}" for one in dump.unseen]
    one = verdict.first
    if one is None:
        worst = max(verdict.judged, key=lambda each: each.ratio, default=None)
        return lines + ([f"nothing is outside the envelope; nearest to it is {worst.place}, at "
                         f"{worst.ratio:.2g} of it"] if worst else ["nothing was judged"])
    cause = explain(dump, verdict)
    return [*lines, f"FIRST OUTSIDE: {one.place}", f"  {_figures(one)}", f"  cause: {cause}"]


def summary(dump: StepDump, verdict: Verdict) -> str:
    """Return a verdict in one line."""
    one, what = verdict.first, f"{dump.folder.name} ({type_of(dump, verdict)})"
    if one is None:
        ratio = max((each.ratio for each in verdict.judged), default=0.0)
        left = f"; not judged: {', '.join(verdict.left)}" if verdict.left else ""
        return f"{what}: {len(verdict.judged)} tensors inside, at most {ratio:.2g}{left}"
    cause = explain(dump, verdict)
    return f"{what}: {one.place}, {one.ratio:.2g} envelopes: {cause}"


def verdict_parts(found: list[tuple[StepDump, Verdict]], both: bool) -> list[Part]:
    """Make a table with a line for each verdict, for a program that reads it."""
    columns = [Column(name) for name in ("dump", "type", "judged", "first outside", "envelopes",
                                         "cause", "not judged")]
    rows: Rows = []
    for dump, verdict in found:
        one = verdict.first
        rows.append([str(dump.folder), type_of(dump, verdict), len(verdict.judged),
                     str(one.place) if one else "", number_cell(one.ratio if one else np.nan),
                     explain(dump, verdict) if one else "",
                     ", ".join(map(str, verdict.left))])
    table = Table("Verdicts", columns, rows)
    return [table, Notes("Both", tell_both(*found))] if both else [table]


def tell_both(one: tuple[StepDump, Verdict], other: tuple[StepDump, Verdict]) -> list[str]:
    """Return what two dumps of the same step have in common, and where they first differ."""
    names = [dump.folder.name for dump, _ in (one, other)]
    if names[0] == names[1]:
        names = [str(dump.folder) for dump, _ in (one, other)]
    firsts = [verdict.first for _, verdict in (one, other)]
    (a, _), (b, verdict) = one, other
    if any(place.kind == "mask" and not np.array_equal(mask, b.tensors.get(place, mask))
           for place, mask in a.tensors.items()):
        return ["dropout took other elements in either of them: what they differ by tells nothing"]
    ratios = {each.place: each.envelope for each in one[1].judged}
    envelopes = {each.place: each.envelope.widest(ratios.get(each.place, Distance()))
                 for each in verdict.judged}
    both = [(place, Distance.between(np.float64(a.tensors[place]), np.float64(
        b.tensors[place])).over(envelopes[place])) for place in a.tensors
        if place in b.tensors and place in envelopes]
    if not both:
        return ["the two dumps have no tensor in common"]
    place, ratio = max(both, key=lambda each: each[1])
    wrong = [name for name, first in zip(names, firsts) if first is not None]
    if not wrong:
        return [f"their difference is rounding: both are inside the envelope; they differ most in "
                f"{place}, by {ratio:.2g} of it"]
    return [f"they differ first in {next((p for p, r in both if r > 1), place)}; outside the "
            f"envelope is {' and '.join(wrong)}"]


def _figures(one: Judged) -> str:
    """Return the error and the envelope of a tensor, relative to its size."""
    scale = one.scale or 1.0
    return (f"error {one.error.whole / scale:.3g}, envelope {one.envelope.whole / scale:.3g} of "
            f"its size: {one.ratio:.3g} envelopes")
