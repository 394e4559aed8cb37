"""Efficiency of a distributed product beside one process that uses all cores."""

import math
from typing import Mapping, Sequence

import numpy as np

from bench.document import Column, Notes, Part, make_table, spread
from bench.records.kinds import Derived, medians
from bench.records.kinds.products import copied_operands
from bench.records.measurements import Measurements, Place, Setting, grid_shape, list_places
from bench.records.notes import counted, describe_machine, largest_error, words_note
from bench.statistics import elapsed
from mm3d.model import cost

SCHEMAS = {
    "matmul": {
        "verified": True,
        "positive": "ceiling efficiency flops seconds share_of_the_ceiling",
        "environment": "cores",
        "settings": (
            "K M N calls dtype ended_by form grid one_process_cores one_process_threads scheme "
            "transport"),
        "variables": {"times": "phase repetition kind rank edge", "words": "phase rank"},
        "derived": {
            "ceiling": "phase bound", "efficiency": "phase bound", "flops": "phase",
            "least_words": "phase", "seconds": "phase kind bound",
            "share_of_the_ceiling": "phase bound"},
        "labels": {
            "phase": [["forward"], ["forward", "backward"]],
            "kind": [["product", "local products", "one process"]]}}}

RESULTS = {"forward": ("C",), "backward": ("dA", "dB")}
RATIOS = {"efficiency": (2, 0), "ceiling": (2, 1), "share_of_the_ceiling": (1, 0)}    # of kinds


def derive(record: Measurements) -> Derived:
    """Return seconds a call by phase and kind, their ratios, operations and the lower bound."""
    spans = elapsed(record.raw["times"].values).swapaxes(1, 2)    # (phase, kind, repetition)
    sizes = [record.configuration[name] for name in "MNK"]
    products = np.array([len(RESULTS[phase]) for phase in record.scales["phase"]])
    return {
        "seconds": (medians(spans), "s"),
        "flops": (products * 2 * np.prod(sizes, dtype=np.int64), "1"),
        "least_words": (products * cost.lower_bound(*sizes, len(record.scales["rank"])), "1"),
        **{name: (medians(spans[:, above] / spans[:, below]), "1")
           for name, (above, below) in RATIOS.items()}}


def tables(records: Sequence[Measurements]) -> list[Part]:
    """Make one table of all records."""
    return [make_table("Distributed matrix products beside one process with all cores", COLUMNS,
                       [at for record in records for at in list_places(record, "phase")]),
            Notes("About these products:", _notes(records))]


def _over_bound(at: Place) -> float:
    """Return the words over the bound; NaN where it is 0, or an operand has copies."""
    least = at("least_words")
    return at("words").max() / least if least > 0 and not _copied(at) else math.nan


def _copied(at: Place) -> list[str]:
    return copied_operands(at["scheme"], at["form"], grid_shape(at.record.configuration),
                           at["phase"])


def _product(chosen: Mapping[str, Setting] | Place) -> str:
    return f"{chosen['form']} {chosen['M']} x {chosen['N']} x {chosen['K']}"


COLUMNS = [
    Column("", "product", of=_product), Column("", "dtype", of=lambda at: at["dtype"]),
    Column("", "scheme, grid", of=lambda at: f"{at['scheme']} {at['grid']}"),
    Column("", "transport", of=lambda at: at["transport"]),
    Column("", "phase", of=lambda at: at["phase"]),
    Column("time", "(ms)", of=lambda at: 1e3 * at("seconds")[0, 0], form="#.4g"),
    Column("rate", "(GFLOP/s)", of=lambda at: at("flops") / at("seconds")[0, 0] / 1e9,
           form=".1f"),
    Column("one process", "(ms)", of=lambda at: 1e3 * at("seconds")[2, 0], form="#.4g"),
    *spread(lambda at: at("efficiency"), ".3f", "efficiency", units=("", "95 %", "95 %")),
    Column("ceiling", of=lambda at: at("ceiling")[0], form=".3f"),
    Column("of the", "ceiling", of=lambda at: at("share_of_the_ceiling")[0], form=".3f"),
    Column("words", "counted", of=lambda at: int(at("words").max())),
    Column("over the", "bound", of=_over_bound, form=".3f")]


def _notes(records: Sequence[Measurements]) -> list[str]:
    """State how the products were measured, and warn of references that were not fair."""
    notes = []
    for record in records:
        chosen, cores = record.configuration, record.environment["cores"]
        notes.append(f"{_product(chosen)} {chosen['dtype']}, {chosen['scheme']} {chosen['grid']}, "
                     f"transport {chosen['transport']}: "
                     f"{counted(len(record.scales['repetition']), 'repetition')} of "
                     f"{counted(chosen['calls'], 'call')}, ended by {chosen['ended_by']}; one "
                     f"process with {counted(chosen['one_process_threads'], 'thread')}; verified, "
                     f"{largest_error(record.checks)}.")
        if chosen["one_process_threads"] < cores:
            notes.append(f"WARNING: BLAS takes {counted(chosen['one_process_threads'], 'thread')} "
                         f"at most, of {cores} cores: no fair reference.")
        if chosen["one_process_cores"] < cores:
            notes.append(f"WARNING: the one process was bound to {chosen['one_process_cores']} of "
                         f"{cores} cores: no fair reference.")
    notes.append("Times are makespans a call. Efficiency: one process / product; ceiling: one "
                 "process / the local products without communication.")
    notes.append(words_note(record.configuration["transport"] for record in records)
                 + " They are the busiest rank's.")
    places = [at for record in records for at in list_places(record, "phase")]
    if any(map(_copied, places)):
        notes.append("No bound where an operand has copies before the product: it is for operands "
                     "that are stored once.")
    if any(at["phase"] == "backward" for at in places):
        notes.append("The bound of backward is that of its two products apart, which share dC: "
                     "fewer words are possible.")
    return notes + list(dict.fromkeys(f"{describe_machine(record)}." for record in records))
