"""Schemes at several rates of links: where each is the fastest.

`bench.records.at_rates` joins rows of a folder to such records. Files of this kind,
whose steps took turns over all plans and rates, are read as well.
"""

import math
import re
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Iterator, Sequence

import numpy as np

from bench.cases.paper import HEADINGS, title
from bench.cluster.spec import Cluster, rate_text
from bench.document import Column, Notes, Part, make_table, spread
from bench.records.kinds import named
from bench.records.measurements import Measurements
from bench.records.notes import MODELLED, counted
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme, registry

LABEL = re.compile(r"(\S+) ([\dx]+) (\S+) (\d+)(?: overlap=(\d+))?")
SCHEMAS = {
    "sweep": {
        "verified": True,
        "positive": "samples software work",
        "environment": "ranks cores emulated_cluster",
        "settings": (
            "dtype heads hidden layers preset recompute seq table waited_machine waited_scale "
            "waited_shrink"),
        "variables": {"samples": "plan link phase repetition", "work": "plan phase"},
        "optional": {"predicted": "plan link phase kind", "software": "plan link",
                     "bound": "plan link"},
        "labels": {
            "kind": [["work", "links"]],
            "phase": [["forward", "backward"]]}}}


@dataclass(frozen=True)
class SweptPlan:
    """A scheme on a grid, its directions from the slowest over the nodes to the fastest, and a
    batch; written as ``3d 4x4x4 xyz 384``, or ``3d 4x4x4 xyz 384 overlap=4``."""

    scheme: str
    grid: GridShape
    order: str
    batch: int
    overlap: int = 0

    @classmethod
    def parse(cls, label: str) -> "SweptPlan":
        """Read the label of a plan; ValueError for any other text."""
        found = LABEL.fullmatch(label)
        scheme, grid, order, batch, overlap = found.groups() if found else [""] * 5
        if scheme not in registry():
            raise ValueError(f"{label!r:.60} is no plan such as '3d 4x4x4 xyz 384'")
        known = find_scheme(scheme)
        sizes = known.grid_shape(GridShape.parse(grid, known.directions))
        if sorted(order) != sorted(sizes) or not int(batch) or overlap == "0":
            raise ValueError(f"{label!r:.60} has no order of the directions {known.directions} "
                             f"and batch")
        return cls(scheme, sizes, order, int(batch), int(overlap or 0))

    @property
    def label(self) -> str:
        """The text that `parse` reads."""
        return (f"{self.scheme} {self.grid.compact} {self.order} {self.batch}"
                + f" overlap={self.overlap}" * bool(self.overlap))

    @property
    def name(self) -> str:
        """The plan for a reader, such as "3-D 4 x 4 x 4, z inside, batch 384"; of one direction
        all ranks of a node are neighbours."""
        inside = f"{self.order[-1]} inside, " * (len(self.order) > 1)
        overlap = f"overlap {self.overlap}, " * bool(self.overlap)
        return f"{title(self.scheme)} {self.grid}, {inside}{overlap}batch {self.batch}"


def check_texts(run: Measurements) -> None:
    """Check that plans can be read, and links are rates."""
    for label in run.scales["plan"]:
        named("measurements/plan", SweptPlan.parse, str(label))
    for link in run.scales["link"]:
        if not (named("measurements/link", float, link) > 0):
            raise ValueError(f"measurements/link: {link!r:.60} is no rate")


@dataclass(frozen=True)
class SweptCurve:
    """A plan at all rates of the links."""

    plan: SweptPlan
    # Seconds a sequence of whole steps, (links, repetitions); NaN beyond those of a link.
    seconds: np.ndarray
    # Seconds a sequence that were predicted for each link, and those without links and waits.
    predicted: np.ndarray
    software: np.ndarray
    work: float    # seconds a sequence that ranks wait for their work
    # The share of a step that software may take at each link; NaN where there is no bound.
    bound: np.ndarray

    @property
    def medians(self) -> np.ndarray:
        """The median of each link."""
        return np.nanmedian(self.seconds, axis=1)

    @property
    def share(self) -> np.ndarray:
        """The share of a step that software takes at each link; NaN if it was not timed."""
        return self.software / self.medians


def read_links(record: Measurements) -> list[float]:
    """Return the rates in bit/s of a record, infinite for links without a limit."""
    return [float(link) for link in record.scales["link"]]


def read_curves(record: Measurements) -> list[SweptCurve]:
    """Read the plans of a record, with what was predicted of them before."""
    samples = record.values("samples").sum(axis=2)    # forward and backward
    work = record.values("work").sum(axis=1)
    predicted = software = bound = np.full(samples.shape[:2], np.nan)
    if "predicted" in record.variables:
        predicted = record.values("predicted").sum(axis=(2, 3))
    if "software" in record.variables:
        software = record.values("software")
    if "bound" in record.variables:
        bound = record.values("bound")
    return [SweptCurve(plan, *(each[at] / plan.batch
                               for each in (samples, predicted, software, work)), bound[at])
            for at, plan in enumerate(map(SweptPlan.parse, record.scales["plan"]))]


def crossing_rates(links: Sequence[float], one: np.ndarray, other: np.ndarray) -> list[float]:
    """Return the rates at which two curves of seconds cross.

    Between two measured rates both are taken as powers of the rate; between the greatest one and
    links without a limit the crossing has no rate, and is infinite.
    """
    ratio, found = np.log(np.asarray(one) / np.asarray(other)), []
    for (a, b), (x, y) in zip(zip(links, links[1:]), zip(ratio, ratio[1:])):
        if x * y < 0:
            found.append(math.inf if math.isinf(b) else
                         math.exp(np.interp(0.0, *zip(*sorted([(x, math.log(a)),
                                                               (y, math.log(b))])))))
    return found


def list_crossovers(record: Measurements, curves: Sequence[SweptCurve]) -> Iterator[
        tuple[float, SweptCurve, SweptCurve]]:
    """List the rates at which two plans of one batch cross.

    Yields the rate in bit/s, the plan that is faster at slower links, and the one that is faster
    from there on.
    """
    links = read_links(record)
    for at, one in enumerate(curves):
        for other in curves[at + 1:]:
            if one.plan.batch == other.plan.batch:
                first = one.medians[0] <= other.medians[0]
                for turn, rate in enumerate(crossing_rates(links, one.medians, other.medians)):
                    yield rate, *((one, other) if first == (turn % 2 == 0) else (other, one))


def rate_name(link: float) -> str:
    """Return a rate for a reader, such as "200 Mbit/s"."""
    return rate_text(None if math.isinf(link) else link, " ", "/s")


def describe_crossovers(record: Measurements, curves: Sequence[SweptCurve]) -> list[str]:
    """Say where two plans of one batch cross, and which of them is the fastest at each rate."""
    said = []
    for rate, slow, fast in sorted(list_crossovers(record, curves), key=lambda found: found[0]):
        where = "only without a limit" if math.isinf(rate) else (
            f"from {rate_name(float(f'{rate:.2g}'))} on")
        said.append(f"{fast.plan.name} overtakes {slow.plan.name} {where}.")
    links = read_links(record)
    for batch in sorted({one.plan.batch for one in curves}):
        alike = [one for one in curves if one.plan.batch == batch]
        if len(alike) > 1:
            best = [min(alike, key=lambda one: one.medians[at]).plan.name.rpartition(",")[0]
                    for at in range(len(links))]
            runs = [(name, [link for link, _ in run]) for name, run in groupby(
                zip(links, best), key=lambda found: found[1])]
            said.append(f"The fastest with batch {batch}: " + "; ".join(
                f"{' to '.join(map(rate_name, dict.fromkeys((where[0], where[-1]))))} {name}"
                for name, where in runs) + ".")
    return said or ["No two plans of one batch."]


def tables(records: Sequence[Measurements]) -> list[Part]:
    """Make the tables and notes of all sweeps."""
    parts: list[Part] = []
    for record in records:
        curves, links = read_curves(record), range(len(record.scales["link"]))
        plain = {one.plan: one for one in curves if not one.plan.overlap}
        hidden = [SweptMoment(record, one, at, whole) for one in curves if one.plan.overlap
                  if (whole := plain.get(replace(one.plan, overlap=0))) for at in links]
        parts += [
            make_table(sweep_heading(record), _seconds(record), curves),
            *([make_table(f"{sweep_heading(record)}: what overlap hides", HIDDEN, hidden)]
              if hidden else []),
            make_table(f"{sweep_heading(record)}: predictions", PREDICTIONS, [
                SweptMoment(record, one, at) for one in curves for at in links]),
            Notes("Where each is the fastest:", describe_crossovers(record, curves))]
    return [*parts, Notes("About these rates of links:", _notes(records))]


def sweep_heading(record: Measurements) -> str:
    """Return the heading of a sweep: its table, its layers and its emulated cluster."""
    cluster = Cluster.parse(str(record.environment["emulated_cluster"]))
    return (f"{HEADINGS[str(record.configuration['table'])]}, "
            f"{counted(int(record.configuration['layers']), 'layer')}: emulated cluster, "
            f"{cluster.nodes} nodes x {cluster.ranks} ranks, links of several rates; {MODELLED}")


@dataclass(frozen=True)
class SweptMoment:
    """A plan at one rate of the links; with the same plan without overlap, if it has any."""

    record: Measurements
    curve: SweptCurve
    at: int
    whole: SweptCurve | None = None

    @property
    def seconds(self) -> float:
        """The median of a sequence."""
        return self.curve.medians[self.at]

    @property
    def hidden(self) -> float:
        """The share of what could be hidden, the shorter of work and communication, that is."""
        whole = self.whole.medians[self.at]
        return (whole - self.seconds) / min(whole - self.whole.work, self.whole.work)


def _seconds(record: Measurements) -> list[Column]:
    """Describe the table of milliseconds a sequence, by plan and rate."""
    group = "ms a sequence, median"
    rates = [rate_name(link) for link in read_links(record)]
    return [Column("scheme", of=lambda one: one.plan.name),
            Column("work alone", "(waits)", group, of=lambda one: 1e3 * one.work, form=".3g"),
            *spread(lambda one: 1e3 * one.medians, ".3g", group, rates)]


FIRST = [Column("scheme", of=lambda row: row.curve.plan.name),
         Column("link", of=lambda row: rate_name(read_links(row.record)[row.at]))]
# Of a plan without overlap communication is the time that is not work.
HIDDEN = [
    *FIRST, Column("communication", "of a step without", form=".0%", of=lambda row: (
        row.whole.medians[row.at] - row.whole.work) / row.whole.medians[row.at]),
    Column("hidden of what", "could be", of=lambda row: row.hidden, form=".0%"),
    Column("times as fast", "as without", form=".2f",
           of=lambda row: row.whole.medians[row.at] / row.seconds)]
PREDICTIONS = [
    *FIRST, *spread(lambda row: [1e3 * value for value in (
        row.seconds, np.nanmin(row.curve.seconds[row.at]), np.nanmax(row.curve.seconds[row.at]),
        row.curve.predicted[row.at])], ".3g", "ms a sequence",
        ("median", "least", "greatest", "predicted")),
    Column("error of", "prediction", of=lambda row: row.curve.predicted[row.at] / row.seconds - 1,
           form="+.0%"),
    Column("share", "of work", of=lambda row: row.curve.work / row.seconds, form=".0%"),
    Column("share of", "software", of=lambda row: row.curve.share[row.at], form=".0%")]


def _waits(record: Measurements) -> str:
    """Say which seconds the ranks of a sweep waited for."""
    chosen = record.configuration
    link = Cluster.parse(str(record.environment["emulated_cluster"])).link
    ratio = "" if "rows" in chosen else (
        f": at {rate_text(link, ' ', '/s')} computing has that machine's ratio to communicating")
    return (f"{HEADINGS[str(chosen['table'])]}: ranks wait for the seconds of machine "
            f"{chosen['waited_machine']}, whose lengths are divided by "
            f"{chosen['waited_shrink']:g}, times {chosen['waited_scale']:g}{ratio}. "
            f"The waits are the same at all rates of links.")


def _notes(records: Sequence[Measurements]) -> list[str]:
    env, count = records[-1].environment, len(records[-1].scales["repetition"])
    overlap = any(SweptPlan.parse(label).overlap for one in records
                  for label in one.scales["plan"])
    how = (f"{counted(count, 'repetition')} of each, a step each, in rounds with random "
           f"order; forward and backward by their makespans.")
    if rows := records[-1].configuration.get("rows"):
        how = (f"{rows} rows, measured one after the other, {count} repetitions at most; forward "
               f"and backward by the slowest rank, over the factor by which a row is slowed.")
    return [
        *map(_waits, records),
        f"{how} All plans were verified with the serial scheme first."
        + " Fewer than six repetitions give no 95 % interval." * (count < 6),
        f"The {env['ranks']} ranks share {env['cores']} cores for all that is not waited for: "
        f"copies, sums, TCP and Python take longer than with a core for each, and where links "
        f"are fast this is what is measured. "
        f"The share of software is what a step takes without links and waits over what it takes.",
        "Predicted, and stored before the first step: the links of the cluster, shared by the "
        "ranks of a node as they are placed, and the waits, without software; nothing is fitted. "
        "Crossings are interpolated between measured rates as powers of the rate.",
        *["Predictions hide nothing: seconds of work and of communication add up, also with "
          "overlap."] * overlap]
