"""Judge steps of training that any program dumped: name the first tensor that is not right."""

import argparse
from typing import Any

import numpy as np

from bench.agreement import make_on_each_rank
from bench.command_line import measuring
from bench.document import Column, Notes, Part, Rows, Table, number_cell
from bench.errors import UsageError
from bench.experiments.dump.causes import explain
from bench.experiments.dump.dumps import StepDump, check_same_start, read_dump
from bench.experiments.dump.envelopes import ALARMS, SAMPLES, Distance
from bench.experiments.dump.names import TABLES
from bench.experiments.dump.verdicts import PLURALS, Verdict, judge, type_of
from mm3d.console import say

GROUP = "Judge other programs"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``judge``."""
    parser.add_argument("dumps", nargs="*", metavar="DUMP", help=(
        "folders of config.json and safetensors, see results/judge/README.rst; of several each "
        "is told in one line"))
    parser.add_argument("--against", metavar="DUMP", help=(
        "a dump of the same step by other ranks: say whether the difference is rounding"))
    parser.add_argument("--names", default="huggingface", metavar="TABLE", help=(
        f"names of tensors: {', '.join(TABLES)}, or a file of TOML or JSON (default huggingface)"))
    measuring.add_stall(parser)


def run(arguments: argparse.Namespace, comm: Any) -> int:
    """Print the verdicts; 1 when a tensor is outside its envelope, or none was judged."""
    if not arguments.dumps or arguments.against and len(arguments.dumps) > 1:
        raise UsageError("judge DUMP judges a dump, or several; with --against one")
    folders = arguments.dumps + [arguments.against] * bool(arguments.against)
    dumps = make_on_each_rank(    # one of which may not see them
        lambda: [read_dump(folder, arguments.names) for folder in folders], comm)
    if arguments.against:
        check_same_start(*dumps)
    for dump in dumps:
        if dump.model.layers > 1 and dump.model.experts and dump.model.experts.balance:
            raise UsageError(f"{dump.folder}: the routers' loss of Hugging Face is of all layers "
                             f"at once, which nothing here computes: output_router_logits false "
                             f"would do, or one layer")
    found = [(dump, judge(dump, comm)) for dump in dumps]
    if comm.rank == 0:    # which alone looks for causes
        if arguments.format == "text":
            say(*_told(found, bool(arguments.against)))
        else:
            arguments.show(_make_table(found, bool(arguments.against)))
    return int(any(verdict.first or not verdict.judged for _, verdict in found))


def _told(found: list[tuple[StepDump, Verdict]], both: bool) -> list[str]:
    """Return the lines of all verdicts; with `both` two dumps of a step are compared."""
    if len(found) > 1 and not both:
        return [_summary(*one) for one in found]
    lines = [line for one in found for line in (*_tell(*one), "")]
    return lines + tell_both(*found) if both else lines[:-1]


def _tell(dump: StepDump, verdict: Verdict) -> list[str]:
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
    scale = one.scale or 1.0
    return [*lines, f"FIRST OUTSIDE: {one.place}",
            f"  error {one.error.whole / scale:.3g}, envelope {one.envelope.whole / scale:.3g} of "
            f"its size: {one.ratio:.3g} envelopes", f"  cause: {explain(dump, verdict)}"]


def _summary(dump: StepDump, verdict: Verdict) -> str:
    """Return a verdict in one line."""
    one, what = verdict.first, f"{dump.folder.name} ({type_of(dump, verdict)})"
    if one is None:
        ratio = max((each.ratio for each in verdict.judged), default=0.0)
        left = f"; not judged: {', '.join(verdict.left)}" if verdict.left else ""
        return f"{what}: {len(verdict.judged)} tensors inside, at most {ratio:.2g}{left}"
    cause = explain(dump, verdict)
    return f"{what}: {one.place}, {one.ratio:.2g} envelopes: {cause}"


def _make_table(found: list[tuple[StepDump, Verdict]], both: bool) -> list[Part]:
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
