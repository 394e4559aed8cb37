"""Describe a row of an emulated cluster: as published, predicted before the run, and emulated."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from bench.cases.case import Case
from bench.cases.paper import Row, load_tables
from bench.cases.variants import Variant, recorded_variant
from bench.cluster.spec import Cluster
from bench.instruments import placement
from bench.prediction.machine_model import Machine, load_machine
from bench.prediction.similarity import emulating_machine, predict_phases
from bench.records import model_run
from bench.records.folder import policy_of
from bench.records.model_run import Run
from bench.statistics import median_interval
from mm3d import ModelSizes
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme


@dataclass(frozen=True)
class Emulated:
    """A row on an emulated cluster, before it is measured or afterwards.

    Attributes
    ----------
    machine : Machine
        The machine whose work ranks wait for.
    shrink, scale : float
        The factors by which it is shrunk, and its seconds are multiplied.
    recompute : str
        Its policy of recomputation.
    order : str
        The directions of the grid from the one that varies slowest over the nodes to the fastest.
    repeats : tuple of Run
        The runs with the settings of `run`, which comes last.
    """

    row: Row
    sizes: ModelSizes
    variant: Variant
    grid: GridShape
    machine: Machine
    shrink: float
    scale: float
    cluster: Cluster | None
    run: Run | None = None
    recompute: str = "none"
    order: str = ""
    repeats: tuple[Run, ...] = ()

    @property
    def to_paper(self) -> float:
        """Seconds on the emulated machine with the paper's layers, over undilated seconds here."""
        layers = load_tables().settings.layers / self.sizes.layers
        return self.shrink ** 2 / self.scale * layers

    def _predict(self, machine: Machine, sizes: ModelSizes) -> tuple[float, float]:
        """Predict the seconds of work and of communication of a step."""
        found = predict_phases(machine, self.row.scheme, self.grid,
                               self.order or self.grid.directions, sizes, self.variant,
                               self.recompute).values()
        return sum(work for work, _ in found), sum(moving for _, moving in found)

    @cached_property
    def predicted(self) -> tuple[float, float]:
        """Predicted undilated seconds of work and of communication of a step here.

        For a measurement, those stored before it; NaN if none were.
        """
        if self.run is None:
            return self._predict(emulating_machine(self.machine, self.shrink, self.scale,
                                                   self.cluster), self.sizes)
        if "predicted" not in self.run.groups:
            return math.nan, math.nan
        work, moving = self.run.groups["predicted"].variables["seconds"].values.sum(axis=0)
        return float(work), float(moving)

    @cached_property
    def original(self) -> tuple[float, float]:
        """Predicted seconds of a layer's step on the machine that is emulated, at its sizes."""
        tables = load_tables()
        sizes = ModelSizes(**{**self.sizes, "hidden": self.row.hidden,
                              "seq": tables.settings.seq, "layers": 1})
        return self._predict(self.machine, sizes)

    @property
    def original_average(self) -> float:
        """Predicted seconds a sequence on the machine that is emulated, with all layers."""
        return sum(self.original) * load_tables().settings.layers / self.sizes.batch

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
        return sum(self.predicted) / self.sizes.batch * self.to_paper

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


def of_case(one: Case, machine: Machine, scale: float, cluster: Cluster | None,
            recompute: str = "none") -> Emulated:
    """Make the row of a case that is not measured yet, on its scheme's own grid."""
    kind = find_scheme(one.row.scheme)
    shrink = load_tables().presets[one.preset].of_table(one.row.table).shrink
    grid = kind.grid_shape(kind.default_grid(one.row.gpus))
    return Emulated(one.row, one.sizes, one.variant, grid, machine, shrink, scale, cluster,
                    recompute=recompute,
                    order=placement.direction_order("auto", kind.name, grid, one.sizes))


def of_run(row: Row, run: Run, repeats: Sequence[Run] = ()) -> Emulated:
    """Make the row of a measurement whose ranks waited for their work, with its repeats.

    Raises UsageError when its machine is none of the supplied ones.
    """
    chosen, where = run.configuration, run.environment.get("emulated_cluster")
    return Emulated(row, ModelSizes.from_settings(chosen), recorded_variant(chosen), run.grid,
                    load_machine(str(chosen["waited_machine"])), float(chosen["waited_shrink"]),
                    float(chosen["waited_scale"]), Cluster.parse(str(where)) if where else None,
                    run, policy_of(run), str(chosen.get("placement", "")), tuple(repeats))
