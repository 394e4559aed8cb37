"""Make tables of what one rank of any number of ranks does in a step, from its dry run."""

from collections import defaultdict

from bench.prediction import machine_model
from bench.prediction.seconds import TERMS, terms
from bench.reports.document import Column, Number, Table, number_cell
from mm3d.tracing.events import Collective, Gemm, PHASES, Pass
from mm3d.tracing.trace import Trace

BUCKETS = "words, bytes and messages are counted by the bucket algorithm; nothing travels"


def tables(trace: Trace, useful: dict[str, int],
           machine: machine_model.Machine | None = None) -> list[Table]:
    """Make the tables of a dry run, with predicted seconds where a machine is given.

    Parameters
    ----------
    trace : dry.Trace
        What one rank does.
    useful : dict of str to int
        Flops of all ranks by phase without those that are done again (`mm3d.model.cost.flops`).
    machine : model.Machine, optional
        What seconds are predicted for.
    """
    found = [phases(trace, useful), collectives(trace), parts(trace), memory(trace)]
    return [*found, seconds(trace, machine)] if machine else found


def _count(number: float) -> Number:
    """Format a whole number with commas between thousands."""
    return Number(number, f"{number:,}")


def phases(trace: Trace, useful: dict[str, int]) -> Table:
    """Make the table of flops, words and messages of a step."""
    again = {"forward": 0, "backward": trace.flops_again()}
    rows = [[phase, *map(_count, (
                trace.flops(phase), again[phase], useful[phase], trace.words(phase),
                sum(t.messages for t in trace.traffic[phase].values()),
                sum(e.bytes * n for e, n in trace.count(Pass, phase).items())))]
            for phase in PHASES]
    return Table("A step of this rank", [
        Column("phase"), Column("flops"), Column("of these again"),
        Column("useful flops of all ranks"), Column("words counted"), Column("messages"),
        Column("bytes of elementwise work")], rows)


def collectives(trace: Trace) -> Table:
    """Make the table of collectives by phase, direction and kind."""
    groups = {e.direction: (e.size, e.stride) for e in trace.count(Collective)}
    rows = [[phase, axis, kind, *map(_count, (*groups[axis], t.calls, t.messages, t.words,
                                              t.bytes))]
            for phase in PHASES for (axis, kind), t in sorted(trace.traffic[phase].items())]
    return Table(f"Collectives: {BUCKETS}", [
        Column("phase"), Column("direction", align="<"), Column("collective", align="<"),
        *map(Column, ("ranks", "stride", "calls", "messages", "words", "bytes"))], rows)


def parts(trace: Trace) -> Table:
    """Make the table of work and traffic by part of the layer, over all layers."""
    found: dict = defaultdict(lambda: [0, 0, 0, 0])
    for (phase, part, event), times in trace.events.items():
        if phase not in PHASES:
            continue
        row = found[phase, part]
        if isinstance(event, Gemm):
            row[0] += times * event.flops
        elif isinstance(event, Pass):
            row[1] += times * event.bytes
        else:
            row[2] += times
            row[3] += times * event.bytes
    return Table("Parts of all layers", [
        Column("phase"), Column("part", align="<"), Column("flops"),
        Column("bytes of elementwise work"), Column("collectives"),
        Column("bytes of their wholes")],
        [[*key, *map(_count, row)] for key, row in found.items()])


def memory(trace: Trace) -> Table:
    """Make the table of this rank's bytes."""
    rows = {"parameters and gradients": trace.parameters,
            "kept from forward to backward": trace.saved,
            "peak of the model's arrays": trace.pool_peak,
            "peak with intermediate arrays": trace.peak}
    return Table("Memory of this rank", [Column("arrays"), Column("bytes")],
                 [[name, _count(count)] for name, count in rows.items()])


def seconds(trace: Trace, machine: machine_model.Machine) -> Table:
    """Make the table of predicted seconds on a machine, and what they are spent on."""
    spent = terms(machine, trace)
    rows = []
    for phase in PHASES:
        taken = [v / getattr(machine.achieved, t) for t, v in spent[phase].items()]
        rows.append([phase, *map(number_cell, (sum(taken), *taken))])
    fits = "fits" if trace.peak <= machine.memory_bytes else "does not fit"
    return Table(f"Predicted seconds (a model; {fits} into "
                 f"{machine.memory_bytes / 2**30:.1f} GiB a rank): {machine.about}",
                 [Column("phase"), Column("seconds", align="."),
                  *(Column(term, align=".") for term in TERMS)], rows)
