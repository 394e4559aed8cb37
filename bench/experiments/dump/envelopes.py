"""Measure how far right steps in a type are from the exact one: the envelope.

The step is computed in float64, and `SAMPLES` times with the roundings of the dump's type, see
`roundings`.  Their errors say how large those of a right program are, and how many independent
ones a tensor has; the envelope is the distance that one more of them exceeds in a share `ALARMS`
of dumps.  What the dump's own type rounds when it is stored is added.
"""

from dataclasses import dataclass
from typing import Any, Mapping

import numpy as np

from bench.experiments.dump.computation import (Start, Tensors, Way, compute_alone,
                                                compute_step, compute_update)
from bench.experiments.dump.places import LOSS, TensorId
from bench.experiments.dump.roundings import Program, epsilon, imitate, is_narrow
from bench.statistics import bounds_of_one_more
from mm3d.schemes.closed_form import factorizations

SAMPLES = 8
ALARMS = 1e-3    # of right dumps, in which any tensor is outside
KEPT = 1024      # elements of a tensor's error from which it is told how many are independent
# Roundings of a norm: each tensor's, of its parts on ranks and of all, and two of their sum.
OF_NORM = 4
# Roundings of a step of AdamW or SGD: of the weight by decay, by the step and when it is stored;
# of its change by clipping (with the norm's), both moments, the root, sums and factors.
OF_WEIGHT, OF_CHANGE = 3, 12
OF_LOSS = 4      # of a loss: its terms, their sum, the factor and the sum over ranks
DEVIATIONS = 5   # of a sum of many roundings, of which none is known better


@dataclass(frozen=True)
class Distance:
    """Hold how far a tensor is from another: the root of the sum of squares, and the largest."""

    whole: float = 0.0
    largest: float = 0.0

    @classmethod
    def between(cls, a: np.ndarray, b: np.ndarray | float) -> "Distance":
        """Return the distance of two tensors; infinite where `a` is not finite."""
        if not np.isfinite(a := np.asarray(a, np.float64)).all():
            return cls(np.inf, np.inf)
        if not a.size:
            return cls()
        gap = a - b
        return cls(float(np.sqrt((gap * gap).sum())), float(np.abs(gap).max()))

    def widest(self, other: "Distance") -> "Distance":
        """Return the larger of both numbers."""
        return Distance(max(self.whole, other.whole), max(self.largest, other.largest))

    def plus(self, other: "Distance") -> "Distance":
        """Return the sums of both numbers."""
        return Distance(self.whole + other.whole, self.largest + other.largest)

    def times(self, factor: float) -> "Distance":
        """Return both numbers times a factor."""
        return Distance(factor * self.whole, factor * self.largest)

    def over(self, envelope: "Distance") -> float:
        """Return how many envelopes this is: the larger of both ratios; 0 for none."""
        return max((mine / its if its else np.inf) if mine else 0.0 for mine, its in (
            (self.whole, envelope.whole), (self.largest, envelope.largest)))


@dataclass(frozen=True)
class Reference:
    """Hold the exact step, all tensors up to the norm in float64, and how far right ones are off.

    The distance of a right step in a type exceeds the spread in a share `ALARMS` of dumps.
    """

    exact: Tensors
    spread: dict[TensorId, Distance]


ErrorSample = tuple[Distance, np.ndarray]    # of the error of a tensor in one imitated step


def sample_error(a: np.ndarray, exact: np.ndarray) -> ErrorSample:
    """Return the size of an error, and at most `KEPT` of its elements, the same in all samples."""
    gap = np.ravel(a - exact)
    if gap.size > KEPT:
        gap = gap[np.random.default_rng(0).integers(gap.size, size=KEPT)]
    return Distance.between(a, exact), gap


def measure_reference(start: Start, comm: Any, program: Program | None = None) -> Reference:
    """Compute the exact step, and how far right ones in the program's type are from it.

    Every rank of `comm` must call it; the ranks divide the model of the exact step among them,
    and the imitated steps.  All get the same result.
    """
    model = start.model
    program = program or Program(model.dtype, model.master or model.dtype)
    exact = (compute_step(start, _exact_way(comm), comm) if start.documents is None else
             compute_alone(start))
    own = []
    for number in range(comm.rank, SAMPLES, comm.size):
        found = compute_alone(start, lambda gpt, seed=number: imitate(
            gpt, program, seed, start.documents))
        own.append((number, {place: sample_error(a, exact[place])
                             for place, a in found.items()}))
    every = sorted((one for some in comm.allgather(own) for one in some), key=lambda one: one[0])
    level = ALARMS / (2 * len(exact))
    spread = {place: exceeded([some[place] for _, some in every], level) for place in exact}
    loss = TensorId(LOSS)
    spread[loss] = spread[loss].plus(rounding(exact[loss], program.loss).times(OF_LOSS))
    return Reference(exact, spread)


def _exact_way(comm: Any) -> Way:
    """Return how the ranks of `comm` compute an exact step, on the grid nearest to a cube."""
    if comm.size == 1:
        return Way("float64")
    return Way("float64", scheme="3d", grid=min(factorizations(comm.size, 3), key=max))


def exceeded(samples: list[ErrorSample], level: float) -> Distance:
    """Return the distance that one more error exceeds with a probability, for each number."""
    distances, parts = zip(*samples)
    return Distance(*bounds_of_one_more([one.whole for one in distances],
                                        [one.largest for one in distances],
                                        np.array(parts), level))


def rounding(exact: np.ndarray, dtype: Any) -> Distance:
    """Return the distance that rounding to a type may make, at most."""
    return Distance.between(epsilon(dtype) / 2 * np.asarray(exact), 0.0)


def measure_update(start: Start, comm: Any, optimizer: Mapping[str, Any],
                   gradients: Mapping[str, np.ndarray]
                   ) -> tuple[Tensors, dict[TensorId, Distance]]:
    """Return the weights after a step by given gradients, and what roundings change at most."""
    exact = compute_update(start, _exact_way(comm), comm, optimizer, gradients)
    unit = epsilon(start.model.master or start.model.dtype) / 2
    most = {}
    for place, a in exact.items():
        change = a - np.float64(start.weights[place.name])
        most[place] = Distance.between(unit * (OF_WEIGHT * np.abs(a) + OF_CHANGE * np.abs(change)),
                                       0.0)
    return exact, most


def measure_norm(gradients: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Distance]:
    """Return the exact norm of gradients, and how far right sums in their type are from it.

    Squares are added one after another, in float32 at least, or in a better way.
    """
    exact = np.sqrt(sum(float((np.float64(a) ** 2).sum()) for a in gradients.values()))
    dtype = next(iter(gradients.values())).dtype
    sums = epsilon("float32" if is_narrow(dtype) else dtype) / 2
    count = max(a.size for a in gradients.values())
    error = OF_NORM * epsilon(dtype) / 2 + DEVIATIONS * sums * np.sqrt(count / 2)
    return np.asarray(exact), Distance(exact * error, exact * error)
