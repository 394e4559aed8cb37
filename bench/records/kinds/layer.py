"""A layer beside its local products, and PyTorch's or ColossalAI's."""

import math
from typing import Callable, Sequence

from bench.document import Column, Notes, Part, make_table, spread
from bench.records.kinds import Derived, medians
from bench.records.measurements import Measurements, Place, list_places
from bench.records.notes import (counted, describe_cluster, describe_libraries,
                                 equal_rate_notes, largest_error)
from bench.statistics import elapsed
from mm3d import ModelSizes
from mm3d.model import cost

SCHEMAS = {
    "layer": {
        "verified": True,
        "positive": "expected_memory flops ratio seconds",
        "signed": "hidden memory",
        "environment": "ranks cores blas blas_architecture",
        "settings": "batch dtype ended_by grid heads hidden layers reference scheme seq transport",
        "variables": {
            "expected_memory": "", "hidden": "", "memory": "account rank",
            "times": "repetition kind rank edge"},
        "optional": dict.fromkeys(("calls", "words", "saved"), "side rank"),
        "derived": {"flops": "", "ratio": "kind bound", "seconds": "kind bound"},
        "labels": {"kind": [["layer", "local products", beside, "layer with overlap"]
                            for beside in ("PyTorch", "ColossalAI")]}}}


def derive(record: Measurements) -> Derived:
    """Return seconds by kind, their ratios to those of the layer, and its operations."""
    spans = elapsed(record.raw["times"].values).T    # (kind, repetition)
    sizes = ModelSizes.from_settings(record.configuration)
    return {"seconds": (medians(spans), "s"), "ratio": (medians(spans / spans[0]), "1"),
            "flops": (sum(cost.flops(sizes).values()), "1")}


def tables(records: Sequence[Measurements]) -> list[Part]:
    """Make one table of all records, a row for each layer."""
    rows = [at for record in sorted(records, key=lambda record: record.configuration["hidden"])
            for at in list_places(record)]
    beside = any(at["reference"] != "none" for at in rows)
    title = "One Transformer layer, forward and backward" + ", beside another library" * beside
    columns = [*COLUMNS, *SAVED * any("saved" in one.raw for one in records)]
    return [make_table(title, columns, rows), Notes("About these layers:", _notes(records))]


def _took(kind: int) -> Callable[[Place], float]:
    """Return a function that reads the median seconds of a kind."""
    return lambda at: at("seconds")[kind, 0]


def _peak(account: int) -> Callable[[Place], float]:
    """Return a function that reads the megabytes of the fullest rank, by an account."""
    return lambda at: at("memory")[account].max() / 1e6


def _counted(name: str, side: int, unit: float = 1.0) -> Callable[[Place], float]:
    """Return a function that reads the mean over the ranks of what a side counted, if it did."""
    def read(at: Place) -> float:
        found = at.record.raw.get(name)
        return found.values[side].mean() / unit if found and len(found.values) > side else math.nan
    return read


COUNTED = "calls and words of a rank, mean"
OVERLAP, PEAK = "with overlap", "peak memory of a rank"
KEPT = "saved for backward, mean"
COLUMNS = [
    Column("hidden", of=lambda at: int(at["hidden"])),
    Column("", "scheme, grid", of=lambda at: f"{at['scheme']} {at['grid']}"),
    Column("keep", of=lambda at: str(at.record.configuration.get("keep", "-"))),
    Column("layer", "(s)", of=_took(0), form=".3f"),
    Column("rate", "(GFLOP/s)", of=lambda at: at("flops") / _took(0)(at) / 1e9, form=".1f"),
    Column("products", "alone (s)", of=_took(1), form=".3f"),
    Column("beside", of=lambda at: (
        str(at.record.scales["kind"][2]) if at["reference"] != "none" else "-")),
    Column("other", "(s)", of=_took(2), form=".3f"),
    *spread(lambda at: at("ratio")[2], ".3f", "other / layer", units=("", "95 %", "95 %")),
    Column("calls", "", COUNTED, of=_counted("calls", 0), form=".1f"),
    Column("of other", "", COUNTED, of=_counted("calls", 1), form=".1f"),
    Column("words", "", COUNTED, of=_counted("words", 0), form=".0f"),
    Column("of other", "", COUNTED, of=_counted("words", 1), form=".0f"),
    Column("time", "(s)", OVERLAP, of=_took(3), form=".3f"),
    Column("ratio", "", OVERLAP, of=lambda at: at("ratio")[3, 0], form=".3f"),
    Column("hidden", "share", OVERLAP, of=lambda at: at("hidden"), form=".2f"),
    Column("counted", "(MB)", PEAK, of=_peak(0), form=".1f"),
    Column("closed form", "(MB)", PEAK, of=lambda at: at("expected_memory") / 1e6, form=".1f"),
    Column("ratio", "", PEAK, of=lambda at: at("memory")[0].max() / float(at("expected_memory")),
           form=".3f"),
    Column("resident", "(MB)", PEAK, of=_peak(1), form=".1f")]
SAVED = [Column("of a rank", "(MB)", KEPT, of=_counted("saved", 0, 1e6), form=".3g"),
         Column("of other", "(MB)", KEPT, of=_counted("saved", 1, 1e6), form=".3g")]


def _notes(records: Sequence[Measurements]) -> list[str]:
    found = []
    for record in records:
        chosen, env = record.configuration, record.environment
        found.append(
            f"hidden {chosen['hidden']}: {chosen['batch']} sequences of {chosen['seq']}, "
            f"{counted(chosen['heads'], 'head')}, {chosen['dtype']}; "
            f"{counted(len(record.scales['repetition']), 'repetition')}, ended by "
            f"{chosen['ended_by']}; reference {chosen['reference']}; "
            f"transport {chosen['transport']}; {env['ranks']} ranks on {env['cores']} cores, "
            + ", ".join(filter(None, [describe_cluster(env), describe_libraries(env)]))
            + f"; verified, {largest_error(record.checks)}.")
        library = str(record.scales["kind"][2])
        found += equal_rate_notes(record, {library: tuple(
            record.values(name)[2, 0] for name in ("seconds", "ratio"))}, library=library)
    return found + [
        "Times are makespans.  Products alone: the local matrix products of the linear layers, "
        "without communication, attention's own and everything else.",
        "With overlap: sums of gradients over the ranks, gathers of weights, and those of inputs "
        "that backward repeats, go on while ranks multiply; ratio: to the layer without; hidden: "
        "of the time of these collectives.",
        "Rate: floating-point operations of all matrix products; scores that backward computes "
        "again are not counted."]
