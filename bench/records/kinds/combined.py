"""Training steps of GPT on meshes: measured beside predicted before.

Ranks wait for modelled work on an emulated cluster, or compute.  Rows of one group have the same
model, batch, number of ranks and machine, so their seconds compare.
"""

from dataclasses import dataclass
from typing import Iterable, Sequence

import numpy as np

from bench.document import Column, Notes, Part, make_table, spread
from bench.records.kinds import Derived, medians
from bench.records.measurements import Measurements
from bench.records.notes import MODELLED, counted, describe_cluster, largest_error

SCHEMAS = {
    "combined": {
        "verified": True,
        "positive": "samples software modelled seconds",
        "environment": "ranks cores",
        "settings": (
            "batch data dtype ended_by group heads hidden layers mesh "
            "microbatches order recompute row schedule scheme seq stages vocab zero"),
        "variables": {"samples": "repetition", "words": "rank"},
        "optional": {
            "modelled": "rank", "overlapped": "rank", "predicted": "part", "slept": "rank",
            "software": "alone"},
        "needs": {
            "waited_machine": "dilation software_share waited_scale waited_shrink modelled "
                              "overlapped predicted slept software",
            "work": "preset unpredicted", "predicted_by": "predicted"},
        "labels": {"part": [["actions", "sums", "tied", "optimizer"]]},
        "derived": {"seconds": "bound", "share_of_software": ""}}}
MET = {True: "met", False: "MISSED"}
GOAL_ERROR, GOAL_CHOICE = 0.1, 0.05    # of predictions in the median, and of the planner's choice


def derive(record: Measurements) -> Derived:
    """Return the seconds of a step at undilated rates, and the share that software takes."""
    samples = record.raw["samples"].values
    found = {"seconds": (medians(samples / slowed(record)), "s")}
    if "software" in record.raw:
        found["share_of_software"] = (
            np.median(record.raw["software"].values) / np.median(samples), "1")
    return found


def slowed(record: Measurements) -> float:
    """Return the factor by which links and waits were slowed; 1 where ranks computed."""
    return float(record.configuration.get("dilation", 1.0))


@dataclass(frozen=True)
class CombinedRow:
    """A row beside the others of its group."""

    record: Measurements
    group: tuple[Measurements, ...]    # all rows of the group, by their numbers

    @property
    def seconds(self) -> float:
        """Return the measured seconds of a step, at undilated rates."""
        return float(self.record.values("seconds")[0])

    @property
    def predicted(self) -> float:
        """Return the seconds that were predicted before; NaN where nothing was."""
        found = self.record.raw.get("predicted")
        return float(found.values.sum()) if found else np.nan

    @property
    def is_predicted(self) -> bool:
        """Return whether anything was predicted."""
        return "predicted" in self.record.raw

    @property
    def waits(self) -> bool:
        """Return whether its ranks waited for modelled work."""
        return "modelled" in self.record.raw

    @property
    def error(self) -> float:
        """Return by which share of the measured seconds the prediction is too long."""
        return self.predicted / self.seconds - 1

    @property
    def work(self) -> float:
        """Return the most seconds of work of a rank, at undilated rates."""
        return float(self.record.values("modelled").max() / slowed(self.record))

    @property
    def marks(self) -> str:
        """Return "fastest", measured, and "chosen", predicted, if all rows of the group are."""
        rows = rows_of_group(self.group)
        return ", ".join(
            [*["fastest"] * (self.seconds == min(one.seconds for one in rows)),
             *["chosen"] * (self.predicted == min([one.predicted for one in rows if all(
                 other.is_predicted for other in rows)], default=None))])


def rows_of_group(group: Sequence[Measurements]) -> list[CombinedRow]:
    """Return the rows of a group."""
    return [CombinedRow(record, tuple(group)) for record in group]


def row_groups(records: Iterable[Measurements]) -> list[list[CombinedRow]]:
    """Return the rows by group and number of ranks, the latest of each, by their numbers."""
    found: dict[tuple, dict[int, Measurements]] = {}
    for record in sorted(records, key=lambda one: one.created):
        key = (record.environment["ranks"], record.configuration["group"],
               describe_cluster(record.environment), record.configuration.get("preset", ""),
               record.environment.get("cpu_model", "") * ("preset" in record.configuration))
        found.setdefault(key, {})[int(record.configuration["row"])] = record
    return [rows_of_group([rows[number] for number in sorted(rows)])
            for _, rows in sorted(found.items())]


def group_heading(rows: Sequence[CombinedRow]) -> str:
    """Return the heading of a group: its ranks, its model and its cluster."""
    chosen, env = rows[0].record.configuration, rows[0].record.environment
    experts = (f", {chosen['experts_count']} experts, top {chosen['experts_top']}"
               if "experts_count" in chosen else "")
    nodes = len(set(str(env.get("node_of_rank", "")).split()))
    where = describe_cluster(env) or ("one node" if nodes < 2 else f"{nodes} nodes")
    how = MODELLED if rows[0].waits else f"computed on {env.get('backend', 'numpy')}"
    return (f"{env['ranks']} ranks: {chosen['layers']} layers of {chosen['hidden']} features"
            f"{experts}, {chosen['batch']} x {chosen['seq']} tokens; {where}; {how}")


COLUMNS = [
    Column("mesh", align="<", of=lambda row: str(row.record.configuration["mesh"])),
    Column("predicted", "before", "seconds of a step", form=".3f", of=lambda row: (
        f"cannot tell: {why}" if (why := row.record.configuration.get("unpredicted"))
        else row.predicted)),
    *spread(lambda row: row.record.values("seconds"), ".3f", "seconds of a step",
            ("measured", "low", "high")),
    Column("error of", "prediction", of=lambda row: row.error, form="+.0%")]
OF_WAITS = [
    Column("work", "(waits)", "share", of=lambda row: row.work / row.seconds, form=".0%"),
    Column("software", "", "share",
           of=lambda row: float(row.record.values("share_of_software")), form=".0%"),
    Column("slowed", "times", of=lambda row: slowed(row.record), form=".3g")]
MARKS = [Column("", align="<", of=lambda row: row.marks)]


def tables(records: Sequence[Measurements]) -> list[Part]:
    """Make a table of each group, and notes."""
    found = row_groups(records)
    return [*(make_table(group_heading(rows), [*COLUMNS, *OF_WAITS * rows[0].waits, *MARKS], rows)
              for rows in found),
            Notes("Predictions and choices:", [
                line for kind in (True, False)
                for line in verdicts([rows for rows in found if rows[0].waits == kind])]),
            Notes("About these steps:", _notes([row for rows in found for row in rows]))]


def verdicts(found: Sequence[Sequence[CombinedRow]]) -> list[str]:
    """Say how far predictions are off, and how far the planner's choices are from the fastest."""
    every = [row for rows in found for row in rows]
    errors = [abs(row.error) for row in every if row.is_predicted]
    said, computed = [], " that computed" * any(not row.waits for row in every)
    if errors:
        said.append(
            f"{counted(len(errors), 'row')}{computed}: predictions are "
            f"{100 * np.median(errors):.0f} % off in the median, {100 * max(errors):.0f} % at "
            f"most; the goal is {100 * GOAL_ERROR:.0f} % in the median, "
            f"{MET[np.median(errors) <= GOAL_ERROR]}.")
    if len(errors) < len(every):
        said.append(f"{counted(len(every) - len(errors), 'row')}{computed}: nothing was "
                    f"predicted, and in their groups nothing is chosen.")
    for rows in found:
        if len(rows) == 1 or not all(row.is_predicted for row in rows):
            continue
        chosen = min(rows, key=lambda row: row.predicted)
        best = min(rows, key=lambda row: row.seconds)
        slower = chosen.seconds / best.seconds - 1
        env, group = rows[0].record.environment, rows[0].record.configuration["group"]
        names = [str(row.record.configuration["mesh"]) for row in (chosen, best)]
        said.append(
            f"{env['ranks']} ranks, {group}: a planner chooses {names[0]}, "
            f"{100 * slower:.0f} % slower than the fastest measured of {len(rows)}"
            f"{f', {names[1]}' * (chosen is not best)}; the goal is {100 * GOAL_CHOICE:.0f} %, "
            f"{MET[slower <= GOAL_CHOICE]}.")
    return said


def _notes(rows: Sequence[CombinedRow]) -> list[str]:
    count = min(len(row.record.scales["repetition"]) for row in rows)
    return [
        f"A step is forward, backward and AdamW, from the first rank's begin to the last one's "
        f"end, divided by the factor by which links and waits are slowed; at least {count} "
        f"repetitions. Fewer than six give no 95 % interval.",
        *_notes_of_waits([row for row in rows if row.waits]),
        *_notes_of_computing([row for row in rows if not row.waits]),
        f"Verified before, on computing ranks: the losses of two steps with AdamW between them "
        f"and all gradients by the serial scheme; "
        f"{largest_error(check for row in rows for check in row.record.checks)}."]


def _notes_of_waits(rows: Sequence[CombinedRow]) -> list[str]:
    if not rows:
        return []
    chosen, env = rows[-1].record.configuration, rows[-1].record.environment
    allowed: dict[float, list[CombinedRow]] = {}
    for row in rows:
        allowed.setdefault(float(row.record.configuration["software_share"]), []).append(row)
    shares = [_above(share, some) for share, some in sorted(allowed.items())]
    return [
        f"Ranks wait for the seconds of machine {chosen['waited_machine']}, whose lengths are "
        f"divided by {chosen['waited_shrink']:g}, times {chosen['waited_scale']:g}: for every "
        f"product and elementwise pass of layers, embedding, head, loss, gradients and optimizer, "
        f"as many as in a dry run of the rank. Between experts tokens are divided equally. Not "
        f"waited for: comparisons of arguments between ranks, sums inside MPI, and copies, which "
        f"are software.",
        f"Software is a step without links and waits, on {env['cores']} cores that all ranks "
        f"share. It is allowed {'; '.join(shares)}.",
        "Predicted, and stored before the first step: links of the cluster, shared by the ranks "
        "of a node, and the waits, without software; nothing is fitted."]


def _above(share: float, rows: Sequence[CombinedRow]) -> str:
    """Say in how many of the rows with this allowed share of software it takes more."""
    above = sum(float(row.record.values("share_of_software")) > share for row in rows)
    ranks = ", ".join(dict.fromkeys(str(row.record.environment["ranks"]) for row in rows))
    return (f"{100 * share:g} % of a step on {ranks} ranks, and takes more in {above} of "
            f"{counted(len(rows), 'row')}")


def _notes_of_computing(rows: Sequence[CombinedRow]) -> list[str]:
    if not rows:
        return []
    names = dict.fromkeys(str(row.record.configuration["predicted_by"]) for row in rows
                          if row.is_predicted)
    notes = ["Ranks computed, with the links that there are. Of preset paper a model with hidden "
             "size and sequence length divided by 32 was verified on the same mesh."]
    return notes + [f"Predicted, and printed before the first step: by machine "
                    f"{', '.join(names)}, with as many ranks a node as there were."] * bool(names)
