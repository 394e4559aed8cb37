"""Settings of a job that measures rows, and checks that its cases can be measured with them."""

import math
from dataclasses import dataclass
from typing import Any, Callable, ContextManager, Sequence

from bench.agreement import make_on_each_rank
from bench.cases.case import Case
from bench.errors import UsageError
from bench.experiments.rows.dilation import Dilation
from bench.instruments import placement, timing
from bench.records.measurements import Setting
from mm3d.arrays import backend as backends
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme
from mm3d.tracing.events import Gemm, MemoryPass
from mm3d.transport.choice import choose_device


@dataclass(frozen=True)
class ModelledWork:
    """The modelled work whose seconds ranks wait.

    Attributes
    ----------
    seconds : callable
        Returns the seconds of a `Gemm` or a `MemoryPass`, with `scale`.
    block : int
        Elements that the machine's elementwise work handles at a time.
    scale : float
        Seconds waited over those that the machine would take.
    shrink : float
        Factor by which the machine is shrunk, as lengths of the model are; see
        `bench.prediction.similarity.shrink_machine`.
    """

    machine: str
    seconds: Callable[[Gemm | MemoryPass], float]
    block: int
    scale: float = 1.0
    shrink: float = 1.0

    @property
    def settings(self) -> dict[str, Setting]:
        """The settings that a file records."""
        return {"waited_machine": self.machine, "waited_scale": float(self.scale),
                "waited_shrink": float(self.shrink)}


@dataclass(frozen=True)
class Settings:
    """How the rows of a job are measured; the same for all of them.

    Attributes
    ----------
    warmup : int
        Steps before the first that is timed, the verified one included.
    order : int
        The seed of the order of rows, which is recorded.
    backend : str or None
        The array library; None for MM3D_BACKEND or NumPy.
    traced : int
        The number of steps that are traced after those that are timed.
    grid : callable or None
        Returns the sizes of the grid of a case; called on all ranks.  None for the schemes'
        default.
    inside : str
        The direction that stays inside a node, or "auto"; see
        `bench.instruments.placement.direction_order`.
    watched : callable
        The context of the steps that count or are timed, as from
        `mm3d.tracing.watchdog`.
    stop : callable
        Returns True to end the row with the repetitions done so far; called on rank 0.
    fits : callable
        Raises LeftOut on every rank when the nodes lack memory for a case on a grid; called with
        both and the ranks' communicator, before any large array is made.
    waits : callable or None
        Returns the seconds that the ranks of a case wait for their work; None where they compute.
    dilation : Dilation or None
        How links and waits are slowed; None where they are not.
    """

    warmup: int
    limits: timing.Limits
    order: int
    backend: str | None = None
    seed: int = 0
    traced: int = 0
    recompute: str = "none"
    grid: Callable[[Case], tuple[int, ...]] | None = None
    inside: str = "auto"
    watched: Callable[..., ContextManager] = timing.unwatched
    stop: Callable[[], bool] = lambda: False
    fits: Callable[[Case, tuple[int, ...], Any], None] = lambda one, grid, comm: None
    waits: Callable[[Case], ModelledWork] | None = None
    dilation: Dilation | None = None


def check_backend(backend: str | None, comm) -> None:
    """Raise UsageError, the same on every rank, when a rank cannot use the array library."""
    library = make_on_each_rank(lambda: backends.get(backend), comm)
    make_on_each_rank(lambda: choose_device(comm, library), comm)


def check_grids(cases: Sequence[Case], settings: Settings, comm) -> None:
    """Check before measuring that the grid fits at least one case; the others fail as rows.

    Raises UsageError, the same on every rank, when it fits no case.
    """
    problems: list[str] = []
    for one in cases:
        try:
            choose_grid(one, settings, comm)
        except ValueError as error:
            problems.append(str(error))
        else:
            return
    raise UsageError("; ".join(dict.fromkeys(problems)))


def choose_grid(one: Case, settings: Settings, comm) -> tuple[GridShape, str]:
    """Choose the shape of a case's grid, and the order of its directions over the nodes.

    Raises ValueError when they do not fit the scheme.
    """
    kind = find_scheme(one.row.scheme)
    sizes = settings.grid(one) if settings.grid else kind.default_grid(comm.size)
    if (len(sizes) != len(kind.directions) or math.prod(sizes) != comm.size
            or min(sizes) < 1):
        raise ValueError(f"--grid {'x'.join(map(str, sizes))}: scheme {kind.name!r} has the "
                         f"directions {', '.join(kind.directions)}, whose sizes must multiply to "
                         f"the {comm.size} ranks")
    shape = kind.grid_shape(sizes)
    kind.check_grid(shape)
    return shape, placement.direction_order(settings.inside, kind.name, shape, one.sizes)
