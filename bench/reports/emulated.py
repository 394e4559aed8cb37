"""Describe rows of an emulated cluster, as predicted and measured, and state what they show."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import msgspec
import numpy as np
from msgspec.structs import replace

from bench.cases.paper import BASELINES, HEADINGS, PROPOSED, Row, load_tables
from bench.cases.selection import select_rows
from bench.cases.variants import Variant, recorded_variant
from bench.cluster.spec import Cluster
from bench.records import model_run
from bench.records.folder import Results, most_oversubscribed, policy_of, share_cores
from bench.records.measurements import Measurements
from bench.records.model_run import Run
from bench.records.notes import MODELLED, describe_cluster
from bench.statistics import median_interval
from mm3d import ModelSizes
from mm3d.tracing.events import PHASES


def emulated_runs(runs: Sequence[Run | None]) -> list[Run]:
    """Return the runs that ran in an emulated cluster."""
    return [run for run in runs if run and "emulated_cluster" in run.environment]


def other_runs(runs: Sequence[Run | None]) -> list[Run]:
    """Return the runs that ran in no emulated cluster."""
    return [run for run in runs if run and "emulated_cluster" not in run.environment]


def describe_clusters(runs: Sequence[Run | None]) -> str:
    """Return the different emulated clusters of runs; "" if there are none."""
    return " and ".join(dict.fromkeys(describe_cluster(run.environment)
                                      for run in emulated_runs(runs)))


def swept_rates(runs: Sequence[Run]) -> list[Measurements]:
    """Join the rows of emulated clusters that differ in the rates of links alone."""
    if len({run.environment["emulated_cluster"] for run in emulated_runs(runs)}) < 2:
        return []    # as in almost all folders
    from bench.records.at_rates import join_rates
    return join_rates(runs)


def waited_rows(results: Results) -> list[tuple[Row, Run]]:
    """List the rows that were measured on an emulated cluster, with waited work."""
    rows = [row for name in HEADINGS for row in select_rows(name)]
    likes = [replace(row, like=like) for row in rows for like in (PROPOSED, *BASELINES)]
    pairs = [(row, results.get(row)) for row in [*rows, *likes]]
    return [(row, run) for row, run in pairs if run and recorded_variant(run.configuration).waits
            and "emulated_cluster" in run.environment]


def state_conditions(runs: Sequence[Run | None]) -> str:
    """Return emulated clusters, and warnings of ranks that wait or are crowded, in brackets."""
    clusters, emulated = describe_clusters(runs), emulated_runs(runs)
    others = most_oversubscribed(other_runs(runs))
    crowded = most_oversubscribed(emulated)
    said = [clusters] if clusters else []
    waits = any(run and recorded_variant(run.configuration).waits for run in runs)
    if waits:
        said.append(MODELLED if clusters else "NOT COMPUTED: work is waited for")
    for most, warning in ((crowded, ""), (others, "NOT SCALING RESULTS: " * (not waits))):
        if most:
            said.append(f"{warning}up to {most.ranks} ranks {share_cores(most)}")
    return f" ({'; '.join(said)})" if said else ""


def emulation_notes(runs: Sequence[Run]) -> list[str]:
    """State what figures from emulated clusters show, and what they do not."""
    found = emulated_runs(runs)
    if not found:
        return []
    kernels, controls = (" and ".join(sorted({str(run.environment.get(name, "unknown"))
                                              for run in found}))
                         for name in ("kernel", "emulated_congestion_control"))
    most = most_oversubscribed(found)
    turns = "" if most is None else f" The ranks of all nodes {share_cores(most)}" + (
        ": copies, sums, TCP and Python take longer than with a core for each."
        if recorded_variant(most.configuration).waits else
        ", so computing does not get faster with more of them.")
    return [f"EMULATED CLUSTER: {len(found)} of {len(runs)} rows were measured in an "
            f"{describe_clusters(found)}: network namespaces of one machine, Linux {kernels}. "
            f"Between nodes every byte goes through TCP (congestion control: {controls}) and "
            f"links of that rate, whose time is real; inside a node ranks share memory.{turns} No "
            f"GPU, and no network hardware, was measured."]


@dataclass(frozen=True)
class Emulated:
    """A row on an emulated cluster, before it is measured or afterwards."""

    row: Row
    sizes: ModelSizes
    variant: Variant
    machine: str    # the machine whose work ranks wait for
    # The factors by which it is shrunk, and its seconds are multiplied.
    shrink: float
    scale: float
    cluster: Cluster | None
    # Predicted undilated seconds of a step here; for a measurement, those stored before it, NaN if
    # none were.
    predicted: float
    # Predicted seconds of a layer's step on the machine that is emulated, at its sizes; NaN where
    # they are not known.
    original: float
    run: Run | None = None
    repeats: tuple[Run, ...] = ()    # the runs with the settings of `run`, which comes last

    @property
    def to_paper(self) -> float:
        """Seconds on the emulated machine with the paper's layers, over undilated seconds here."""
        layers = load_tables().settings.layers / self.sizes.layers
        return self.shrink ** 2 / self.scale * layers

    @property
    def original_average(self) -> float:
        """Predicted seconds a sequence on the machine that is emulated, with all layers."""
        return self.original * load_tables().settings.layers / self.sizes.batch

    @property
    def software(self) -> float:
        """Seconds of a step without links and waits, over those measured; NaN if unknown."""
        alone = self.run and self.run.of_group("software", "samples")
        if alone is None:
            return math.nan
        return float(np.median(alone.sum(axis=0))) / sum(
            model_run.typical(self.run.samples[phase]) for phase in PHASES)

    @property
    def dilation(self) -> float:
        """The factor by which links and waits were slowed; NaN without a measurement."""
        return math.nan if self.run is None else self.run.dilation

    @property
    def quotable(self) -> bool:
        """Whether software takes at most its allowed share of a step."""
        return self.software <= self.bound

    @property
    def bound(self) -> float:
        """The share of a step that software may take; NaN if none was given."""
        return math.nan if self.run is None else self.run.software_bound

    @property
    def predicted_average(self) -> float:
        """Predicted seconds a sequence, at the scale of the machine that is emulated."""
        return self.predicted / self.sizes.batch * self.to_paper

    @property
    def average(self) -> float:
        """Measured seconds a sequence, at that scale; NaN without a measurement."""
        return math.nan if self.run is None else self.run.average * self.to_paper

    @property
    def averages(self) -> list[float]:
        """`average` of each run, oldest first."""
        return [run.average * self.to_paper for run in self.repeats or (self.run,) if run]

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the 95 % interval of `average`, of whole steps; NaN without a measurement."""
        if self.run is None:
            return math.nan, math.nan
        found = median_interval(self.run.steps / self.sizes.batch)
        return found[1] * self.to_paper, found[2] * self.to_paper


def of_run(row: Row, run: Run, repeats: Sequence[Run] = ()) -> Emulated:
    """Make the row of a measurement whose ranks waited for their work, with its repeats."""
    chosen, where = run.configuration, run.environment.get("emulated_cluster")
    sizes, variant = ModelSizes.from_settings(chosen), recorded_variant(chosen)
    original = stored_seconds(run, "machine_seconds")
    plain = (variant, policy_of(run)) == (Variant(work="wait"), "none")
    if math.isnan(original) and plain and not chosen["overridden"]:
        original = known_seconds().get((
            chosen["waited_machine"], row.scheme, run.grid.compact, chosen.get("placement", ""),
            row.hidden, sizes.batch), math.nan)
    return Emulated(row, sizes, variant, str(chosen["waited_machine"]),
                    float(chosen["waited_shrink"]), float(chosen["waited_scale"]),
                    Cluster.parse(str(where)) if where else None,
                    stored_seconds(run, "seconds"), original, run, tuple(repeats))


def stored_seconds(run: Run, name: str) -> float:
    """Return the sum of predicted seconds that a run has stored; NaN if it has not."""
    found = run.of_group("predicted", name)
    return math.nan if found is None else total_seconds(found)


def total_seconds(phases: Sequence[Sequence[float]]) -> float:
    """Sum the predicted seconds of work and of communication, (phases, kinds)."""
    return sum(map(float, np.sum(phases, axis=0)))


@cache
def known_seconds() -> dict[tuple, float]:
    """Read `Emulated.original` of the paper's rows, for files that do not store it."""
    text = resources.files("bench.reports").joinpath("machine_seconds.toml").read_bytes()
    return {tuple(key): seconds for *key, seconds in msgspec.toml.decode(text)["rows"]}
