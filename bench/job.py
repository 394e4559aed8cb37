"""What a job of ``run`` is to do: its options, its rows, and the grid of each."""

import math
from pathlib import Path
from typing import Callable, ContextManager, TypeVar

import msgspec

from bench import model, placement, variants
from bench.cases import Case, Row, UsageError, case, equal_tokens, named, select
from bench.variants import Variant
from bench.verbs import grids
from bench.watch import unwatched
from mm3d import backend as backends
from mm3d import timing
from mm3d.contract import lookup

Made = TypeVar("Made")


class Options(msgspec.Struct, frozen=True):
    """What is the same for every row of a job."""

    out: Path
    warmup: int
    limits: timing.Limits
    order: int
    backend: str | None
    seed: int
    traced: int
    grid: str | None = None
    machine: str = "cpu"
    inside: str = "auto"
    stop_file: str | None = None
    trace: str | None = None
    cases: int = 1
    watched: Callable[..., ContextManager] = unwatched
    recompute: str = "none"

    def stop(self) -> bool:
        """Whether somebody wants an end."""
        return self.stop_file is not None and Path(self.stop_file).exists()


def selected(arguments, ranks: int) -> list[Row]:
    """The rows that the options name, of a scheme that the paper lacks on so many ranks.

    Raises
    ------
    UsageError
        When a name is unknown, or rows are named in both ways.
    """
    if arguments.rows is None:
        rows = select(arguments.table, arguments.scheme, ranks)
        return rows + (equal_tokens(rows) if arguments.equal_tokens else [])
    for option in ("table", "scheme"):
        value = getattr(arguments, option)
        if value != "all":
            raise UsageError(f"--rows {arguments.rows} --{option} {value}: leave one of them out; "
                             f"--rows names both the table and the scheme")
    rows = named(arguments.rows, ranks)
    return rows + (equal_tokens(rows) if arguments.equal_tokens else [])


def left_out(pairs: str | None, ranks: int) -> list[str]:
    """A line for each of the `pairs` of ``--rows`` without a row for `ranks` ranks."""
    lines = []
    for pair in dict.fromkeys(pairs.split(",") if pairs else ()):
        counts = sorted({row.gpus for row in named(pair, ranks)})
        if ranks not in counts:
            lines.append(f"left out: {pair.strip()} of --rows, which has no row for {ranks} "
                         f"rank{'s' * (ranks > 1)}: its rows are for "
                         f"{', '.join(map(str, counts))}")
    return lines


def fitting(rows: list[Row], ranks: int, arguments, variant: Variant) -> list[Case]:
    """The cases of those of `rows` that are for `ranks` ranks, in this variant.

    Raises
    ------
    UsageError
        When there are none.
    """
    sizes = {name: getattr(arguments, name)
             for name in ("layers", "hidden", "heads", "batch", "seq")}
    cases = [case(row, arguments.preset, variant, **sizes) for row in rows if row.gpus == ranks]
    if cases:
        return cases
    counts = sorted({row.gpus for row in rows})
    chosen = (f"--rows {arguments.rows}" if arguments.rows is not None else
              f"--table {arguments.table} --scheme {arguments.scheme}")
    message = (f"no row of {chosen} is for {ranks} rank{'s' * (ranks > 1)}: there are rows for "
               f"{', '.join(map(str, counts))} ranks, as in mpirun -n {counts[0]} python -m bench "
               f"run")
    if ranks == 1:
        message += (". If more ranks were started, the launcher started worlds of one: mpirun and "
                    "mpi4py belong to different MPI libraries; use the mpirun of the MPI that "
                    "this Python's mpi4py loads")
    raise UsageError(message)


def verifiable(cases: list[Case]) -> list[Case]:
    """The cases themselves.

    Raises
    ------
    UsageError
        When a result could not be verified: in 16 bits a step is compared with the serial
        scheme's alone, not by residuals.
    """
    for one in cases:
        if one.verified != one.sizes and one.variant.dtype in variants.SIXTEEN:
            raise UsageError(f"--dtype {one.variant.dtype} --preset {one.preset}: a serial model "
                             f"of that size does not fit, and residuals of a step are for "
                             f"float32 and float64; choose --preset laptop or tiny")
    return cases


def everywhere(make: Callable[[], Made], comm) -> Made:
    """What `make` gives on each rank.

    Raises
    ------
    UsageError
        The same on every rank, when one cannot have it: a ValueError or an OSError there.
    """
    made = problem = None
    try:
        made = make()
    except (ValueError, OSError) as error:
        problem = str(error)
    problems = [text for text in comm.allgather(problem) if text]
    if problems:
        raise UsageError(f"{problems[0]} ({len(problems)} of {comm.size} ranks)")
    return made


def usable(backend: str | None, comm) -> None:
    """Raise the same UsageError everywhere when some rank cannot use the array library."""
    everywhere(lambda: backends.get(backend), comm)


def variant_of(arguments, rows: list[Row]) -> Variant:
    """How rows are computed, on arrays of the library that is asked for.

    Raises
    ------
    UsageError
        When the rows' schemes, or the library, cannot.
    """
    library = backends.get(arguments.backend)
    variant = variants.asked_for(arguments, library)
    if problem := variants.problem(variant, (row.scheme for row in rows), library,
                                   arguments.recompute):
        raise UsageError(problem)
    return variant


def arranged(one: Case, options: Options, comm) -> tuple[dict[str, int], str]:
    """The grid's directions and sizes, and their order over the nodes.

    Raises
    ------
    ValueError
        When they do not fit the scheme.
    """
    kind = lookup(one.row.scheme)
    sizes = chosen_grid(one, options, comm) or kind.default_grid(comm.size)
    if (len(sizes) != len(kind.directions) or math.prod(sizes) != comm.size
            or min(sizes) < 1):
        raise ValueError(f"--grid {options.grid}: scheme {kind.name!r} has the directions "
                         f"{', '.join(kind.directions)}, whose sizes must multiply to the "
                         f"{comm.size} ranks")
    kind.check_grid(sizes)
    shape = dict(zip(kind.directions, sizes))
    return shape, placement.order(options.inside, kind.name, shape,
                                  msgspec.structs.asdict(one.sizes))


def chosen_grid(one: Case, options: Options, comm) -> tuple[int, ...] | None:
    """What ``--grid`` says, for the planner's choice (of rank 0) where it says auto."""
    if options.grid is None:
        return None
    return of_rank_0(lambda: grids.grid(
        options.grid, one.row.scheme, comm.size, options.machine, one.variant.dtype,
        msgspec.structs.asdict(one.sizes), options.recompute), comm)


def planned_for(arguments, comm) -> str:
    """The machine that ``--grid auto`` plans for.

    Raises
    ------
    UsageError
        On every rank, when nothing is planned for ``--machine``, there is no such machine, or it
        has no rate for the dtype.
    """
    name = arguments.machine or "cpu"
    if arguments.grid == "auto":
        of_rank_0(lambda: model.load(name, arguments.dtype), comm)
    elif arguments.machine:
        raise UsageError(f"--machine {name}: only --grid auto plans for a machine; give both, or "
                         f"leave --machine out")
    return name


def of_rank_0(make: Callable[[], Made], comm) -> Made:
    """What `make` gives on rank 0; UsageError on every rank, when it is a ValueError there."""
    made = problem = None
    if comm.rank == 0:
        try:
            made = make()
        except ValueError as error:
            problem = str(error)
    made, problem = comm.bcast((made, problem))
    if problem:
        raise UsageError(problem)
    return made
