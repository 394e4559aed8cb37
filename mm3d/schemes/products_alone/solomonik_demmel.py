"""Implement the 2.5-D product of Solomonik and Demmel (2011) on a q x q x c grid.

*Communication-Optimal Parallel 2.5D Matrix Multiplication and LU Factorization Algorithms*,
Euro-Par 2011: both operands are copied to all c layers of ranks, each layer computes q / c of the
q steps of Cannon's product, and their sums are added.  More copies need more memory and move fewer
words, about 2 n^2 / sqrt(c P) a rank.  Here each rank stores 1/P of every matrix and the copies
are made by all-gathers along z, where the original has everything on the first layer and
broadcasts it.  Tesseract, the scheme called 2.5d elsewhere, divides rows by depth instead and
copies only B.
"""

import math
from typing import Mapping

from mm3d.arrays.backend import Array
from mm3d.arrays.blocks import block_lengths, block_starts
from mm3d.grid.shape import GridShape
from mm3d.schemes.closed_form import Move
from mm3d.schemes.matrix_product import FORMS, element_counts
from mm3d.schemes.products_alone import ProductAlone
from mm3d.schemes.products_alone.cannon import CannonMatrixProduct, travel_moves


def layer_steps(sizes: Mapping[str, int], layer: int) -> range:
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
        steps = layer_steps(self.grid.shape, self.grid.z.rank)
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
                         in travel_moves(sizes, form, shape, layer_steps(sizes, layer))]


class SolomonikDemmel(ProductAlone):
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
