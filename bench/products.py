"""The distributed products alone: C = A B, A B^T or A^T B by the 3-D, 2-D and 1-D schemes."""

from typing import Any, Callable

import numpy as np

from bench import operands
from bench.residual import Distributed
from mm3d.axis import Split
from mm3d.backend import Array, Backend, matmul, matmul_nt, matmul_tn
from mm3d.contract import lookup
from mm3d.grid import Grid
from mm3d.layout import Layout
from mm3d.schemes import cube, summa

LOCAL = {"ab": matmul, "abt": matmul_nt, "atb": matmul_tn}
SHAPES = {"ab": ("MN", "NK", "MK"), "abt": ("MN", "KN", "MK"), "atb": ("NM", "NK", "MK")}

# The gradients are products again: the form of dA and of dB, and their operands.
BACKWARD = {"ab": (("abt", "CB"), ("atb", "AC")), "abt": (("ab", "CB"), ("atb", "CA")),
            "atb": (("abt", "BC"), ("ab", "AC"))}

# Of A, B and C.  Every scheme starts from one copy of A and B and ends with one of C; 1-D
# gathers A, against columns of op(B), as Megatron-LM with sequence parallelism does.
LAYOUTS = {
    "3d": {"ab": ("xy,z", "z,yx", "xz,y"), "abt": ("xy,z", "y,zx", "xz,y"),
           "atb": ("xz,y", "xy,z", "y,zx")},
    "2d": dict.fromkeys(SHAPES, ("x,y", "x,y", "x,y")),
    "1d": {"ab": ("x,", ",x", ",x"), "abt": ("x,", "x,", ",x"), "atb": ("x,", ",x", ",x")}}
# Along which A, B and C (or dC) travel; None where a matrix stays.
DIRECTIONS = {"3d": {"ab": "yxz", "abt": "yxz", "atb": "zyx"},
              "2d": dict.fromkeys(SHAPES, ("y", "x", None)),
              "1d": dict.fromkeys(SHAPES, ("x", None, None))}
# What SUMMA broadcasts, or where it is C reduces, along the rows and along the columns of ranks.
SUMMA = {"ab": "AB", "abt": "CB", "atb": "AC"}


class Problem:
    """This rank's blocks of one product, and how the scheme computes it.

    Parameters
    ----------
    scheme, form : str
        Such as "3d" and "ab".
    comm : mpi4py.MPI.Intracomm
        The ranks.
    sizes : tuple of int or None
        Of the grid's directions; the scheme's own choice if None.
    shape : tuple of int
        M, N, K: C is M x K, the sum has N terms.
    dtype : str
        Of all matrices.
    seed : int
        Of the numbers in A, B and dC.
    backend : str, Backend or None
        The array library.

    Raises
    ------
    ValueError
        When the ranks do not fit the grid.
    """

    def __init__(self, scheme: str, form: str, comm, sizes: tuple[int, ...] | None,
                 shape: tuple[int, int, int], dtype: str, seed: int,
                 backend: str | Backend | None) -> None:
        cls = lookup(scheme)
        sizes = sizes or cls.default_grid(comm.size)
        if len(sizes) != len(cls.directions):
            raise ValueError(f"--grid {'x'.join(map(str, sizes))}: scheme {scheme} has "
                             f"the directions {', '.join(cls.directions)}: name a size for each")
        cls.check_grid(sizes)
        self.grid = Grid(comm, backend, **dict(zip(cls.directions, sizes)))
        self.scheme, self.form, self.dtype = scheme, form, dtype
        extents = dict(zip("MNK", shape))
        self.shapes = {name: tuple(extents[n] for n in letters)
                       for name, letters in zip("ABC", SHAPES[form])}
        self.layouts = dict(zip("ABC", map(Layout, LAYOUTS[scheme][form])))
        letters = DIRECTIONS[scheme][form]
        self.blocks = {name: operands.fill(
            operands.empty(self.layouts[name], self.grid, self.shapes[name], dtype, letter),
            self.grid.backend, seed, name, comm.rank) for name, letter in zip("ABC", letters)}
        self.observe(lambda split, name: split)

    def observe(self, named: Callable[[Split, str], Split]) -> None:
        """Let `named` replace each Split, of which it learns the matrix that travels over it."""
        self._named = named
        if self.scheme == "3d":
            self._splits = [
                named(self.layouts[name].split(self.grid, self.shapes[name], letter), name)
                for name, letter in zip("ABC", DIRECTIONS["3d"][self.form])]

    def forward(self) -> dict[str, Array]:
        """This rank's block of C."""
        A, B = self.blocks["A"], self.blocks["B"]
        if self.scheme == "3d":
            return {"C": getattr(cube, self.form)(A, B, *self._splits)}
        if self.scheme == "2d":
            return {"C": self._summa(self.form, "ABC")}
        return {"C": LOCAL[self.form](self._rows().all_gather(A), B)}

    def backward(self) -> dict[str, Array]:
        """This rank's blocks of dA and dB."""
        A, B, dC = (self.blocks[name] for name in "ABC")
        if self.scheme == "3d":
            found = getattr(cube, f"{self.form}_backward")(dC, A, B, *self._splits)
            return dict(zip(("dA", "dB"), found))
        (first, left), (second, right) = BACKWARD[self.form]
        if self.scheme == "2d":
            return {"dA": self._summa(first, left + "A"), "dB": self._summa(second, right + "B")}
        dA = self._rows().reduce_scatter(LOCAL[first](*(self.blocks[name] for name in left)))
        whole = {"A": self._rows().all_gather(A), "B": B, "C": dC}
        return {"dA": dA, "dB": LOCAL[second](*(whole[name] for name in right))}

    def _rows(self) -> Split:
        return self._named(self.layouts["A"].split(self.grid, self.shapes["A"], "x"), "A")

    def _summa(self, form: str, names: str) -> Array:
        """The product whose A, B and C are the matrices `names`."""
        first, second = names[:2]
        travels = dict(zip("ABC", names))
        a, b = (travels[letter] for letter in SUMMA[form])
        return getattr(summa, form)(
            self.blocks[first], self.blocks[second],
            self._named(self.grid.y.split(-1, self.shapes[first][1]), a),
            self._named(self.grid.x.split(0, self.shapes[second][0]), b))

    def distributed(self, name: str, block: Array | None = None) -> Distributed:
        """A, B or C for `bench.residual`: what was drawn, or the `block` of a result."""
        block = self.blocks[name] if block is None else block
        return Distributed(self.grid.backend.to_host(block),
                           self.layouts[name].slices(self.grid, self.shapes[name]),
                           self.shapes[name], self.grid.comm)

    def factors(self, result: str) -> tuple[Distributed, Distributed]:
        """The two matrices whose plain product is C, dA or dB."""
        form, names = {"C": (self.form, "AB"), "dA": BACKWARD[self.form][0],
                       "dB": BACKWARD[self.form][1]}[result]
        left, right = map(self.distributed, names)
        return left.T if form == "atb" else left, right.T if form == "abt" else right


class Whole:
    """The same product on one process: whole matrices, of random numbers of their own."""

    def __init__(self, problem: Problem, seed: int) -> None:
        backend = problem.grid.backend
        self.form = problem.form
        self.blocks = {
            name: operands.fill(backend.empty(shape, problem.dtype), backend, seed, name)
            for name, shape in problem.shapes.items()}

    def forward(self) -> Array:
        """C."""
        return LOCAL[self.form](self.blocks["A"], self.blocks["B"])

    def backward(self) -> tuple[Array, Array]:
        """dA and dB."""
        dA, dB = (LOCAL[form](*(self.blocks[name] for name in names))
                  for form, names in BACKWARD[self.form])
        return dA, dB


class Replay:
    """The local matrix products of a step of `problem`, and nothing else: its ceiling.

    They are recorded while `step` runs; operands of equal shape and order share memory.
    """

    def __init__(self, step, backend, dtype: str) -> None:
        seen: list[tuple[tuple, tuple]] = []
        gemm = backend.gemm

        def recorder(a: Array, b: Array, *out: Array) -> Array:
            seen.append(tuple((tuple(m.shape), _transposed(m)) for m in (a, b)))
            return gemm(a, b, *out)

        backend.gemm = recorder
        try:
            self.result = step()
        finally:
            del backend.gemm
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
                      for a, b in seen]

    def __call__(self) -> None:
        """Do them all."""
        for a, b, out in self.calls:
            self.backend.xp.matmul(a, b, out=out)


def _transposed(a: Any) -> bool:
    """Whether the columns lie contiguously, not the rows."""
    rows, columns = np.shape(a)
    return rows > 1 and columns > 1 and a.strides[0] < a.strides[1]
