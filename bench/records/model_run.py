"""The record of a row of the tables: names for what its groups hold, and seconds of a step."""

from statistics import median
from typing import Mapping

import numpy as np

from bench.records.measurements import (Check, Group, Measurements, Setting, Variable,
                                        grid_shape)
from mm3d.grid.axis import COLLECTIVES
from mm3d.grid.shape import GridShape
from mm3d.tracing.events import PHASES

AXES = ("x", "y", "z")    # the directions that every record has
COUNT_UNITS = {"calls": "1", "messages": "1", "words": "1", "bytes": "byte"}
TRAFFIC_DIMS = ("phase", "rank", "axis", "collective")


def directions_of(shape: GridShape) -> tuple[str, ...]:
    """Return the directions of a record: those of the grid, then those of `AXES` that it lacks.

    Nothing moves along the latter; readers that know only x, y and z then find these in files of
    grids without further directions.
    """
    return (*shape, *(axis for axis in AXES if axis not in shape))


class Run(Measurements):
    """The record of a row of the tables; its scales and variables are those of the samples."""

    @property
    def samples(self) -> dict[str, np.ndarray]:
        """Seconds of every repetition and rank, (repetitions, ranks), for each of `PHASES`."""
        return {phase: self.variables[phase].values for phase in PHASES}

    @property
    def late(self) -> dict[str, np.ndarray]:
        """Seconds by which each rank began after the first one, like `samples`."""
        return {phase: self.variables[f"{phase}_late"].values for phase in PHASES}

    @property
    def ended_by(self) -> str:
        """The limit that ended the repetitions: "width", "repetitions", "seconds" or "stopped"."""
        return str(self.configuration["ended_by"])

    @property
    def traffic(self) -> dict[str, np.ndarray]:
        """Counts of one step, (phases, ranks, directions, collectives), for each of `COUNT_UNITS`.

        Along the dimensions in the orders of `PHASES`, `directions` and `COLLECTIVES`.  Also
        "moved", float64, the words that the transport moved (`mm3d.grid.axis.Traffic`), which
        earlier files lack.
        """
        return {name: self._by_collective(name) for name in (*COUNT_UNITS, "moved")
                if name in self.groups["traffic"].variables}

    @property
    def expected_words(self) -> np.ndarray:
        """The closed form of the words summed over ranks, (phases, directions, collectives)."""
        return self._by_collective("expected_words")

    def _by_collective(self, name: str) -> np.ndarray:
        """Return counts of all `COLLECTIVES`, 0 for those that an earlier file lacks."""
        found = self.groups["traffic"]
        counts, known = found.variables[name].values, list(found.scales["collective"])
        every = np.zeros((*counts.shape[:-1], len(COLLECTIVES)), counts.dtype)
        every[..., [COLLECTIVES.index(label) for label in known]] = counts
        return every

    @property
    def directions(self) -> tuple[str, ...]:
        """The directions along which traffic was counted; see `directions_of`."""
        return tuple(map(str, self.groups["traffic"].scales["axis"]))

    @property
    def published(self) -> dict[str, float]:
        """The row that the paper prints; times in seconds."""
        return _numbers(self.groups["published"])

    @property
    def clock(self) -> dict[str, float]:
        """The "resolution" and the "offset_error", seconds."""
        return _numbers(self.groups["clock"])

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return len(self.scales["rank"])

    @property
    def dilation(self) -> float:
        """The factor by which the links and the waits of an emulated cluster were slowed."""
        return float(self.configuration.get("dilation", 1.0))

    @property
    def software_bound(self) -> float:
        """The share of a step that software may take in an emulated cluster; NaN if unknown."""
        return float(self.configuration.get("software_share", 0)) or np.nan

    @property
    def times(self) -> dict[str, np.ndarray]:
        """The samples over `dilation`, which compare with those of runs dilated otherwise."""
        return {phase: values / self.dilation for phase, values in self.samples.items()}

    @property
    def grid(self) -> GridShape:
        """The grid that the configuration states."""
        return grid_shape(self.configuration)


def _numbers(group: Group) -> dict[str, float]:
    return {name: float(variable.values) for name, variable in group.variables.items()}


def scalars(by_units: Mapping[str, Mapping[str, float]]) -> Group:
    """Make the group of some numbers without dimensions, by their units and names."""
    return Group({}, {name: Variable(np.array(number), units, ())
                      for units, numbers in by_units.items() for name, number in numbers.items()})


def row_run(configuration: dict[str, Setting], environment: dict[str, Setting],
            samples: Mapping[str, np.ndarray], late: Mapping[str, np.ndarray],
            checks: list[Check], groups: dict[str, Group], **created: str) -> Run:
    """Make the record of a row; `samples` and `late` as `Run` returns them."""
    repetitions, ranks = samples["forward"].shape
    times = dict(samples) | {f"{phase}_late": values for phase, values in late.items()}
    return Run("model", configuration, environment,
               {"repetition": range(repetitions), "rank": range(ranks)},
               {name: Variable(values.astype(np.float64), "s", ("repetition", "rank"))
                for name, values in times.items()}, checks, groups=groups, **created)


def traffic_group(counts: Mapping[str, np.ndarray], expected_words: np.ndarray,
                  directions: tuple[str, ...]) -> Group:
    """Make the group of the traffic of one step.

    Parameters
    ----------
    counts, expected_words
        See `Run.traffic` and `Run.expected_words`; integers except "moved".
    """
    units = {**COUNT_UNITS, "moved": "1"}
    ranks = counts["words"].shape[1]
    return Group({"phase": PHASES, "rank": range(ranks), "axis": directions,
                  "collective": COLLECTIVES},
                 {name: Variable(values.astype(float if name == "moved" else np.int64),
                                 units[name], TRAFFIC_DIMS) for name, values in counts.items()}
                 | {"expected_words": Variable(expected_words.astype(np.int64), "1",
                                               ("phase", "axis", "collective"))})


def slowest(samples: np.ndarray) -> np.ndarray:
    """Return the maximum over ranks of samples (repetitions, ranks)."""
    return samples.max(axis=1)


def typical(samples: np.ndarray) -> float:
    """Return the median over repetitions of `slowest`."""
    return median(slowest(samples).tolist())


def step_times(samples: dict[str, np.ndarray], batch: int) -> np.ndarray:
    """Return seconds a sequence of every repetition: (forward + backward) / batch."""
    return (slowest(samples["forward"]) + slowest(samples["backward"])) / batch


def average_step_time(samples: dict[str, np.ndarray], batch: int) -> float:
    """Return (forward + backward) / batch of medians, the paper's equation 6, in seconds."""
    return (typical(samples["forward"]) + typical(samples["backward"])) / batch
