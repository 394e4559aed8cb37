"""The distributed products, forward and backward: the same bits as one rank's, in every form."""
from itertools import cycle

import numpy as np
import pytest

import mm3d
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.schemes import cube
from mm3d.schemes.closed_form import Move, ProductShape
from products import FORMS, Case
from reference import (GRIDS, SHAPES, every_grid, grids, grids_and_squares, integers, moved,
                       schemes, words)

pytestmark = pytest.mark.usefixtures("transport")
KEEP = cube.Cube.options["keep"].choices


# --- Algorithms 1 to 6 ---------------------------------------------------------------------

@every_grid
@pytest.mark.parametrize("name, order", [*zip(FORMS, ("xyz", "zyx", "yzx"))])
def test_each_form_and_its_backward(comm, name, order):
    """Bits; and words on each rank: forward, A, B and C cross one direction each, backward dC is
    gathered once, A and B once more, and both gradients are scattered where A and B were
    gathered.  The directions of a form may be called anything."""
    for grid in grids(comm):
        for sizes in SHAPES:
            case = Case(name, order, grid, sizes)
            A, B, C = [moved(spec, letter, shape, grid) for spec, letter, shape
                       in zip(case.specs, case.letters, case.shapes)]
            a, b, c = case.letters
            words_of = [{(a, "all_gather"): A, (b, "all_gather"): B, (c, "reduce_scatter"): C},
                        {(a, "all_gather"): A, (b, "all_gather"): B, (c, "all_gather"): C,
                         (a, "reduce_scatter"): A, (b, "reduce_scatter"): B}]
            left, right, d = map(case.local, range(3))
            splits, found = (case.a, case.b, case.c), []
            for compute, operands, expected in zip(case.forms, ((left, right), (d, left, right)),
                                                   words_of):
                grid.reset_traffic()
                found.append(compute(*operands, *splits))
                assert words(grid) == {key: n for key, n in expected.items()
                                       if grid.shape[key[0]] > 1}, (grid, sizes)
                assert all(traffic.calls == 1 for traffic in grid.traffic().values())
            for got, expected in zip((found[0], *found[1]), case.expected()):
                assert got.shape == expected.shape, (grid, sizes)
                assert np.array_equal(got, expected), (grid, sizes)


# --- The products of every scheme, as the layers use them ----------------------------------

class LayerCase:
    """The product of a linear layer of a scheme: *into* the inner space, from 10 features to
    (3, 12) of 4 that stay together, or *back* from 12 features of 4 to 10."""

    def __init__(self, scheme, way, batch, seq, dtype="float64", draw=integers):
        outer, inner = scheme.spaces(batch, seq)
        self.scheme, self.grid = scheme, scheme.grid
        shape, units = {"up": ((10, 3, 12), (1, 4)), "down": ((12, 10), (4, 1))}[way]
        source, target = (outer, inner) if way == "up" else (inner, outer)
        self.product = scheme.product(source, target, shape, units)
        self.sizes = batch * seq, shape[0], int(np.prod(shape[1:]))
        self.layouts = (source.layout(0, units[0]), self.product.weight,
                        target.layout(len(shape) - 2, units[1]))
        shapes = (batch, seq, shape[0]), shape, (batch, seq, *shape[1:])
        self.arrays = [draw(s, seed).astype(dtype) for seed, s in enumerate(shapes)]
        self.blocks = [layout.shard(a, self.grid) for layout, a in zip(self.layouts, self.arrays)]

    def serial(self, wide="float64"):
        """C, dA and dB of one rank, with all dimensions, computed in the dtype `wide`."""
        A, B, dC = (a.astype(wide) for a in self.arrays)
        axes = tuple(range(2, dC.ndim))
        return (np.tensordot(A, B, 1), np.tensordot(dC, B, (axes, [d - 1 for d in axes])),
                np.tensordot(A, dC, ((0, 1), (0, 1))))

    def run(self):
        """C, dA and dB, as this rank's blocks."""
        A, B, dC = self.blocks
        C, saved = self.product.forward(A, B)
        return C, *self.product.backward(dC, B, saved)

    def compare(self):
        """Pairs of (layout, this rank's block, serial array)."""
        in_A, in_B, in_C = self.layouts
        return zip((in_C, in_A, in_B), self.run(), self.serial())


OPTIONS = [*({"keep": keep} for keep in KEEP), {"rows": "positions"}, {"rows": "sequences"}]


@grids_and_squares
@pytest.mark.parametrize("way", ["up", "down"])
def test_the_linear_products_of_all_schemes(comm, way):
    """Bits of the serial product from operands left as they are, and no word more or less than
    the scheme states; of 3-D each grid with one of the options in turn."""
    for scheme in schemes(comm, *(name for name in mm3d.SCHEMES if name != "3d")):
        check_linear_product(comm, scheme, way, {})
    turns = OPTIONS if way == "up" else OPTIONS[::-1]
    for sizes, options in zip(GRIDS[comm.size] if comm.size != 4 else [], cycle(turns)):
        scheme = mm3d.scheme("3d", comm, sizes, **options)
        check_linear_product(comm, scheme, way, options)


def check_linear_product(comm, scheme, way, options):
    for batch, seq in ((8, 4), (3, 5), (1, 7)):
        case = LayerCase(scheme, way, batch, seq)
        for layout, got, expected in case.compare():
            assert np.array_equal(got, layout.shard(expected, scheme.grid)), (scheme, batch)
        for layout, local, a in zip(case.layouts, case.blocks, case.arrays):
            assert np.array_equal(local, layout.shard(a, scheme.grid)), (scheme, batch)
    shape, product, (A, B, C) = ProductShape(way, *case.sizes), case.product, case.blocks
    forward, backward = scheme.product_moves(scheme.grid.shape, shape, **options)
    saved = check_moves(case, forward, product.forward, A, B)[1]
    check_moves(case, backward, product.backward, C, B, saved)
    if way == "down":    # the scheme's words of a tied head
        forward, backward = scheme.transposed_moves(scheme.grid.shape, shape, **options)
        check_moves(case, forward, product.forward_transposed, C, B)
        check_moves(case, backward, product.backward_transposed, A, C, B)
    check_rounding(scheme, way)


def check_moves(case, moves: list[Move], compute, *operands):
    """Words summed over the ranks, and calls on each, of one phase of a product; its result."""
    grid, comm = case.grid, case.grid.comm
    grid.reset_traffic()
    result = compute(*operands)
    expected = {}
    for move in moves:
        if grid.shape[move.axis] > 1:
            sums = expected.setdefault((move.axis, move.collective), [0, 0])
            sums[0] += move.words
            sums[1] += move.calls * comm.size
    got = {}
    for traffic in comm.allgather(grid.traffic()):
        for key, t in traffic.items():
            sums = got.setdefault(key, [0, 0])
            sums[0] += t.words
            sums[1] += t.calls
    assert got == expected, (case.scheme, compute)
    return result


def check_rounding(scheme, way):
    """Normal entries: |error| <= 8 eps |A| |B| element by element, and 10 eps in norm. Nothing
    is promoted."""
    def normal(shape, seed):
        return np.random.default_rng(seed).standard_normal(shape)
    for dtype, wide in (("float64", "longdouble"), ("float32", "float64"), ("float16", "float64")):
        eps = float(np.finfo(dtype).eps)
        case = LayerCase(scheme, way, 3, 5, dtype, normal)
        found, exact = [*case.compare()], case.serial(wide)
        case.arrays = [np.abs(a) for a in case.arrays]
        for (layout, got, _), whole, bound in zip(found, exact, case.serial()):
            assert got.dtype == dtype, scheme
            expected, bound = (layout.shard(a, scheme.grid) for a in (whole, bound))
            assert (abs(got - expected) <= 8 * eps * bound).all(), scheme
            assert np.linalg.norm(got - expected) <= 10 * eps * np.linalg.norm(whole), scheme


def test_float16_products_are_rounded_once():
    """4096 ones: a sum in float16 would stop at 2048."""
    A, B = np.ones((2, 4096), np.float16), np.ones((4096, 3), np.float16)
    for C in (matmul(A, B), matmul_nt(A, B.T.copy()), matmul_tn(A.T.copy(), B)):
        assert C.dtype == np.float16 and (C == 4096).all() and C.shape == (2, 3)
