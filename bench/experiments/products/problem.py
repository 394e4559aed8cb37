"""Set up distributed products alone: C = A B, A B^T or A^T B by a scheme's algorithms."""

from typing import Any, Callable, Sequence

import numpy as np
from mpi4py import MPI

from bench.checks.freivalds import DistributedMatrix
from bench.experiments.products import operands
from bench.records.kinds.products import copied_along
from mm3d.arrays.backend import Array, Backend
from mm3d.grid.grid import Grid
from mm3d.grid.shape import GridShape
from mm3d.schemes import algorithms_with_products, find_scheme
from mm3d.schemes.matrix_product import GRADIENT_PRODUCTS, LOCAL_PRODUCTS
from mm3d.tracing.observe import observed


def product_grid(scheme: str, comm, sizes: Sequence[int] | GridShape | None = None,
                 backend: str | Backend | None = None) -> Grid:
    """Make the grid on which a scheme computes products, by default of the scheme's own sizes.

    Raises ValueError when the ranks do not fit the grid, or the scheme has no products of plain
    matrices.
    """
    cls = algorithms_with_products().get(scheme)
    if cls is None:
        find_scheme(scheme)    # raises its error for a name that nothing has
        raise ValueError(f"scheme {scheme!r} has no products of plain matrices: choose one of "
                         f"{', '.join(algorithms_with_products())}")
    sizes = sizes or cls.default_grid(comm.size)
    if len(sizes) != len(cls.directions):
        raise ValueError(f"--grid {'x'.join(map(str, sizes))}: scheme {scheme} has "
                         f"the directions {', '.join(cls.directions)}: name a size for each")
    grid = cls.grid_shape(sizes)
    cls.check_grid(grid)
    return Grid(comm, backend, **grid)


class Problem:
    """One distributed product: this rank's blocks of random matrices, and the scheme's algorithm.

    Parameters
    ----------
    grid : Grid
        The ranks; see `product_grid`.
    shape : tuple of int
        M, N, K: C is M x K, the sum has N terms.
    seed : int
        The seed of the numbers in A, B and dC.
    """

    def __init__(self, scheme: str, form: str, grid: Grid, shape: tuple[int, int, int],
                 dtype: str, seed: int = 0) -> None:
        self.scheme, self.form, self.grid, self.dtype = scheme, form, grid, dtype
        self.product = algorithms_with_products()[scheme].matrix_product(grid, form, shape)
        self.layouts, self.shapes = self.product.layouts, self.product.shapes
        self.blocks = {name: operands.fill(
            operands.allocate(self.layouts[name], grid, self.shapes[name], dtype, direction),
            grid.backend, seed, name, grid.shape.rank(self._first_copy(name)))
            for name, direction in self.product.directions.items()}

    def copied_along(self, name: str) -> str:
        """Return the directions along which all ranks store the same block of A, B or C."""
        return copied_along(self.layouts[name], self.grid.shape)

    def _first_copy(self, name: str) -> dict[str, int]:
        """Return the coordinates of the first rank that stores this rank's block of a matrix."""
        return {**self.grid.coords, **dict.fromkeys(self.copied_along(name), 0)}

    def forward(self) -> dict[str, Array]:
        """Compute this rank's block of C."""
        return {"C": self.product.forward(self.blocks["A"], self.blocks["B"])}

    def backward(self) -> dict[str, Array]:
        """Compute this rank's blocks of dA and dB."""
        dA, dB = self.product.backward(*(self.blocks[name] for name in "CAB"))
        return {"dA": dA, "dB": dB}

    def distributed(self, name: str, block: Array | None = None) -> DistributedMatrix:
        """Return A, B or C for `bench.checks.freivalds`: as drawn, or the `block` of a result.

        Of copies only the first counts: other ranks have empty blocks.
        """
        host = self.grid.backend.to_host(self.blocks[name] if block is None else block)
        place = self.layouts[name].slices(self.grid, self.shapes[name])
        if self._first_copy(name) != self.grid.coords:
            host, place = host[:0, :0], (slice(0, 0), slice(0, 0))
        return DistributedMatrix(host, place, self.shapes[name], self.grid.comm)

    def copies_differ(self, name: str, block: Array) -> float:
        """Compute the largest difference of copies over the largest element; every rank calls it.
        """
        host = np.ascontiguousarray(self.grid.backend.to_host(block))
        worst = 0.0
        for direction in self.copied_along(name):
            first = host.copy()
            self.grid[direction].comm.Bcast([first, MPI.BYTE])
            worst = max(worst, np.nan_to_num(np.abs(host - first).max(initial=0), nan=np.inf))
        largest = float(np.abs(host).max(initial=0))
        worst, largest = (self.grid.comm.allreduce(one, MPI.MAX) for one in (worst, largest))
        return worst / largest if worst else 0.0

    def factors(self, result: str) -> tuple[DistributedMatrix, DistributedMatrix]:
        """Return the two matrices whose plain product is C, dA or dB."""
        form, names = {"C": (self.form, "AB"), "dA": GRADIENT_PRODUCTS[self.form][0],
                       "dB": GRADIENT_PRODUCTS[self.form][1]}[result]
        left, right = map(self.distributed, names)
        return left.T if form == "atb" else left, right.T if form == "abt" else right


class WholeProduct:
    """The same product on one process: whole matrices, filled with random numbers."""

    def __init__(self, problem: Problem, seed: int) -> None:
        backend = problem.grid.backend
        self.form = problem.form
        self.blocks = {
            name: operands.fill(backend.empty(shape, problem.dtype), backend, seed, name)
            for name, shape in problem.shapes.items()}

    def forward(self) -> Array:
        """Compute C."""
        return LOCAL_PRODUCTS[self.form](self.blocks["A"], self.blocks["B"])

    def backward(self) -> tuple[Array, Array]:
        """Compute dA and dB."""
        dA, dB = (LOCAL_PRODUCTS[form](*(self.blocks[name] for name in names))
                  for form, names in GRADIENT_PRODUCTS[self.form])
        return dA, dB


class LocalProducts:
    """The local matrix products of a step on `grid` alone, which bound its speed.

    They are observed while `step` runs; operands of equal shape and order share memory.
    """

    def __init__(self, step: Callable[[], Any], grid: Grid, dtype: str) -> None:
        backend, operands_of_step = grid.backend, operands.OperandShapes()
        with observed(grid, operands_of_step):
            self.result = step()
        made: dict[tuple, Array] = {}

        def operand(place: int, shape: tuple[int, int], transposed: bool) -> Array:
            key = place, shape, transposed
            if key not in made:
                a = backend.empty(shape[::-1] if transposed else shape, dtype)
                operands.fill(a, backend, place)
                made[key] = a.T if transposed else a
            return made[key]

        self.backend = backend
        self.calls = [(operand(0, *a), operand(1, *b), backend.empty((a[0][0], b[0][1]), dtype))
                      for a, b in operands_of_step.found]

    def __call__(self) -> None:
        """Compute all products."""
        for a, b, out in self.calls:
            self.backend.xp.matmul(a, b, out=out)
