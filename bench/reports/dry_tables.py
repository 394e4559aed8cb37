"""Make tables of the work of one rank in a step, counted by a dry run."""

from collections import Counter, defaultdict

from bench.cases.variants import itemsize
from bench.document import Column, Notes, Number, Table, number_cell
from bench.prediction import machine_model
from bench.prediction.kernels import priced
from bench.prediction.memory_fit import state_by_kind
from bench.prediction.seconds import TERMS, trace_terms
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.experts.token_order import capacity_of
from mm3d.model.stack import Stack
from mm3d.tracing.events import Boundary, Call, Collective, Gemm, MemoryPass, Overlapped
from mm3d.tracing.trace import Trace

COUNTED = "words, bytes and messages are counted by the bucket algorithm; nothing travels"
NOT_HIDDEN = "products hide no collective; "    # in the title of seconds of a step with overlap


def dry_tables(trace: Trace, useful: dict[str, int], machine: machine_model.Machine | None = None,
               stack: Stack | None = None) -> list[Table]:
    """Make the tables of a dry run, with predicted seconds where a machine is given.

    Parameters
    ----------
    useful : dict of str to int
        Flops of all ranks by phase, without recomputation (`mm3d.model.cost.flops`).
    """
    found = [phase_table(trace, useful), collective_table(trace), part_table(trace),
             memory_table(trace)]
    return [*found, predicted_table(priced(trace, machine, stack), machine)] if machine else found


def _count(number: int) -> Number:
    """Make a cell of a whole number, printed with commas between thousands."""
    return Number(number, f"{number:,}")


def phase_table(trace: Trace, useful: dict[str, int]) -> Table:
    """Make the table of flops, words, messages and elementwise work by phase."""
    again = {"backward": trace.flops_again(), "backward_input": trace.flops_again()}
    rows = [[phase, *map(_count, (
                trace.flops(phase), again.get(phase, 0), useful[phase], trace.words(phase),
                sum(t.messages for t in trace.traffic[phase].values()),
                sum(e.bytes * n for e, n in trace.count(MemoryPass, phase).items())))]
            for phase in trace.phases]
    return Table("A step of this rank", [
        Column("phase"), Column("flops"), Column("of these again"),
        Column("useful flops of all ranks"), Column("words counted"), Column("messages"),
        Column("bytes of elementwise work")], rows)


def collective_table(trace: Trace) -> Table:
    """Make the table of collectives by phase, direction and kind.

    With overlap a column tells how many of the calls are in flight during products.
    """
    groups = {e.direction: (e.size, e.stride) for e in trace.count(Collective)}
    in_flight = {phase: _begun(trace, phase) for phase in trace.phases}
    overlap = any(in_flight.values())
    rows = [[phase, axis, kind, *map(_count, (
                *groups[axis], t.calls, *[in_flight[phase][axis, kind]] * overlap, t.messages,
                t.words, t.bytes))]
            for phase in trace.phases for (axis, kind), t in sorted(trace.traffic[phase].items())]
    names = ["ranks", "stride", "calls", *["in flight"] * overlap, "messages", "words", "bytes"]
    return Table(f"Collectives: {COUNTED}", [
        Column("phase"), Column("direction", align="<"), Column("collective", align="<"),
        *map(Column, names)], rows)


def _begun(trace: Trace, phase: str) -> Counter[tuple[str, str]]:
    """Count the collectives begun before products, by direction and kind."""
    found: Counter[tuple[str, str]] = Counter()
    for event, times in trace.count(Overlapped, phase).items():
        if event.call == "begin":
            found[event.direction, event.kind] += times
    return found


def part_table(trace: Trace) -> Table:
    """Make the table of work and traffic by part of a Transformer layer, over all layers."""
    found: dict = defaultdict(lambda: [0, 0, 0, 0])
    for (phase, part, event), times in trace.events.items():
        if phase not in trace.phases or isinstance(event, (Boundary, Call, Overlapped)):
            continue
        row = found[phase, part]
        if isinstance(event, Gemm):
            row[0] += times * event.flops
        elif isinstance(event, MemoryPass):
            row[1] += times * event.bytes
        else:
            row[2] += times
            row[3] += times * event.bytes
    return Table("Parts of all layers", [
        Column("phase"), Column("part", align="<"), Column("flops"),
        Column("bytes of elementwise work"), Column("collectives"),
        Column("bytes of their wholes")],
        [[*key, *map(_count, row)] for key, row in found.items()])


def memory_table(trace: Trace) -> Table:
    """Make the table of this rank's bytes."""
    rows = {"parameters and gradients": trace.parameters,
            "kept from forward to backward": trace.saved,
            "peak of the model's arrays": trace.pool_peak,
            "peak with intermediate arrays": trace.peak}
    return Table("Memory of this rank", [Column("arrays"), Column("bytes")],
                 [[name, _count(count)] for name, count in rows.items()])


def state_table(stored: int, data: int, dtype: str, divided: int = 0,
                groups: int = 1) -> Table:
    """Make the table of a rank's bytes of state in each stage of ZeRO, with AdamW.

    Parameters
    ----------
    stored : int
        Bytes of this rank's parameters and gradients, without replicas and masters.
    dtype : str
        Type of values.  Types of 16 bits have masters in float32, and moments are of the master's
        type.
    divided : int
        The part of `stored` for experts that replicas divide in every stage.
    groups : int
        Number of groups of replicas that together hold all of these experts; ZeRO divides them
        further among the groups.
    """
    narrow, rows = itemsize(dtype) == 2, []
    for zero, name in enumerate(("0: replicas", "1: optimizer", "2: and gradients",
                                 "3: and parameters")):
        kinds = state_of(stored, dtype, zero, data, divided, groups)
        every = sum(kinds.values())
        if narrow:    # as in values
            kinds["gradients"] /= 2
        rows.append([name, *(_count(round(count)) for count in (
            *kinds.values(), sum(kinds.values()), *[every] * narrow))])
    wide = [Column("all, float32 gradients")] if narrow else []
    note = "; mm3d's gradients are float32 where there are masters" * narrow
    return Table(f"State of this rank in bytes: {data} replicas, AdamW, by stage of ZeRO{note}", [
        *map(Column, ("stage", "values", "gradients", "masters", "moments", "all")), *wide], rows)


def state_of(stored: int, dtype: str, zero: int, data: int, divided: int,
             groups: int) -> dict[str, float]:
    """Return the result of `state_by_kind`; arguments as of `state_table`."""
    parts = [state_by_kind(dtype, count / (2 * itemsize(dtype)), zero, shards)
             for count, shards in ((stored - divided, data), (divided, groups))]
    return {name: sum(one[name] for one in parts) for name in parts[0]}


def predicted_table(trace: Trace, machine: machine_model.Machine) -> Table:
    """Make the table of predicted seconds on a machine, by the resource that takes them."""
    spent = trace_terms(machine, trace)
    rows = []
    for phase in trace.phases:
        taken = [v / getattr(machine.achieved, t) for t, v in spent[phase].items()]
        rows.append([phase, *map(number_cell, (sum(taken), *taken))])
    fits = ("fits without an optimizer" if trace.peak <= machine.memory_bytes
            else "does not fit")
    hidden = NOT_HIDDEN * bool(trace.count(Overlapped))
    return Table(f"Predicted seconds (a model; {hidden}{fits} into "
                 f"{machine.memory_bytes / 2**30:.1f} GiB a rank): {machine.described}",
                 [Column("phase"), Column("seconds", align="."),
                  *(Column(term, align=".") for term in TERMS)], rows)


def expert_notes(experts: ExpertOptions, trace: Trace, data: int, tokens: int) -> Notes:
    """State the assumed routing, and which words are counted between replicas."""
    every, capacity = data * tokens, capacity_of(experts, data * tokens)
    share = every * experts.top / experts.count
    lines = [f"The routing is assumed, not computed: of {every:,} tokens that are routed "
             f"together, each to {experts.top} of {experts.count} experts, every expert gets "
             f"{share:,.6g}. For that routing all counts are exact; a router that is trained "
             f"chooses otherwise.",
             "Nothing is dropped." if capacity is None else
             f"An expert takes {capacity:,} pairs of token and choice at most (capacity "
             f"{experts.capacity:g}); rows beyond are dropped, and not counted."]
    kinds = {kind for moved in trace.traffic.values() for direction, kind in moved
             if direction == "e"}
    if trace.divided:
        way = ("exchanged: an all-to-all of rows of tokens brings them to their experts, and "
               "another one brings the results back, and the same for gradients"
               if "all_to_all" in kinds else "gathered: all tokens come to all replicas, and "
               "sums of the results are scattered")
        lines.append(f"Direction e has the replicas that divide the experts. Rows are {way}. Its "
                     f"other all-gathers move counts of choices.")
    if data > 1:
        lines.append("The sums of gradients over replicas are not in these tables.")
    return Notes("About the experts (a model, not a run):", lines)


def plan_notes(experts: ExpertOptions) -> Notes:
    """Say what the plans of a model with experts assume."""
    capacity = experts.capacity
    dropped = ("nothing is dropped" if capacity is None else
               f"capacity {capacity:g} drops hardly any then" if capacity >= 1 else
               f"the rows that capacity {capacity:g} drops are left out of seconds")
    return Notes("About the experts (a model, not a run):", [
        f"{experts.count} experts in one of {experts.every} layers, top {experts.top}. Every "
        f"expert is assumed to get equally many tokens, and {dropped}. They are all in each "
        f"replica, divided by the scheme as any weight: no replicas divide them.",
        "Plans are screened by closed forms, in which the products of all experts are as fast as "
        "one and elementwise work is that of a model without experts; seconds and memory of the "
        "best are from dry runs, in which neither is so. Words are exact where nothing is "
        "dropped, else a bound; in 2.5d they lack sums over the layers. No lower bound is given "
        "for products in which rows have weights of their own."])
