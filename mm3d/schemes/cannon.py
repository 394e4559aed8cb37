"""Implement Cannon's product (1969), and its steps divided among layers of ranks.

On a q x q grid blocks are aligned, then shifted q - 1 times.

x numbers the rows of the grid, y its columns; rank (i, j) stores block (i, j) of each matrix.  In
C = A B the blocks of A and B travel, each to the neighbour, and C stays.  In the other forms the
operand that has C's rows and columns crossed stays, and C travels instead.  `held` is the number
of the blocks that a rank holds, i + j + step modulo q.

The 2.5-D product of Solomonik and Demmel (*Communication-Optimal Parallel 2.5D Matrix
Multiplication and LU Factorization Algorithms*, Euro-Par 2011) copies both operands to all c
layers of a q x q x c grid.  Each computes q / c of the q steps, and their sums are added.  More
copies need more memory and move fewer words, about 2 n^2 / sqrt(c P) a rank.  Here each rank
stores 1/P of every matrix and the copies are made by all-gathers along z, where the original has
everything on the first layer and broadcasts it.
"""

import math
from typing import Mapping

from mm3d.arrays.backend import Array
from mm3d.arrays.blocks import block_lengths, block_starts
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.grid.shape import GridShape
from mm3d.grid.split import Split
from mm3d.schemes.closed_form import Move
from mm3d.schemes.matrix_product import FORMS, element_counts
from mm3d.schemes.scheme import GridAlgorithm
from mm3d.schemes.summa import MOVED_MATRICES, BlockMatrixProduct, Summa


def ab(A: Array, B: Array, a: Split, b: Split, steps: range) -> Array:
    """Compute the terms t of C_ij = sum_t A_it B_tj: A travels along y, B along x."""
    i, j = b.axis.rank, a.axis.rank
    A = a.shift(A, j, i + steps.start)
    B = b.shift(B, i, j + steps.start)
    C = matmul(A, B)
    for held in range(i + j + steps.start, i + j + steps.stop - 1):
        A = a.shift(A, held, 1)
        B = b.shift(B, held, 1)
        C += matmul(A, B)
    return C


def abt(A: Array, B: Array, c: Split, b: Split, steps: range) -> Array:
    """Compute terms of C_it = sum_j A_ij B_tj^T: C travels along y, B along x."""
    i, j = b.axis.rank, c.axis.rank
    held = i + j + steps.start
    B = b.shift(B, i, j + steps.start)
    C = matmul_nt(A, B)
    for held in range(held, i + j + steps.stop - 1):
        B = b.shift(B, held, 1)
        C = c.shift(C, held, 1)
        C += matmul_nt(A, B)
    held = i + j + steps.stop - 1
    return c.shift(C, held, j - held)


def atb(A: Array, B: Array, a: Split, c: Split, steps: range) -> Array:
    """Compute terms of C_tj = sum_i A_it^T B_ij: A travels along y, C along x."""
    i, j = c.axis.rank, a.axis.rank
    A = a.shift(A, j, i + steps.start)
    C = matmul_tn(A, B)
    for held in range(i + j + steps.start, i + j + steps.stop - 1):
        A = a.shift(A, held, 1)
        C = c.shift(C, held, 1)
        C += matmul_tn(A, B)
    held = i + j + steps.stop - 1
    return c.shift(C, held, i - held)


class CannonMatrixProduct(BlockMatrixProduct):
    """Compute C = A B, A B^T or A^T B of matrices, each divided into q x q blocks."""

    DIRECTIONS = dict.fromkeys(FORMS, (None, None, None))
    ALGORITHMS = {"ab": ab, "abt": abt, "atb": atb}

    def _multiply(self, form: str, names: str, blocks: dict[str, Array]) -> Array:
        return self._travel(form, names, *(blocks[name] for name in names[:2]),
                            range(self.grid.x.size))

    def _travel(self, form: str, names: str, first: Array, second: Array, steps: range) -> Array:
        """Compute some steps of a product from the blocks of both operands."""
        return self.ALGORITHMS[form](first, second, *self._moved_splits(form, names), steps)

    @classmethod
    def forward_moves(cls, sizes: Mapping[str, int], form: str,
                      shape: tuple[int, int, int]) -> list[Move]:
        """List the shifts of the two matrices that travel."""
        return travel_moves(sizes, form, shape, range(sizes["x"]))


def travel_moves(sizes: Mapping[str, int], form: str, shape: tuple[int, int, int],
                 steps: range) -> list[Move]:
    """List the shifts of some steps on one q x q grid.

    Between the steps whole matrices move.  To align one, each row (column) of blocks moves by
    another number of places, and one does not move: row (column) -t for an operand that begins
    at step t, 1 - t for C after the last step t - 1.
    """
    q, extents, counts = sizes["x"], dict(zip("MNK", shape)), element_counts(form, shape)
    found = []
    for place, (direction, name) in enumerate(zip("yx", MOVED_MATRICES[form])):
        letters = FORMS[form]["ABC".index(name)]
        blocks = block_lengths(extents[letters[place]], q)
        still = blocks[(1 - steps.stop if name == "C" else -steps.start) % q]
        words = len(steps) * counts[name] - still * (counts[name] // max(1, sum(blocks)))
        found.append(Move(direction, "all_to_all", words, len(steps)))
    return found


class Cannon(GridAlgorithm):
    """Shift blocks of matrices over a square of ranks."""

    name = "cannon"
    title = "Cannon"
    directions = "xy"
    matrix_product = CannonMatrixProduct
    default_grid = Summa.default_grid

    @classmethod
    def check_grid(cls, grid: GridShape) -> None:
        if grid["x"] != grid["y"]:
            raise ValueError(f"product 'cannon' needs a square grid, not {grid}")


def _layer_steps(sizes: Mapping[str, int], layer: int) -> range:
    """Return the steps of Cannon's product that a layer computes."""
    counts = block_lengths(sizes["x"], sizes["z"])
    start = block_starts(counts)[layer]
    return range(start, start + counts[layer])


class SolomonikDemmelMatrixProduct(CannonMatrixProduct):
    """Compute C = A B, A B^T or A^T B of matrices in q x q blocks, with rows divided along z."""

    LAYOUTS = dict.fromkeys(FORMS, ("xz,y", "xz,y", "xz,y"))
    DIRECTIONS = dict.fromkeys(FORMS, "zzz")

    def _multiply(self, form: str, names: str, blocks: dict[str, Array]) -> Array:
        first, second = (self.split(name).all_gather(blocks[name]) for name in names[:2])
        steps = _layer_steps(self.grid.shape, self.grid.z.rank)
        return self.split(names[2]).reduce_scatter(
            self._travel(form, names, first, second, steps))

    @classmethod
    def forward_moves(cls, sizes: Mapping[str, int], form: str,
                      shape: tuple[int, int, int]) -> list[Move]:
        """List the gathers of A and B, the shifts within every layer, and the scatter of C."""
        c, kinds = sizes["z"], ("all_gather", "all_gather", "reduce_scatter")
        copies = [Move("z", kind, (c - 1) * count)
                  for kind, count in zip(kinds, element_counts(form, shape).values())]
        return copies + [move for layer in range(c) for move
                         in travel_moves(sizes, form, shape, _layer_steps(sizes, layer))]


class SolomonikDemmel(GridAlgorithm):
    """Copy both operands to c layers of q x q ranks, which share the steps of the product."""

    name = "2.5d-sd"
    title = "2.5-D, Solomonik and Demmel"
    directions = "xyz"
    matrix_product = SolomonikDemmelMatrixProduct

    @classmethod
    def default_grid(cls, ranks: int) -> tuple[int, ...]:
        for c in range(round(ranks ** (1 / 3)), 0, -1):
            q = math.isqrt(ranks // c)
            if q * q * c == ranks and c <= q:
                return (q, q, c)
        raise ValueError(f"{ranks} ranks are no q x q x c with c of at most q: start "
                         f"{math.isqrt(ranks) ** 2} or {(math.isqrt(ranks) + 1) ** 2}")

    @classmethod
    def check_grid(cls, grid: GridShape) -> None:
        if grid["x"] != grid["y"] or grid["z"] > grid["x"]:
            raise ValueError(f"product '2.5d-sd' needs q x q x c ranks with c of at most q, "
                             f"not {grid}")
