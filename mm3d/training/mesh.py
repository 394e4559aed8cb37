"""Arrange ranks as a mesh: replicas of the stages of a pipeline, each on a tensor group."""

import math
from typing import Any, Sequence

from mpi4py import MPI

from mm3d import launcher
from mm3d.arrays import backend as backends
from mm3d.arrays.backend import Backend
from mm3d.arrays.plain_numbers import is_whole
from mm3d.grid.agreement import same_arguments
from mm3d.grid.axis import Axis, Shown
from mm3d.grid.grid import Grid, GridAxes, join_ranks
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme
from mm3d.schemes.scheme import Scheme
from mm3d.transport.choice import choose_device
from mm3d.transport.communicators import Freed

Sizes = tuple[int, ...] | GridShape


class Mesh(Shown):
    """Arrange ranks as replicas of a pipeline, whose stages have a scheme on a grid of their own.

    Each replica takes a part of the sequences of a batch; with `context` neighbouring replicas
    share sequences, and divide their positions.  A stage is what a pipeline schedule
    calls a rank: it takes one or more parts of the layers.  Ranks are numbered replica by replica,
    and stage by stage in each.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        All ranks; every one must create it, and call `free` when it is not used any more.
    stages : int
        Number of stages, among which the ranks of a replica are divided equally.
    scheme : str
        Name of the tensor parallelism in every stage, see `mm3d.scheme`.
    grid : tuple of int or GridShape, or a sequence of these, optional
        Sizes of the grid's directions in every stage, or in each one; by default the scheme's own
        choice.  Where they differ, activations are redistributed on the way.
    backend : str or Backend, optional
        The array library, see `mm3d.arrays.backend.get`.
    data : int
        Number of replicas, or with `context` of groups of them, which divide the sequences; the
        ranks are divided equally among all.
    shards : int, optional
        Number of neighbouring replicas among which ZeRO divides one copy of the model (hybrid
        sharding); the other replicas hold further copies.  By default all replicas divide one.
    context : int
        Number of replicas that divide the positions of the same sequences, see
        `mm3d.grid.activations.Context`.
    **options
        Options of the scheme.

    Attributes
    ----------
    shape : GridShape
        Number of all replicas (direction d), of stages (s), and of ranks in each stage (t).
    grids : tuple of GridShape
        The grid of each stage, in every replica.
    replica, stage, place : int
        The replica of this rank, its stage there, and its number in the stage.
    data_grid : DataGrid or None
        The ranks of this stage in all replicas; None without data parallelism.
    context_grid : DataGrid or None
        Those with the same sequences; None where no positions are divided.
    scheme : Scheme
        The tensor parallelism on the ranks of this stage.
    options : dict
        The options of the scheme, as chosen or by default.

    Raises
    ------
    ValueError
        On every rank alike, when replicas and stages do not divide the ranks, the shards do not
        divide the replicas, a grid does not have as many ranks as a stage, the scheme cannot use
        it, or some ranks have other arguments than the rest.

    Examples
    --------
    >>> mesh = mm3d.Mesh(comm, stages=4, scheme="3d", grid=(2, 1, 1))    # on 8 ranks, as
    >>> mesh = mm3d.Mesh(comm, stages=2, grid=[(4, 1, 1), (2, 2, 1)])
    >>> mesh = mm3d.Mesh(comm, data=2, context=2, grid=(2, 1, 1))
    >>> mesh = mm3d.Mesh(comm, data=2, stages=2, grid=(2, 1, 1))         # these
    """

    def __init__(self, comm: MPI.Intracomm, stages: int = 1, scheme: str = "3d",
                 grid: Sizes | Sequence[Sizes] | None = None,
                 backend: str | Backend | None = None, *, data: int = 1,
                 shards: int | None = None, context: int = 1, **options: Any) -> None:
        with same_arguments(comm, "Mesh") as given:
            given |= {"scheme": scheme, "data": data, "stages": stages, "context": context}
            kind = find_scheme(scheme)
            given |= kind.complete_options(options)
            given["shards"] = shards = check_data(comm.size, data, shards, context)
            data = int(data) * int(context)    # they may be NumPy's
            given["grids"] = self.grids = stage_grids(kind, comm.size // data, stages, grid)
            backend = backends.get(backend)
            given["backend"] = backend.name
        stages = int(stages)
        launcher.check_launcher(comm.size if comm == MPI.COMM_WORLD else None)
        self.comm = comm
        self.shape = GridShape("dst", (data, stages, comm.size // data // stages))
        self.replica, self.stage, self.place = self.shape.coordinates(comm.rank).values()
        # Of all ranks, before a part of them makes a grid.
        choose_device(comm, backend)
        group = join_ranks(comm, self.shape, "t")
        self._own = [group]    # communicators that this mesh has made
        self.scheme = kind(group, self.grids[self.stage], backend, **options)
        self.options = {name: getattr(self.scheme, name) for name in kind.options}
        self.data_grid = None
        if data > 1:
            # Replicas are the slowest direction, so these ranks are in the order of a DataGrid.
            line = join_ranks(comm, self.shape, "dt")
            self._own.append(line)
            self.data_grid = DataGrid(line, self.scheme.grid, {"d": shards}, stages)
        self.context_grid = None
        if context > 1:
            self.context_grid = DataGrid(line, self.scheme.grid, {"c": int(context)}, stages)

    def __repr__(self) -> str:
        replicas = f"{self.shape['d']} replicas of " if self.data_grid else ""
        own = f"of replica {self.replica}, " if self.data_grid else ""
        stages = f"{self.shape['s']} stage{'s' * (self.shape['s'] > 1)}"
        number = self.rank(self.stage, self.place)
        return (f"Mesh({replicas}{stages}; rank {number} is {self.place} "
                f"of stage {self.stage}, {own}{self.scheme!r})")

    @property
    def data(self) -> Axis | None:
        """Return the ranks with this stage and place among which ZeRO divides a copy of a model.

        Without `shards` one copy is divided among all replicas; None with one replica.
        """
        return self.data_grid and self.data_grid["d"]

    @property
    def context(self) -> Axis | None:
        """Return the ranks that have other positions of the same sequences; None if none do."""
        return self.context_grid and self.context_grid.axes["c"]

    def rank(self, stage: int, place: int) -> int:
        """Return the number in `comm` of the rank that is `place` in `stage` of this replica."""
        return self.shape.rank({"d": self.replica, "s": stage, "t": place})

    def free(self) -> None:
        """Free the communicators of the mesh and of its grids; every rank must call it.

        Models on the mesh have communicators of their own, and are freed before.  It may be
        repeated.  Any later use of the mesh or of a model on it by all ranks raises RuntimeError.
        """
        for grid in (self.context_grid, self.data_grid, self.scheme.grid):
            if grid is not None:
                grid.free()
        while self._own:
            self._own.pop().Free()
        self.comm = Freed("the mesh")


def check_mesh(mesh: Any, call: str) -> None:
    """Raise TypeError, naming the call, for what is no mesh, such as a communicator."""
    if not isinstance(mesh, Mesh):
        raise TypeError(f"{call}: {type(mesh).__name__} is no mesh: mm3d.Mesh(comm, ...) would do")


def check_data(ranks: int, data: int, shards: int | None, context: int = 1) -> int:
    """Check the numbers of replicas and shards as in `Mesh`; return the number of shards."""
    check_divisor(f"context={context!r} does", context, ranks, f"{ranks} ranks into equal parts")
    ranks //= context
    check_divisor(f"data={data!r} does", data, ranks, f"{ranks} ranks into equal replicas")
    replicas = int(data) * int(context)
    if shards is None:
        return replicas
    of = f"data={data}" + f" x context={context}" * (context > 1)
    check_divisor(f"shards={shards!r} does", shards, replicas, f"{of} replicas into equal groups")
    return int(shards)


def check_divisor(what: str, number: Any, whole: int, parts: str) -> None:
    """Raise ValueError, "`what` not divide `parts`", unless a number divides the `whole`."""
    if not is_whole(number) or whole % number:
        near = ", ".join(str(one) for one in range(1, whole + 1) if not whole % one)
        raise ValueError(f"{what} not divide {parts}: {near} would do")


def stage_grids(kind: type[Scheme], ranks: int, stages: int,
                grid: Sizes | Sequence[Sizes] | None = None) -> tuple[GridShape, ...]:
    """Return the grid of each stage; parameters and errors as in `Mesh`."""
    check_divisor(f"{stages} stages do", stages, ranks, f"{ranks} ranks into equal groups")
    stages = int(stages)
    share = ranks // stages
    if grid is None:
        grid = kind.default_grid(share)
    if not hasattr(grid, "__iter__"):
        raise ValueError(f"grid={grid!r}: sizes in a tuple would do, or one for each stage")
    same = isinstance(grid, GridShape) or not any(isinstance(one, (tuple, list, GridShape))
                                                  for one in grid)
    grids = [kind.grid_shape(one) for one in ([grid] * stages if same else grid)]
    if len(grids) != stages:
        raise ValueError(f"{len(grids)} grids for {stages} stages: one, or one each, would do")
    for k, one in enumerate(grids):
        if one.ranks != share:
            raise ValueError(f"a grid of {one} has {one.ranks} ranks, but stage {k} has {share}")
        kind.check_grid(one)
    return tuple(grids)


class DataGrid(GridAxes):
    """Extend the grid of a tensor parallelism by the directions of data parallelism.

    Direction d joins the ranks among which ZeRO divides one copy of the model, and r the ranks
    with the same part of the other copies.  Sums along both add in the order of the ranks, except
    with NCCL.  Its traffic is counted along r, d and e.

    Experts that are divided among replicas have a grid of their own on the same ranks, see
    `with_experts`: e joins neighbouring replicas with different experts, and d and r replicas with
    copies of the same experts.

    Where positions of sequences are divided there is another one with direction c alone, which
    joins neighbouring replicas with the same sequences and each other positions of them.

    All ranks of `comm`, those of this stage in all replicas, replica by replica, create it; the
    tensor parallelism of this replica has the `grid`.  `sizes` are of d, and e if there is one, or
    of c; their product divides the number of replicas.  The `stages` of a replica multiply the
    `stride` along these.  `shape` and `coords` are of them, and of the directions of `grid`.
    """

    def __init__(self, comm: Any, grid: Grid, sizes: dict[str, int], stages: int = 1) -> None:
        copies = comm.size // grid.size // math.prod(sizes.values())
        self.comm, self.grid, self.backend, self.stages = comm, grid, grid.backend, stages
        self.shape = GridShape.from_sizes({"r": copies} | sizes | dict(grid.shape))
        self.coords = self.shape.coordinates(comm.rank)
        sums = "c" not in sizes
        self.axes = self._create_axes(["r"] * sums + [*sizes], ordered=sums)

    def __getitem__(self, name: str) -> Axis:
        return self.axes[name] if name in self.axes else self.grid[name]

    def stride(self, name: str) -> int:
        return self.shape.stride(name) * (self.stages if name in self.axes else 1)

    @property
    def replicas(self) -> list[Axis]:
        """Return the directions along which ranks have other sequences, the slowest first."""
        return list(self.axes.values())

    def with_experts(self, parts: int) -> "DataGrid":
        """Return the grid of experts that every `parts` neighbouring replicas divide.

        ZeRO divides a rank's experts further, among `expert_shards` of their copies: with n shards
        among n / parts where that is a whole number, and not at all where n divides `parts`.
        """
        return DataGrid(self.comm, self.grid, {
            "d": expert_shards(self.shape["d"], parts), "e": parts}, self.stages)


def expert_shards(shards: int, parts: int) -> int:
    """Return among how many copies ZeRO divides experts that `parts` replicas divide already.

    Both numbers divide the number of replicas, and so does `parts` times the result: their least
    common multiple.
    """
    return math.lcm(shards, parts) // parts
