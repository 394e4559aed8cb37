"""A training whose plans are limited to some schemes and grids, and to a number of stages."""

from dataclasses import dataclass
from typing import Callable, Iterator

from bench.prediction.training_plans.choices import Training
from mm3d.grid.shape import GridShape


@dataclass(frozen=True)
class NarrowTraining(Training):
    """A training of which `Search` sees some plans alone.

    Attributes
    ----------
    keeps : callable
        Is given a scheme and a grid, and returns whether plans may have them.
    stages : int
        The number of stages; 0 for any.
    """

    keeps: Callable[[str, GridShape], bool] = lambda scheme, grid: True
    stages: int = 0

    def shapes(self) -> Iterator[tuple[str, GridShape]]:
        """List the schemes and grids of a stage."""
        return (one for one in super().shapes() if self.keeps(*one))

    def meshes(self, places: int) -> Iterator[tuple[int, int]]:
        """List the numbers of replicas and of stages for stages of so many ranks."""
        return (one for one in super().meshes(places) if self.stages in (0, one[1]))
