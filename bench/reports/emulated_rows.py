"""Describe a row of an emulated cluster: as published, predicted before the run, and emulated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources

import msgspec
import numpy as np

from bench.cases.paper import Row, load_tables
from bench.cases.variants import Variant, recorded_variant
from bench.cluster.spec import Cluster
from bench.records import model_run
from bench.records.folder import policy_of
from bench.records.model_run import Run
from bench.statistics import median_interval
from mm3d import ModelSizes


@dataclass(frozen=True)
class Emulated:
    """A row on an emulated cluster, before it is measured or afterwards.

    Attributes
    ----------
    machine : str
        The machine whose work ranks wait for.
    shrink, scale : float
        The factors by which it is shrunk, and its seconds are multiplied.
    predicted : float
        Predicted undilated seconds of a step here; for a measurement, those stored before it, NaN
        if none were.
    original : float
        Predicted seconds of a layer's step on the machine that is emulated, at its sizes; NaN
        where they are not known.
    repeats : tuple of Run
        The runs with the settings of `run`, which comes last.
    """

    row: Row
    sizes: ModelSizes
    variant: Variant
    machine: str
    shrink: float
    scale: float
    cluster: Cluster | None
    predicted: float
    original: float
    run: Run | None = None
    repeats: tuple[Run, ...] = ()

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
        if self.run is None or "software" not in self.run.groups:
            return math.nan
        alone = self.run.groups["software"].variables["samples"].values.sum(axis=0)
        return float(np.median(alone)) / (
            self.sizes.batch * model_run.average_step_time(self.run.samples, self.sizes.batch))

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
        return math.nan if self.run is None else self._average(self.run)

    @property
    def averages(self) -> list[float]:
        """`average` of each run, oldest first."""
        return [self._average(run) for run in self.repeats or (self.run,) if run]

    def _average(self, run: Run) -> float:
        return model_run.average_step_time(run.times, self.sizes.batch) * self.to_paper

    @property
    def interval(self) -> tuple[float, float]:
        """Bounds of the 95 % interval of `average`, of whole steps; NaN without a measurement."""
        if self.run is None:
            return math.nan, math.nan
        found = median_interval(model_run.step_times(self.run.times, self.sizes.batch))
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
    group = run.groups.get("predicted")
    if group is None or name not in group.variables:
        return math.nan
    return total_seconds(group.variables[name].values)


def total_seconds(phases: Sequence[Sequence[float]]) -> float:
    """Sum the predicted seconds of work and of communication, (phases, kinds)."""
    return sum(map(float, np.sum(phases, axis=0)))


@cache
def known_seconds() -> dict[tuple, float]:
    """Read `Emulated.original` of the paper's rows, for files that do not store it."""
    text = resources.files("bench.reports").joinpath("machine_seconds.toml").read_bytes()
    return {tuple(key): seconds for *key, seconds in msgspec.toml.decode(text)["rows"]}
