"""Make the tables of a measured layer of experts."""

import numpy as np

from bench.records.measurements import Measurements
from bench.reports.document import Column, Notes, Part, Rows, Table, number_cell
from bench.reports.layer_table import equal_rate_notes


def experts_parts(record: Measurements) -> list[Part]:
    """Make the tables of times, of parts, and of how the tokens were routed."""
    found = {name: variable.values for name, variable in record.variables.items()}
    return [_times(record, found), _parts_of(record, found), _routed(record, found),
            Notes("About these times:", _notes(record) + _kernels(record, found))]


def _times(record: Measurements, found: dict[str, np.ndarray]) -> Table:
    """Make the table of the layer beside PyTorch and its products."""
    others = list(record.scales["kind"])[3:]
    sure = f"{100 * found['share_of_one_product'][..., 3].min():.0f} %"
    columns = [Column("routing"), Column("layer", "(s)")]
    for name in others:
        columns += [Column("median", "", f"{name} / layer"),
                    Column("low", sure, f"{name} / layer"),
                    Column("high", sure, f"{name} / layer")]
    group = "one product / grouped"
    columns += [Column("median", "", group), Column("low", sure, group),
                Column("high", sure, group)]
    rows: Rows = []
    for r, routing in enumerate(record.scales["routing"]):
        ratios = [*found["ratio"][r, 3:, :3].ravel(), *found["share_of_one_product"][r, :3]]
        rows.append([routing, number_cell(found["seconds"][r, 0, 0], ".4f"),
                     *(number_cell(value, ".3f") for value in ratios)])
    chosen = record.configuration
    return Table(f"A layer of {chosen['count']} experts, forward and backward: {chosen['batch']} "
                 f"x {chosen['seq']} tokens of {chosen['hidden']} features, top "
                 f"{chosen['top']}", columns, rows)


def _parts_of(record: Measurements, found: dict[str, np.ndarray]) -> Table:
    """Make the table of the parts, by phase."""
    phases, parts = record.scales["phase"], record.scales["part"]
    columns = [Column("routing")] + [Column(part, "(ms)", phase) for phase in phases
                                     for part in parts]
    rows: Rows = [[routing, *(number_cell(1e3 * value, ".2f")
                              for value in found["part_seconds"][r, :, :, 0].ravel())]
                  for r, routing in enumerate(record.scales["routing"])]
    return Table("Its parts, of the slowest rank", columns, rows)


def _routed(record: Measurements, found: dict[str, np.ndarray]) -> Table:
    """Make the table of balance and words."""
    rows: Rows
    columns = [Column("routing"), Column("fewest", "", "pairs of an expert"),
               Column("most", "", "pairs of an expert"), Column("entropy"),
               Column("dropped", "(%)"), Column("balance", "loss"),
               Column("counted", "", "words between replicas"),
               Column("closed form", "", "words between replicas"),
               Column("way", "", "words between replicas"), Column("bandwidth", "(GB/s)")]
    chosen, rows = record.configuration, []
    for r, routing in enumerate(record.scales["routing"]):
        got = found["tokens"][r].sum(0)
        rows.append([routing, int(got.min()), int(got.max()),
                     number_cell(found["entropy"][r], ".3f"),
                     number_cell(100 * found["dropped_share"][r], ".1f"),
                     number_cell(found["balance_loss"][r], ".3g"),
                     int(found["words"][r].sum()), int(found["expected_words"][r].sum()),
                     ("gather" if found["gathered"][r] else "exchange")
                     if chosen.get("expert_parallel", chosen["replicas"]) > 1 else "none",
                     number_cell(found["bandwidth"][r] / 1e9, ".3g")])
    return Table("How the tokens were routed, and what was sent", columns, rows)


def _kernels(record: Measurements, found: dict[str, np.ndarray]) -> list[str]:
    """Say how fast both sides multiply, and what could not be measured."""
    first, kinds = record.scales["routing"][0], list(record.scales["kind"])
    seconds = found["seconds"][0, :, 0]
    left_out = str(record.configuration.get("left_out", ""))
    return [*equal_rate_notes(record, {f"{kind}, {first}": (seconds[n], seconds[0])
                                       for n, kind in enumerate(kinds) if n > 2}),
            *[f"Not measured: {left_out}."] * bool(left_out)]


def _notes(record: Measurements) -> list[str]:
    """Say what the tables show, and where they were measured."""
    chosen, env = record.configuration, record.environment
    worst = max((check.error / check.tolerance for check in record.checks if check.tolerance),
                default=0.0)
    capacity, replicas = chosen.get("capacity"), chosen["replicas"]
    parts = chosen.get("expert_parallel", replicas)
    return [
        f"{chosen['dtype']}, gate {chosen['gate']}, "
        f"{'nothing is dropped' if capacity is None else f'capacity {capacity:g}'}; "
        f"{replicas} replicas of {chosen['scheme']} {chosen['grid']}"
        + f", experts divided among each {parts}" * (parts != replicas) + f", transport "
        f"{chosen['transport']}; {env['ranks']} ranks on {env['cores']} cores, "
        f"{env.get('cpu_model', '')}; {len(record.scales['repetition'])} repetitions, ended by "
        f"{chosen['ended_by']}; {chosen['reference']}; verified, errors at most "
        f"{100 * worst:.2g} % of the tolerance.",
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
