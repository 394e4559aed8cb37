"""Make the tables of schemes at several rates of links: where each is the fastest."""

import math
from dataclasses import dataclass
from itertools import groupby
from typing import Iterator, Sequence

import numpy as np

from bench.cases.paper import HEADINGS, TITLES
from bench.cluster.spec import Cluster, RATES, format_unit
from bench.records.measurements import Measurements
from bench.reports import emulated
from bench.reports.document import Column, Notes, Part, Rows, Table, number_cell


@dataclass(frozen=True)
class Curve:
    """A plan at all rates of the links.

    Attributes
    ----------
    label : str
        Its label in the record, such as ``3d 4x4x4 xyz 384``.
    seconds : ndarray
        Seconds a sequence of whole steps, (links, repetitions).
    predicted : ndarray
        Predicted seconds a sequence, of each link.
    work, software : float
        Seconds a sequence that ranks wait for their work, and those without links and waits.
    """

    label: str
    seconds: np.ndarray
    predicted: np.ndarray
    work: float
    software: float

    @property
    def medians(self) -> np.ndarray:
        """The median of each link."""
        return np.median(self.seconds, axis=1)

    @property
    def batch(self) -> int:
        """The batch."""
        return parse_label(self.label).batch

    @property
    def name(self) -> str:
        """Scheme, grid, placement and batch for a reader, such as "3-D 4 x 4 x 4, z inside, batch
        384"; of one direction all ranks of a node are neighbours."""
        plan = parse_label(self.label)
        inside = f"{plan.order[-1]} inside, " * (len(plan.order) > 1)
        overlap = f"overlap {plan.overlap}, " * bool(plan.overlap)
        return (f"{TITLES.get(plan.scheme, plan.scheme)} {plan.grid.replace('x', ' x ')}, "
                f"{inside}{overlap}batch {plan.batch}")


@dataclass(frozen=True)
class PlanLabel:
    """What the label of a plan says, see `bench.experiments.rows.link_sweep.ReadyPlan.label`."""

    scheme: str
    grid: str
    order: str
    batch: int
    overlap: int


def parse_label(label: str) -> PlanLabel:
    """Read the label of a plan."""
    scheme, grid, order, batch, *more = label.split()
    return PlanLabel(scheme, grid, order, int(batch),
                     int(more[0].removeprefix("overlap=")) if more else 0)


def read_links(record: Measurements) -> list[float]:
    """Return the rates in bit/s of a record, infinite for links without a limit."""
    return [float(link) for link in record.scales["link"]]


def read_curves(record: Measurements) -> list[Curve]:
    """Read the plans of a record, with what was predicted of them before."""
    samples = record.variables["samples"].values.sum(axis=2)    # forward and backward
    work = record.variables["work"].values.sum(axis=1)
    missing = np.full(samples.shape[:2], np.nan)
    software = (np.median(record.variables["software"].values.sum(axis=1), axis=-1)
                if "software" in record.variables else missing[:, 0])
    predicted = (record.variables["predicted"].values.sum(axis=(2, 3))
                 if "predicted" in record.variables else missing)
    found = []
    for at, label in enumerate(record.scales["plan"]):
        batch = parse_label(label).batch
        found.append(Curve(label, samples[at] / batch, predicted[at] / batch,
                           work[at] / batch, software[at] / batch))
    return found


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


def list_crossovers(record: Measurements,
                    curves: Sequence[Curve]) -> Iterator[tuple[float, Curve, Curve]]:
    """List the rates at which two plans of one batch cross.

    Yields
    ------
    float
        The rate in bit/s.
    Curve, Curve
        The plan that is faster at slower links, and the one that is faster from there on.
    """
    links = read_links(record)
    for at, one in enumerate(curves):
        for other in curves[at + 1:]:
            if one.batch == other.batch:
                first = one.medians[0] <= other.medians[0]
                for turn, rate in enumerate(crossing_rates(links, one.medians, other.medians)):
                    yield rate, *((one, other) if first == (turn % 2 == 0) else (other, one))


def rate_name(link: float) -> str:
    """Return a rate for a reader, such as "200 Mbit/s"."""
    return "unlimited" if math.isinf(link) else f"{format_unit(link, RATES, ' ')}/s"


def describe_crossovers(record: Measurements, curves: Sequence[Curve]) -> list[str]:
    """Say where two plans of one batch cross, and which of them is the fastest at each rate."""
    said = []
    for rate, slow, fast in sorted(list_crossovers(record, curves), key=lambda found: found[0]):
        where = "only without a limit" if math.isinf(rate) else f"from {_round(rate)} on"
        said.append(f"{fast.name} overtakes {slow.name} {where}.")
    links = read_links(record)
    for batch in sorted({one.batch for one in curves}):
        alike = [one for one in curves if one.batch == batch]
        if len(alike) > 1:
            best = [min(alike, key=lambda one: one.medians[at]).name.rpartition(",")[0]
                    for at in range(len(links))]
            runs = [(name, [link for link, _ in run]) for name, run in groupby(
                zip(links, best), key=lambda found: found[1])]
            said.append(f"The fastest with batch {batch}: " + "; ".join(
                f"{_range(where)} {name}" for name, where in runs) + ".")
    return said or ["No two plans of one batch."]


def _range(links: Sequence[float]) -> str:
    """Return neighbouring rates for a reader."""
    return " to ".join(rate_name(link) for link in dict.fromkeys((links[0], links[-1])))


def _round(rate: float) -> str:
    """Return an interpolated rate with two digits."""
    return rate_name(float(f"{rate:.2g}"))


def sweep_parts(records: Sequence[Measurements]) -> list[Part]:
    """Make the tables and notes of all sweeps."""
    parts: list[Part] = []
    for record in records:
        curves = read_curves(record)
        parts += [seconds_table(record, curves), *hidden_parts(record, curves),
                  prediction_table(record, curves),
                  Notes("Where each is the fastest:", describe_crossovers(record, curves))]
    return [*parts, Notes("About these rates of links:", _notes(records))]


def heading(record: Measurements) -> str:
    """Return the heading of a sweep: its table, its layers and its emulated cluster."""
    cluster = Cluster.parse(str(record.environment["emulated_cluster"]))
    layers = int(record.configuration["layers"])
    return (f"{HEADINGS[str(record.configuration['table'])]}, {layers} layer"
            f"{'s' * (layers != 1)}: emulated cluster, {cluster.nodes} nodes x {cluster.ranks} "
            f"ranks, links of several rates; {emulated.MODELLED}")


def seconds_table(record: Measurements, curves: Sequence[Curve]) -> Table:
    """Make the table of milliseconds a sequence, by plan and rate."""
    links, group = read_links(record), "ms a sequence, median"
    rows: Rows = [[one.name, number_cell(1e3 * one.work, ".3g"),
                   *(number_cell(1e3 * value, ".3g") for value in one.medians)] for one in curves]
    columns = [Column("scheme"), Column("work alone", "(waits)", group),
               *(Column(rate_name(link), "", group) for link in links)]
    return Table(heading(record), columns, rows)


def hidden_parts(record: Measurements, curves: Sequence[Curve]) -> list[Part]:
    """Make the table of the share of communication that overlap hides; none without overlap.

    Of a plan without overlap communication is the time that is not work, and what could be hidden
    is the shorter of both.
    """
    plain = {one.label: one for one in curves}
    rows: Rows = []
    for one in curves:
        whole = plain.get(one.label.partition(" overlap=")[0])
        if whole is None or whole is one:
            continue
        moving = whole.medians - whole.work
        hidden = (whole.medians - one.medians) / np.minimum(moving, whole.work)
        for at, link in enumerate(read_links(record)):
            rows.append([one.name, rate_name(link),
                         number_cell(moving[at] / whole.medians[at], ".0%"),
                         number_cell(hidden[at], ".0%"),
                         number_cell(whole.medians[at] / one.medians[at], ".2f")])
    return [Table(f"{heading(record)}: what overlap hides", [
        Column("scheme"), Column("link"), Column("communication", "of a step without"),
        Column("hidden of what", "could be"), Column("times as fast", "as without")],
        rows)] * bool(rows)


def prediction_table(record: Measurements, curves: Sequence[Curve]) -> Table:
    """Make the table of the least and the greatest sample, and of predictions beside medians."""
    group = "ms a sequence"
    rows: Rows = []
    for one in curves:
        for at, link in enumerate(read_links(record)):
            median = one.medians[at]
            rows.append([one.name, rate_name(link), number_cell(1e3 * median, ".3g"),
                         number_cell(1e3 * one.seconds[at].min(), ".3g"),
                         number_cell(1e3 * one.seconds[at].max(), ".3g"),
                         number_cell(1e3 * one.predicted[at], ".3g"),
                         number_cell(one.predicted[at] / median - 1, "+.0%"),
                         number_cell(one.work / median, ".0%"),
                         number_cell(one.software / median, ".0%")])
    return Table(f"{heading(record)}: predictions", [
        Column("scheme"), Column("link"), Column("median", "", group),
        Column("least", "", group), Column("greatest", "", group),
        Column("predicted", "", group), Column("error of", "prediction"),
        Column("share", "of work"),
        Column("share of", "software")], rows)


def _waits(record: Measurements) -> str:
    """Say which seconds the ranks of a sweep waited for."""
    chosen = record.configuration
    cluster = Cluster.parse(str(record.environment["emulated_cluster"]))
    return (f"{HEADINGS[str(chosen['table'])]}: ranks wait for the seconds of machine "
            f"{chosen['waited_machine']}, whose lengths are divided by "
            f"{chosen['waited_shrink']:g}, times {chosen['waited_scale']:g}: at "
            f"{cluster.link_text(per='/s')} computing has that machine's ratio to communicating. "
            f"The waits are the same at all rates of links.")


def _notes(records: Sequence[Measurements]) -> list[str]:
    env, count = records[-1].environment, len(records[-1].scales["repetition"])
    overlap = any(parse_label(label).overlap for one in records for label in one.scales["plan"])
    return [
        *map(_waits, records),
        f"{count} repetition{'s' * (count != 1)} of each, a step each, in rounds with random "
        f"order; forward and backward by their makespans. All plans were verified with the serial "
        f"scheme first." + " Fewer than six repetitions give no 95 % interval." * (count < 6),
        f"The {env['ranks']} ranks share {env['cores']} cores for all that is not waited for: "
        f"copies, sums, TCP and Python take longer than with a core for each, and where links "
        f"are fast this is what is measured. "
        f"The share of software is what a step takes without links and waits over what it takes.",
        "Predicted, and stored before the first step: the links of the cluster, shared by the "
        "ranks of a node as they are placed, and the waits, without software; nothing is fitted. "
        "Crossings are interpolated between measured rates as powers of the rate.",
        *["Predictions hide nothing: seconds of work and of communication add up, also with "
          "overlap."] * overlap]
