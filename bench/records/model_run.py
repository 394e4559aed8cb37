"""Make records; of a row of the tables name what its groups hold, and compute its seconds."""

from statistics import median
from typing import Any, Mapping, Sequence

import numpy as np

from bench.records import schema
from bench.records.measurements import Check, Group, Measurements, Setting, Variable, grid_shape
from mm3d.grid.axis import COLLECTIVES
from mm3d.grid.shape import GridShape
from mm3d.tracing.events import PHASES

AXES = ("x", "y", "z")    # the directions that every record has
TRAFFIC_COUNTS = ("calls", "messages", "words", "bytes")


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
        """Counts of one step, (phases, ranks, directions, collectives), by `TRAFFIC_COUNTS`.

        Along the dimensions in the orders of `PHASES`, `directions` and `COLLECTIVES`.  Also
        "moved", float64, the words that the transport moved (`mm3d.grid.axis.Traffic`), which
        earlier files lack.
        """
        return {name: self._by_collective(name) for name in (*TRAFFIC_COUNTS, "moved")
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
    def batch(self) -> int:
        """The number of sequences of a step."""
        return int(self.configuration["batch"])

    @property
    def steps(self) -> np.ndarray:
        """Seconds of every repetition, forward and backward, of `times`."""
        return sum(slowest(self.times[phase]) for phase in PHASES)

    @property
    def average(self) -> float:
        """(forward + backward) / batch of medians, the paper's equation 6, in seconds."""
        return sum(typical(self.times[phase]) for phase in PHASES) / self.batch

    @property
    def grid(self) -> GridShape:
        """The grid that the configuration states."""
        return grid_shape(self.configuration)


def _numbers(group: Group) -> dict[str, float]:
    return {name: float(variable.values) for name, variable in group.variables.items()}


CLASSES = {"model": Run}    # of records, by kind; those of all others are `Measurements`


def slowest(samples: np.ndarray) -> np.ndarray:
    """Return the maximum over ranks of samples (repetitions, ranks)."""
    return samples.max(axis=1)


def typical(samples: np.ndarray) -> float:
    """Return the median over repetitions of `slowest`."""
    return median(slowest(samples).tolist())


Numbers = Mapping[str, Mapping[str, Any]]    # by units such as "s", and by name


def make_group(kind: str, numbers: Numbers, /, **scales: Sequence) -> Group:
    """Make a group of variables, of a kind or KIND.GROUP, from numbers by units.

    Labels of dimensions that are not in `scales` are the only ones of so many that the schema has,
    or they are counted from 0.
    """
    dims, labels, variables = schema.dimensions(kind), schema.labels(kind), {}
    whole = schema.of_kind(kind).get("whole", "").split()
    for units, named in numbers.items():
        for name, values in named.items():
            variables[name] = Variable(np.asarray(values, np.int64 if name in whole else None),
                                       units, tuple(dims[name].split()))
            for dim, count in zip(variables[name].dims, np.shape(values)):
                known = [some for some in labels.get(dim, ()) if len(some) == count]
                scales.setdefault(dim, known[0] if len(known) == 1 else range(count))
    return Group(scales, variables)


def make_record(kind: str, configuration: dict[str, Setting], environment: dict[str, Setting],
                numbers: Numbers, checks: list[Check], /, **scales: Sequence) -> Measurements:
    """Make the record of a run; numbers and scales are as of `make_group`."""
    found = make_group(kind, numbers, **scales)
    return CLASSES.get(kind, Measurements)(
        kind, configuration, environment, found.scales, found.variables, checks)


def add_numbers(record: Measurements, numbers: Numbers, /, **scales: Sequence) -> Measurements:
    """Add further variables to a record, as of `make_group`, and return it."""
    found = make_group(record.kind, numbers, **{**record.scales, **scales})
    record.scales.update(found.scales)
    record.raw.update(found.variables)
    return record


def traffic_group(counts: Mapping[str, np.ndarray], expected_words: np.ndarray,
                  directions: Sequence[str]) -> Group:
    """Make the group of the traffic of one step, as `Run.traffic` and `Run.expected_words`."""
    plain = {name: values for name, values in counts.items() if name != "bytes"}
    return make_group("model.traffic", {
        "byte": {"bytes": counts["bytes"]}, "1": {**plain, "expected_words": expected_words}},
        axis=directions, collective=COLLECTIVES)


def transport_names(grid: Any) -> str:
    """Return the names of all transports of the grid's collectives; "none" on one rank."""
    names = {getattr(axis.transport, "name", "mpi") for axis in grid.axes.values()
             if axis.size > 1}
    return " ".join(sorted(names)) or "none"
