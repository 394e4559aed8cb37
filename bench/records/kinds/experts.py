"""A layer of experts beside others, its parts, and how tokens were routed."""

import numpy as np

from bench.document import Column, Notes, Part, make_table, spread
from bench.records.kinds import Derived, each, medians
from bench.records.measurements import Measurements, Place, list_places
from bench.records.notes import counted, equal_rate_notes, largest_error
from mm3d.model.experts.totals import utilisation_entropy

EXPERT_KINDS = ["layer", "grouped products", "one product", "PyTorch loop", "PyTorch padded",
                "PyTorch grouped"]
SCHEMAS = {
    "experts": {
        "verified": True,
        "positive": "ratio samples seconds share_of_one_product",
        "environment": "ranks cores",
        "settings": (
            "balance batch bias_rate convention count dtype ended_by every gate grid hidden "
            "reference replicas scheme seq top transport wide z"),
        "variables": {
            "balance_loss": "routing", "dropped": "routing expert",
            "expected_words": "routing rank", "gathered": "routing",
            "inside_words": "routing rank", "part_samples": "routing phase part rank repetition",
            "samples": "routing kind repetition", "tokens": "routing choice expert",
            "words": "routing rank"},
        "derived": {
            "bandwidth": "routing", "dropped_share": "routing", "entropy": "routing",
            "part_seconds": "routing phase part bound", "ratio": "routing kind bound",
            "seconds": "routing kind bound", "share_of_one_product": "routing bound"},
        "labels": {
            "kind": [EXPERT_KINDS[:count] for count in (3, 5, 6)],
            "phase": [["forward", "backward"]]}}}


def derive(record: Measurements) -> Derived:
    """Compute seconds and ratios, seconds of parts, and statistics of the routing."""
    samples, tokens, dropped, words = (record.raw[name].values for name in (
        "samples", "tokens", "dropped", "words"))
    parts = medians(record.raw["part_samples"].values.max(axis=3))
    item = np.dtype(record.configuration["dtype"]).itemsize
    sending = [list(record.scales["part"]).index(name) for name in ("dispatch", "combine")]
    # Bytes a second between replicas, of the rank that sends most.  The parts order rows and add
    # them up, too.
    bandwidth = item * words.max(axis=1) / parts[:, :, sending, 0].sum((1, 2))
    return {
        "seconds": (medians(samples), "s"), "ratio": (medians(samples / samples[:, :1]), "1"),
        "share_of_one_product": (medians(samples[:, 2] / samples[:, 1]), "1"),
        "part_seconds": (parts, "s"),
        "dropped_share": (dropped.sum(1) / tokens.sum((1, 2)), "1"),
        "entropy": ([utilisation_entropy(one) for one in tokens], "1"),
        "bandwidth": (np.where(bandwidth > 0, bandwidth, np.nan), "byte s-1")}


@each
def tables(record: Measurements) -> list[Part]:
    """Make the tables of times, of parts, and of how the tokens were routed."""
    chosen, routings = record.configuration, list_places(record, "routing")
    title = (f"A layer of {chosen['count']} experts, forward and backward: {chosen['batch']} x "
             f"{chosen['seq']} tokens of {chosen['hidden']} features, top {chosen['top']}")
    return [make_table(title, _times(record), routings),
            make_table("Its parts, of the slowest rank", _parts(record), routings),
            make_table("How the tokens were routed, and what was sent", ROUTED, routings),
            Notes("About these times:", _notes(record) + _kernels(record))]


ROUTING = Column("routing", of=lambda at: at["routing"])


def _times(record: Measurements) -> list[Column]:
    """Describe the table of the layer beside PyTorch and its products."""
    sure = f"{100 * record.values('share_of_one_product')[..., 3].min():.0f} %"
    units = ("", sure, sure)
    columns = [ROUTING, Column("layer", "(s)", of=lambda at: at("seconds")[0, 0], form=".4f")]
    for k, name in enumerate(record.scales["kind"]):
        if k > 2:
            columns += spread(lambda at, k=k: at("ratio")[k], ".3f", f"{name} / layer",
                              units=units)
    return columns + spread(lambda at: at("share_of_one_product"), ".3f",
                            "one product / grouped", units=units)


def _parts(record: Measurements) -> list[Column]:
    """Describe the table of the parts, by phase."""
    return [ROUTING, *(Column(
        at["part"], "(ms)", at["phase"], form=".2f", of=lambda row, at=at: (
            1e3 * record.values("part_seconds", **row.at, **at.at)[0]))
        for at in list_places(record, "phase", "part"))]


def _way(at: Place) -> str:
    """Say how rows travelled between replicas."""
    chosen = at.record.configuration
    if chosen.get("expert_parallel", chosen["replicas"]) == 1:
        return "none"
    return "gather" if at("gathered") else "exchange"


PAIRS, SENT = "pairs of an expert", "words between replicas"
ROUTED = [
    ROUTING, Column("fewest", "", PAIRS, of=lambda at: int(at("tokens").sum(0).min())),
    Column("most", "", PAIRS, of=lambda at: int(at("tokens").sum(0).max())),
    Column("entropy", of=lambda at: at("entropy"), form=".3f"),
    Column("dropped", "(%)", of=lambda at: 100 * at("dropped_share"), form=".1f"),
    Column("balance", "loss", of=lambda at: at("balance_loss"), form=".3g"),
    Column("counted", "", SENT, of=lambda at: int(at("words").sum())),
    Column("closed form", "", SENT, of=lambda at: int(at("expected_words").sum())),
    Column("way", "", SENT, of=_way),
    Column("bandwidth", "(GB/s)", of=lambda at: at("bandwidth") / 1e9, form=".3g")]


def _kernels(record: Measurements) -> list[str]:
    """Say how fast both sides multiply, and what could not be measured."""
    first = record.scales["routing"][0]
    seconds, ratio = (record.values(name)[0, :, 0] for name in ("seconds", "ratio"))
    left_out = str(record.configuration.get("left_out", ""))
    return [*equal_rate_notes(record, {f"{kind}, {first}": (seconds[n], ratio[n])
                                       for n, kind in enumerate(record.scales["kind"]) if n > 2}),
            *[f"Not measured: {left_out}."] * bool(left_out)]


def _notes(record: Measurements) -> list[str]:
    """Say what the tables show, and where they were measured."""
    chosen, env = record.configuration, record.environment
    capacity, replicas = chosen.get("capacity"), chosen["replicas"]
    parts = chosen.get("expert_parallel", replicas)
    return [
        f"{chosen['dtype']}, gate {chosen['gate']}, "
        f"{'nothing is dropped' if capacity is None else f'capacity {capacity:g}'}; "
        f"{counted(replicas, 'replica')} of {chosen['scheme']} {chosen['grid']}"
        + f", experts divided among each {parts}" * (parts != replicas) + f", transport "
        f"{chosen['transport']}; {env['ranks']} ranks on {env['cores']} cores, "
        f"{env.get('cpu_model', '')}; {len(record.scales['repetition'])} repetitions, ended by "
        f"{chosen['ended_by']}; {chosen['reference']}; verified, "
        f"{largest_error(record.checks)}.",
        "Layer: a step without the sum of gradients over replicas and without an optimizer; "
        "makespans. Low and high: of the medians, with the confidence in per cent; fewer than six "
        "repetitions give less than 95 %. PyTorch: one process with all cores, by autograd, with "
        "the same losses of the router; loop: the rows of one expert after the other; padded: "
        "batched products" + "; grouped: its own grouped products" * (
            "PyTorch grouped" in record.scales["kind"]) + ".",
        "One product / grouped: the first product of the experts alone, in the time of one "
        "product of as many rows with one weight, over the time by experts.",
        "Parts contain the waiting for other ranks in their collectives. Router: logits, choice, "
        "counts of all ranks and the plan; dispatch and combine: rows to experts and back, with "
        "their order and sums; in backward the gradients of the same.",
        "Bandwidth: bytes that the busiest rank sends to other replicas over the seconds of "
        "dispatch and combine. Entropy: of the experts' shares, over that of equal ones."]
