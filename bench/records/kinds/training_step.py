"""A training step: the speed of each side, and where mm3d's time goes."""

import numpy as np

from bench.document import Column, Notes, Part, make_table, spread
from bench.records.kinds import Derived, each, medians
from bench.records.measurements import Measurements, Place, list_places
from bench.records.notes import (CROWDED, counted, describe_libraries, equal_rate_notes,
                                 first_grid, largest_error)
from bench.statistics import elapsed

SCHEMAS = {
    "training-step": {
        "verified": True,
        "positive": "ratio seconds tokens_per_second",
        "spent": "part_seconds",
        "signed": "part_seconds",
        "environment": "ranks cores oversubscribed blas blas_architecture",
        "settings": (
            "batch data dtype ended_by grid heads hidden layers lr mesh microbatches optimizer "
            "recompute schedule scheme seq stage_grids stages torch transport vocab weight_decay "
            "zero"),
        "variables": {
            "loss": "repetition side", "part_seconds": "rank traced part",
            "times": "repetition side rank edge"},
        "derived": {
            "ratio": "side bound", "seconds": "side bound",
            "tokens_per_second": "side bound"}}}


def derive(record: Measurements) -> Derived:
    """Return seconds and tokens per second of each side, and its seconds over mm3d's."""
    tokens = int(record.configuration["batch"]) * int(record.configuration["seq"])
    spans = elapsed(record.raw["times"].values).T    # (side, repetition)
    return {"seconds": (medians(spans), "s"), "ratio": (medians(spans / spans[0]), "1"),
            "tokens_per_second": (medians(tokens / spans), "s-1")}


@each
def tables(record: Measurements) -> list[Part]:
    """Make the tables: the speed of each side, and where mm3d's time goes."""
    return [make_table("A training step", COLUMNS, list_places(record, "side")),
            make_table("Where the time goes", PARTS, list_places(record, "part")),
            Notes("About this step:", _notes(record))]


def _part(at: Place) -> np.ndarray:
    """Return the median seconds of a part on each rank."""
    return np.median(at("part_seconds"), axis=1)


def _share(at: Place) -> float:
    whole = np.median(at.record.values("part_seconds").sum(axis=2), axis=1)
    return _part(at).mean() / whole.mean()


COLUMNS = [
    Column("side", align="<", of=lambda at: at["side"]),
    Column("step", "(s)", of=lambda at: at("seconds")[0], form=".3f"),
    *spread(lambda at: at("tokens_per_second"), ".0f", "tokens a second"),
    *spread(lambda at: at("ratio") if at.at["side"] else [np.nan] * 3, ".2f",
            "mm3d is so many times as fast")]
PARTS = [
    Column("part of mm3d's step", align="<", of=lambda at: at["part"]),
    Column("mean (s)", "", "of the ranks", of=lambda at: _part(at).mean(), form=".3f"),
    Column("most (s)", "", "of the ranks", of=lambda at: _part(at).max(), form=".3f"),
    Column("share", of=_share, form=".2f")]


def _notes(record: Measurements) -> list[str]:
    chosen, env = record.configuration, record.environment
    notes = [
        f"{counted(chosen['layers'], 'layer')}, hidden {chosen['hidden']}, "
        f"{counted(chosen['heads'], 'head')}, vocabulary {chosen['vocab']}, tied; a batch of "
        f"{chosen['batch']} x {chosen['seq']} "
        f"random tokens; AdamW, {chosen['dtype']}. {len(record.scales['repetition'])} "
        f"repetitions, ended by {chosen['ended_by']}.",
        f"mm3d: {chosen['mesh'] or chosen['scheme']}, grid "
        f"{first_grid(chosen)}, transport {chosen['transport']}; "
        f"{env['ranks']} ranks on {env['cores']} cores, "
        f"{describe_libraries(env)}.",
        "A step is forward, backward and optimizer, from the first rank's begin to the last "
        "one's end; the sides take turns in random order, asleep while another works.",
        f"Verified before: mm3d's loss and gradient by a model in NumPy, float64; the losses of "
        f"the first steps and the norm of the first gradient on all sides, and the losses after "
        f"the last repetition; {largest_error(record.checks)}.",
        "Parts are of other steps, in which each product and each collective within a stage's "
        "grid is timed. Rest: elementwise work, Python, and what moves between stages and "
        "replicas."]
    if chosen["torch"] != "none":
        notes.append(f"Beside: {chosen['torch']}.")
        seconds, ratio = (record.values(name)[:, 0] for name in ("seconds", "ratio"))
        notes += equal_rate_notes(record, {str(side): (seconds[n], ratio[n]) for n, side
                                           in enumerate(record.scales["side"]) if n})
    if env["oversubscribed"]:
        notes.append(CROWDED)
    return notes
