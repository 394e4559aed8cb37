"""The distributed products, forward and backward: the same bits as one rank's, in every form."""
import numpy as np
import pytest

import mm3d
from mm3d.arrays.products import matmul, matmul_nt, matmul_tn
from mm3d.grid.split import Split
from mm3d.schemes import cube, summa
from mm3d.schemes.closed_form import Move, ProductShape
from products import FORMS, Case
from reference import (SHAPES, every_grid, grids, grids_and_squares, integers, moved, on_grid,
                       relative_error, schemes, words)

pytestmark = pytest.mark.usefixtures("transport")
KEEP = cube.Cube.options["keep"].choices


every_grid_once = pytest.mark.ranks(1, 8, slow=(6,), first=(8,))
every_form = pytest.mark.parametrize("name", FORMS)
every_order = pytest.mark.parametrize("order", [
    "xyz", "zyx", "yzx", *(pytest.param(order, marks=pytest.mark.slow) for order in (
        "xzy", "yxz", "zxy"))])
# Rows of whole sequences, and rows also divided by position; the hidden dimension last.
ACTIVATIONS = pytest.mark.parametrize("rows_A, rows_C", [("xy,", "xz,"), ("x,y", "x,z")])


# --- Algorithms 1 to 6 ---------------------------------------------------------------------

@every_grid
@every_form
@every_order
def test_each_form_and_its_backward_in_all_direction_orders(comm, name, order):
    for grid in grids(comm):
        for sizes in SHAPES:
            case = Case(name, order, grid, sizes)
            for got, expected in zip(case.run(), case.expected()):
                assert got.shape == expected.shape, (grid, sizes)
                assert np.array_equal(got, expected), (grid, sizes)


@every_grid_once
@every_form
def test_inner_products_agree_from_blocks_alone(comm, name):
    """<dC, C> = <dA, A> = <dB, B>, exactly, with nothing gathered and nothing to compare with."""
    for grid in grids(comm):
        for sizes in SHAPES:
            case = Case(name, "xyz", grid, sizes)
            C, dA, dB = case.run()
            A, B, dC = map(case.local, range(3))
            sums = comm.allreduce(np.array([np.vdot(dC, C), np.vdot(dA, A), np.vdot(dB, B)]))
            assert sums[0] == sums[1] == sums[2] != 0, (grid, sizes)


@every_grid_once
@every_form
@every_order
def test_words_of_each_form_on_each_rank(comm, name, order):
    """Forward, A, B and C cross one direction each. Backward dC is gathered once, A and B
    once more, and both gradients are scattered where A and B were gathered."""
    for grid in grids(comm):
        case = Case(name, order, grid, SHAPES[0])
        A, B, C = [moved(spec, letter, shape, grid) for spec, letter, shape
                   in zip(case.specs, case.letters, case.shapes)]
        a, b, c = case.letters
        forward, backward = case.forms
        blocks = [case.local(i) for i in range(3)]

        def divided(expected):
            return {key: n for key, n in expected.items() if grid.shape[key[0]] > 1}
        grid.reset_traffic()
        forward(*blocks[:2], case.a, case.b, case.c)
        assert words(grid) == divided({(a, "all_gather"): A, (b, "all_gather"): B,
                                       (c, "reduce_scatter"): C}), (grid, order)
        grid.reset_traffic()
        backward(blocks[2], *blocks[:2], case.a, case.b, case.c)
        assert words(grid) == divided({
            (a, "all_gather"): A, (b, "all_gather"): B, (c, "all_gather"): C,
            (a, "reduce_scatter"): A, (b, "reduce_scatter"): B}), (grid, order)
        assert all(traffic.calls == 1 for traffic in grid.traffic().values())


@every_grid_once
@ACTIVATIONS
def test_rows_of_sequences_and_positions(comm, rows_A, rows_C):
    """C = A B and its backward with A of (batch, seq, n), dealt by sequence or by position."""
    for grid in grids(comm):
        for batch, seq, n, k in ((3, 5, 7, 4), (1, 9, 2, 11), (7, 1, 13, 3)):
            A, B, dC = integers((batch, seq, n), 0), integers((n, k), 1), \
                integers((batch, seq, k), 2)
            in_A, in_B, in_C = map(mm3d.Layout, (f"{rows_A},z", "z,yx", f"{rows_C},y"))
            splits = [layout.split(grid, a.shape, letter) for layout, a, letter
                      in ((in_A, A, "y"), (in_B, B, "x"), (in_C, dC, "z"))]
            local_A, local_B, local_dC = (layout.shard(a, grid) for layout, a
                                          in ((in_A, A), (in_B, B), (in_C, dC)))
            C = cube.ab(local_A, local_B, *splits)
            dA, dB = cube.ab_backward(local_dC, local_A, local_B, *splits)
            dB_serial = A.reshape(-1, n).T @ dC.reshape(-1, k)
            assert np.array_equal(C, in_C.shard(A @ B, grid)), grid
            assert np.array_equal(dA, in_A.shard(dC @ B.T, grid)), grid
            assert np.array_equal(dB, in_B.shard(dB_serial, grid)), grid


# --- keep: which gathered operands stay ----------------------------------------------------

@every_grid
@pytest.mark.parametrize("keep", KEEP)
def test_keep_gives_the_same_bits_with_fewer_gathers(comm, keep):
    for grid in grids(comm):
        case = Case("ab", "xyz", grid, SHAPES[0])
        product = cube.CubeProduct(case.a, case.b, case.c, case.layouts[1], keep)
        A, B, dC = map(case.local, range(3))
        C, saved = product.forward(A, B)
        grid.reset_traffic()
        dA, dB = product.backward(dC, B, saved)
        for got, expected in zip((C, dA, dB), case.expected()):
            assert np.array_equal(got, expected), grid
        again = {"none": "xyz", "weight": "yz", "both": "z"}[keep]
        expected = ({(c, "all_gather") for c in again}
                    | {("x", "reduce_scatter"), ("y", "reduce_scatter")})
        assert {key: traffic.calls for key, traffic in grid.traffic().items()} == {
            key: 1 for key in expected if grid.shape[key[0]] > 1}, grid


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
every_way = pytest.mark.parametrize("way", ["up", "down"])
OTHERS = [name for name in mm3d.SCHEMES if name != "3d"]


@every_grid
@pytest.mark.parametrize("way, options", [
    pytest.param(way, options, id="-".join([way, *options.values()]), marks=[pytest.mark.slow] * (
        (way == "up") == n % 2)) for way in ("up", "down") for n, options in enumerate(OPTIONS)])
def test_the_linear_products_of_3d(comm, way, options):
    check_linear_products(comm, way, "3d", **options)


@grids_and_squares
@every_way
@pytest.mark.parametrize("name", OTHERS)
def test_the_linear_products_of_other_schemes(comm, way, name):
    check_linear_products(comm, way, name)


def check_linear_products(comm, way, name, **options):
    """Bits of the serial product from operands left as they are, and no word more or less than
    the scheme states."""
    for scheme in schemes(comm, name, **options):
        for batch, seq in ((8, 4), (3, 5), (1, 7)):
            case = LayerCase(scheme, way, batch, seq)
            for layout, got, expected in case.compare():
                assert np.array_equal(got, layout.shard(expected, scheme.grid)), (scheme, batch)
            for layout, local, a in zip(case.layouts, case.blocks, case.arrays):
                assert np.array_equal(local, layout.shard(a, scheme.grid)), (scheme, batch)
        for phase, moves in zip(("forward", "backward"),
                                scheme.product_moves(scheme.grid.shape,
                                                     ProductShape(way, *case.sizes), **options)):
            check_moves(comm, case, phase, moves)


def check_moves(comm, case, phase, moves: list[Move]):
    """Words summed over the ranks, and calls on each, of one phase of a product."""
    grid, (A, B, dC) = case.grid, case.blocks
    grid.reset_traffic()
    _, saved = case.product.forward(A, B)
    if phase == "backward":
        grid.reset_traffic()
        case.product.backward(dC, B, saved)
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
    assert got == expected, (case.scheme, phase)


@grids_and_squares
@every_way
def test_inner_products_of_grids_and_squares(comm, way):
    """<dC, C> = <dA, A> = <dB, B>; an element that n ranks hold is counted n times over."""
    for scheme in schemes(comm):
        case = LayerCase(scheme, way, 3, 5)
        (C, dA, dB), (A, B, dC) = case.run(), case.blocks
        sums = comm.allreduce(np.array([np.vdot(dC, C), np.vdot(dA, A), np.vdot(dB, B)]))
        held = comm.allreduce(np.array([C.size, dA.size, dB.size]))
        whole = np.array([case.arrays[i].size for i in (2, 0, 1)])
        assert len(set(sums * whole // held)) == 1 and sums.all(), scheme


@pytest.mark.ranks(1, 4, slow=(8,), first=(4,))
@every_way
@pytest.mark.parametrize("dtype", ["float64", "float32", "float16"])
def test_rounding_stays_within_a_few_units_in_the_last_place(comm, way, dtype):
    """Normal entries: |error| <= 8 eps |A| |B| element by element, and 10 eps in norm. Nothing
    is promoted."""
    eps = float(np.finfo(dtype).eps)
    wide = "longdouble" if dtype == "float64" else "float64"

    def normal(shape, seed):
        return np.random.default_rng(seed).standard_normal(shape)
    for scheme in schemes(comm):
        case = LayerCase(scheme, way, 3, 5, dtype, normal)
        exact = case.serial(wide)
        case.arrays = [np.abs(a) for a in case.arrays]
        bounds = case.serial()
        in_A, in_B, in_C = case.layouts
        for layout, got, expected, bound in zip((in_C, in_A, in_B), case.run(), exact, bounds):
            assert got.dtype == dtype, scheme
            whole = layout.unshard(got, scheme.grid, expected.shape)
            assert (abs(whole - expected) <= 8 * eps * bound).all(), scheme
            assert relative_error(whole, expected) <= 10 * eps, scheme


def test_float16_products_are_rounded_once():
    """4096 ones: a sum in float16 would stop at 2048."""
    A, B = np.ones((2, 4096), np.float16), np.ones((4096, 3), np.float16)
    for C in (matmul(A, B), matmul_nt(A, B.T.copy()), matmul_tn(A.T.copy(), B)):
        assert C.dtype == np.float16 and (C == 4096).all() and C.shape == (2, 3)


# --- SUMMA's three forms -------------------------------------------------------------------

@pytest.mark.ranks(1, 4)
@pytest.mark.parametrize("sizes", SHAPES)
def test_the_three_forms_of_summa(comm, sizes):
    """q x q blocks; a deals the inner dimension over y, b over x; unequal blocks."""
    m, n, k = sizes
    A, B, dC = integers((m, n), 0), integers((n, k), 1), integers((m, k), 2)
    layout, q = mm3d.Layout("x,y"), int(comm.size ** 0.5)
    with on_grid(comm, x=q, y=q) as grid:
        a, b = Split(grid.y, 1, n), Split(grid.x, 0, n)
        A_l, B_l, dC_l = (layout.shard(M, grid) for M in (A, B, dC))
        assert np.array_equal(summa.ab(A_l, B_l, a, b), layout.shard(A @ B, grid))
        grid.reset_traffic()
        assert np.array_equal(summa.abt(dC_l, B_l, a, b), layout.shard(dC @ B.T, grid))
        calls = {key: t.calls for key, t in grid.traffic().items()}
        assert calls == ({("x", "broadcast"): q, ("y", "reduce"): q} if q > 1 else {})
        grid.reset_traffic()
        assert np.array_equal(summa.atb(A_l, dC_l, a, b), layout.shard(A.T @ dC, grid))
        calls = {key: t.calls for key, t in grid.traffic().items()}
        assert calls == ({("y", "broadcast"): q, ("x", "reduce"): q} if q > 1 else {})
