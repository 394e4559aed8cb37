"""Define the times of the steps of each stage, and of a message, as exact fractions."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Iterable, Mapping

from mm3d.training.schedules.schedule import STEPS

Exact = int | float | str | Fraction


def exact(value: Exact) -> Fraction:
    """Return a number as a fraction; a float as the decimal number that it is printed as."""
    return Fraction(str(value))


@dataclass(frozen=True)
class Times:
    """Hold the times of the steps in each stage, in any one unit.

    Attributes
    ----------
    forward, backward, weights : tuple of Fraction
        By stage: F; B, the gradient of the input; W, the gradient of the weights.
    hop : Fraction
        From the end of an action to the arrival of its result on another rank.  Neither rank is
        busy with it.
    links : mapping of (int, int) to Fraction
        Hops from a rank to another that take another time than `hop`.
    """

    forward: tuple[Fraction, ...]
    backward: tuple[Fraction, ...]
    weights: tuple[Fraction, ...]
    hop: Fraction = Fraction(0)
    links: Mapping[tuple[int, int], Fraction] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not len(self.forward) == len(self.backward) == len(self.weights) > 0:
            raise ValueError(f"times of {len(self.forward)}, {len(self.backward)} and "
                             f"{len(self.weights)} stages: as many of F, B and W are needed")
        if min(*self.forward, *self.backward, *self.weights, self.hop, *self.links.values()) < 0:
            raise ValueError("times are negative: times of at least 0 are needed")

    @classmethod
    def by_stage(cls, forward: Iterable[Exact], backward: Iterable[Exact],
                 weights: Iterable[Exact], hop: Exact = 0) -> "Times":
        """Return times that differ from stage to stage."""
        every = (tuple(map(exact, times)) for times in (forward, backward, weights))
        return cls(*every, exact(hop))

    @classmethod
    def equal(cls, stages: int, forward: Exact, backward: Exact, weights: Exact,
              hop: Exact = 0) -> "Times":
        """Return the same times for each of `stages` stages."""
        return cls.by_stage([forward] * stages, [backward] * stages, [weights] * stages, hop)

    def of(self, kind: str, stage: int) -> Fraction:
        """Return the time of an action of this kind in a stage; "BW" takes that of both parts."""
        every = {"F": self.forward, "B": self.backward, "W": self.weights}
        return sum((every[step][stage] for step in STEPS[kind]), Fraction(0))

    def hop_between(self, source: int, target: int) -> Fraction:
        """Return the time of a hop from a rank to a rank; none from a rank to itself."""
        return Fraction(0) if source == target else self.links.get((source, target), self.hop)

    def denominator(self) -> int:
        """Return the least number that makes all times whole when multiplied by it."""
        return math.lcm(*(time.denominator for time in (
            *self.forward, *self.backward, *self.weights, self.hop, *self.links.values())))
