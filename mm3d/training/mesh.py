"""Arrange ranks as a mesh: the stages of a pipeline, each on a tensor group of its own."""

from typing import Any, Sequence

from mpi4py import MPI

from mm3d import launcher
from mm3d.arrays.backend import Backend
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme
from mm3d.schemes.scheme import Scheme

Sizes = tuple[int, ...] | GridShape


class Mesh:
    """Arrange ranks as the stages of a pipeline, each with a scheme on a grid of its own.

    A stage is what a pipeline schedule calls a rank: it takes one or more parts of the layers.
    Ranks are numbered stage by stage.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        All ranks; every one must create it.
    stages : int
        Number of stages, among which the ranks are divided equally.
    scheme : str
        Name of the tensor parallelism in every stage, see `mm3d.scheme`.
    grid : tuple of int or GridShape, or a sequence of these, optional
        Sizes of the grid's directions in every stage, or in each one; by default the scheme's own
        choice.  Where they differ, activations are redistributed on the way.
    backend : str or Backend, optional
        The array library, see `mm3d.arrays.backend.get`.
    **options
        Options of the scheme.

    Attributes
    ----------
    shape : GridShape
        Number of stages (direction s) and of ranks in each of them (t).
    grids : tuple of GridShape
        The grid of each stage.
    stage, place : int
        The stage of this rank, and its number there.
    scheme : Scheme
        The tensor parallelism on the ranks of this stage.
    options : dict
        The options of the scheme, with the defaults of those that were not given.

    Raises
    ------
    ValueError
        On every rank alike and before any communication, when the stages do not divide the
        ranks, a grid does not have as many ranks as a stage, or the scheme cannot use it.

    Examples
    --------
    >>> mesh = mm3d.Mesh(comm, stages=4, scheme="3d", grid=(2, 1, 1))    # on 8 ranks
    >>> mesh = mm3d.Mesh(comm, stages=2, grid=[(2, 1, 1), (1, 2, 1)])    # on 4 ranks
    """

    def __init__(self, comm: MPI.Intracomm, stages: int = 1, scheme: str = "3d",
                 grid: Sizes | Sequence[Sizes] | None = None,
                 backend: str | Backend | None = None, **options: Any) -> None:
        kind = find_scheme(scheme)
        self.options = kind.complete_options(options)
        self.grids = stage_grids(kind, comm.size, stages, grid)
        launcher.check_launcher(comm.size if comm == MPI.COMM_WORLD else None)
        self.comm, self.shape = comm, GridShape("st", (stages, comm.size // stages))
        self.stage, self.place = self.shape.coordinates(comm.rank).values()
        self._group = comm.Split(self.stage, self.place)
        self.scheme = kind(self._group, self.grids[self.stage], backend, **options)

    def __repr__(self) -> str:
        return (f"Mesh({self.shape['s']} stages; rank {self.comm.rank} is {self.place} of stage "
                f"{self.stage}, {self.scheme!r})")

    def rank(self, stage: int, place: int) -> int:
        """Return the number in `comm` of the rank that is `place` in `stage`."""
        return self.shape.rank({"s": stage, "t": place})

    def free(self) -> None:
        """Free the communicators; every rank must call it."""
        self.scheme.grid.free()
        self._group.Free()


def stage_grids(kind: type[Scheme], ranks: int, stages: int,
                grid: Sizes | Sequence[Sizes] | None = None) -> tuple[GridShape, ...]:
    """Return the grid of each stage; parameters and errors as those of `Mesh`."""
    if not isinstance(stages, int) or stages < 1 or ranks % stages:
        near = [count for count in range(1, ranks + 1) if not ranks % count]
        raise ValueError(f"{stages} stages do not divide {ranks} ranks into equal groups: "
                         f"{', '.join(map(str, near))} would do")
    share = ranks // stages
    if grid is None:
        grid = kind.default_grid(share)
    same = isinstance(grid, GridShape) or not any(isinstance(one, (tuple, list, GridShape))
                                                  for one in grid)
    grids = [kind.grid_shape(one) for one in ([grid] * stages if same else grid)]
    if len(grids) != stages:
        raise ValueError(f"{len(grids)} grids for {stages} stages: one for all of them, or one "
                         f"for each would do")
    for stage, one in enumerate(grids):
        if one.ranks != share:
            raise ValueError(f"a grid of {one} has {one.ranks} ranks, but stage {stage} has "
                             f"{share}: {stages} stages divide {ranks} ranks")
        kind.check_grid(one)
    return tuple(grids)
