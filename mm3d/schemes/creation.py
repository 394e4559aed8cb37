"""Create a scheme by its name."""

from typing import Any

from mpi4py import MPI

from mm3d import launcher
from mm3d.arrays.backend import Backend
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme
from mm3d.schemes.scheme import Scheme


def scheme(name: str, comm: MPI.Intracomm | None = None,
           grid: tuple[int, ...] | GridShape | None = None,
           backend: str | Backend | None = None, **options: Any) -> Scheme:
    """Create the scheme called `name` on the ranks of `comm`.

    A program that creates many calls ``scheme.grid.free()`` on every rank when one is not used any
    more: MPI has a few thousand communicators at most.

    Parameters
    ----------
    name : str
        "serial", "1d" (Megatron-LM), "1d-sp" (with sequence parallelism), "2d" (SUMMA as in
        Optimus), "2d-pipelined", "2.5d" (Tesseract), "3d" (the paper's, on any X x Y x Z grid)
        or "faces" (3-D with operands on faces of the grid).
    comm : mpi4py.MPI.Intracomm, optional
        The world, if not given.
    grid : tuple of int or GridShape, optional
        Sizes of the grid's directions; by default all ranks in a line (1d), a square (2d), a
        cube (3d, faces), or squares in layers (2.5d).
    backend : str or Backend, optional
        "numpy" or "cupy"; ``MM3D_BACKEND`` or NumPy if not given.
    **options
        Options of the scheme, such as ``keep`` of `mm3d.schemes.cube.Cube`; see `Scheme.options`.

    Raises
    ------
    ValueError
        On every rank alike, when no scheme has that name, the ranks do not fit the grid, an
        option is unknown, or arguments differ between ranks.
    """
    comm = comm if comm is not None else MPI.COMM_WORLD
    launcher.check_launcher(comm.size if comm == MPI.COMM_WORLD else None)
    return find_scheme(name)(comm, grid, backend, **options)
