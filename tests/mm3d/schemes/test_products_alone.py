"""Products of plain matrices by every algorithm: exact integers, and the words of closed forms."""
import itertools
from collections import Counter

import numpy as np
import pytest

import mm3d
from bench.experiments.products.problem import Problem, product_grid
from bench.records.kinds.products import copied_along
from mm3d.schemes import algorithms_with_products
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.transport.communicators import DryCommunicator
from products import FORMS
from reference import GRIDS, SHAPES, integers
from support import run_ranks

NAMES = list(algorithms_with_products())
every_form = pytest.mark.parametrize("form", FORMS)
# Other schemes have tests of their own.
every_name = pytest.mark.parametrize("name", [
    pytest.param(name, marks=[pytest.mark.slow] * (
        name in {*mm3d.SCHEMES} - {"2.5d", "2d-pipelined", "faces"}))
    for name in NAMES])


def usable(name: str, ranks: int) -> list[tuple[int, ...]]:
    """Grids of so many ranks, at most two: the algorithm's choice, and another it can use."""
    cls = algorithms_with_products()[name]
    found = []
    for sizes in [None, *GRIDS.get(ranks, ()), (2, 2, ranks // 4), (ranks,)]:
        try:
            shape = cls.grid_shape(sizes or cls.default_grid(ranks))
            cls.check_grid(shape)
        except ValueError:
            continue
        if shape.ranks == ranks and shape.sizes not in found:
            found.append(shape.sizes)
    return found[:2]


@pytest.mark.ranks(4, 8, slow=(1,))
@every_name
def test_results_are_exact_and_words_those_of_the_closed_form(comm, name):
    for sizes in usable(name, comm.size):
        grid = product_grid(name, comm, sizes, "numpy")
        for form, shape in itertools.product(FORMS, SHAPES[:2]):
            check_product(comm, algorithms_with_products()[name].matrix_product(grid, form, shape),
                          form, shape)


def check_product(comm, product, form, shape):
    """C, dA and dB of integers, from operands left as they are."""
    grid = product.grid
    whole = {letter: integers(product.shapes[letter], seed) for seed, letter in enumerate("ABC")}
    blocks = {letter: product.layouts[letter].shard(a, grid) for letter, a in whole.items()}
    grid.reset_traffic()
    C = product.forward(blocks["A"], blocks["B"])
    counted, expected = Counter(), Counter()
    for traffic in comm.allgather(grid.traffic()):
        for (axis, kind), found in traffic.items():
            counted[axis, kind] += found.words
    for move in product.forward_moves(grid.shape, form, shape):
        expected[move.axis, move.collective] += move.words
    assert +counted == +expected, (grid, form, shape)
    dA, dB = product.backward(blocks["C"], blocks["A"], blocks["B"])
    exact = FORMS[form].serial(whole["A"], whole["B"]), *FORMS[form].backward(
        whole["C"], whole["A"], whole["B"])
    for letter, got, serial in zip("CAB", (C, dA, dB), exact):
        layout = product.layouts[letter]
        assert np.array_equal(got, layout.shard(serial, grid)), (grid, form, letter)
        assert np.array_equal(blocks[letter], layout.shard(whole[letter], grid)), (grid, letter)
        copies = np.prod([grid.shape[one] for one in copied_along(
            layout, grid.shape)], dtype=int)
        assert comm.allreduce(got.size) == copies * serial.size, (grid, form, letter)


@pytest.mark.parametrize("name, sizes", [("cannon", (3, 3)), ("2.5d-sd", (3, 3, 2)),
                                         ("2.5d-sd", (4, 4, 3)), ("agarwal", (3, 2, 4)),
                                         ("2.5d", (3, 3, 2)), ("2.5d", (2, 2, 3))])
@every_form
def test_words_of_uneven_blocks_on_larger_grids(name, sizes, form):
    """Of every rank, run dry."""
    shape, words = (17, 11, 23), 0
    ranks = int(np.prod(sizes))
    for rank in range(ranks):
        grid = product_grid(name, DryCommunicator(ranks, rank), sizes, DryBackend())
        problem = Problem(name, form, grid, shape, "float64")
        problem.forward()
        words += sum(found.words for found in grid.traffic().values())
    assert words == sum(move.words for move in problem.product.forward_moves(
        grid.shape, form, shape))


@pytest.mark.slow
@pytest.mark.parametrize("name, grid", [("cannon", "3x3"), ("2.5d-sd", "3x3x2")])
def test_shifts_go_the_right_way(name, grid, tmp_path):
    """On two rows of ranks forward and back are the same; three tell them apart."""
    ranks = int(np.prod([int(size) for size in grid.split("x")]))
    done = run_ranks(ranks, "-m", "bench", "measure", "matmul", "--scheme", name, "--shape",
                     "17,11,23",
                     "--form", "ab,abt,atb", "--backward", "--dtype", "float64", "--calls", "1",
                     "--repetitions", "2", "--max-repetitions", "2",
                     "--max-seconds", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(list(tmp_path.glob("*.h5"))) == 3


@pytest.mark.ranks(8)
def test_ordered_sums_have_the_same_bits_by_every_transport(comm, monkeypatch):
    """Those of a sum of the terms in the order of the ranks, also of 16 bits, rounded once."""
    for dtype in ("float32", "float16"):
        found = []
        for transport in ("mpi", "shared", "hierarchical"):
            monkeypatch.setenv("MM3D_TRANSPORT", transport)
            grid = product_grid("agarwal", comm, (1, 1, 8), "numpy")
            product = algorithms_with_products()["agarwal"].matrix_product(grid, "ab", (9, 64, 7))
            random = np.random.default_rng(0)
            A, B = (product.layouts[name].shard(
                random.standard_normal(product.shapes[name]).astype(dtype), grid)
                for name in "AB")
            found.append(product.forward(A, B))
            terms = [a.astype(dtype) for a in comm.allgather((
                A.astype("f4") @ B.astype("f4")).astype(dtype))]
        total = terms[0].astype("f4")
        for term in terms[1:]:
            total += term
        own = mm3d.Layout("z,").slices(grid.shape, (9, 7), grid.coords)
        assert all(np.array_equal(one, found[0]) for one in found)
        assert np.array_equal(found[0], total.astype(dtype)[own])


@pytest.mark.parametrize("name, ranks, sizes, message", [
    ("cannon", 8, None, "8 ranks are no square: start 4 or 9"),
    ("cannon", 8, (4, 2), "product 'cannon' needs a square grid, not 4 x 2"),
    ("2.5d-sd", 6, None, "6 ranks are no q x q x c with c of at most q: start 4 or 9"),
    ("2.5d-sd", 16, (2, 2, 4), "needs q x q x c ranks with c of at most q, not 2 x 2 x 4"),
    ("agarwal", 6, None, "6 ranks are no cube")])
def test_grids_that_do_not_fit_are_refused(name, ranks, sizes, message):
    with pytest.raises(ValueError, match=message):
        product_grid(name, DryCommunicator(ranks), sizes, DryBackend())


@pytest.mark.parametrize("form, shape", [("ba", (4, 4, 4)), ("ab", (4, 4)), ("ab", (4, 4.5, 4)),
                                         ("ab", (4, 0, 4))])
def test_products_that_cannot_be_are_refused(form, shape):
    grid = product_grid("cannon", DryCommunicator(4), None, DryBackend())
    with pytest.raises(ValueError, match="three whole numbers M, N, K of at least 1, would do"):
        algorithms_with_products()["cannon"].matrix_product(grid, form, shape)


def test_closed_forms_of_square_matrices():
    """Agarwal's words are the paper's; more layers of the 2.5-D product move fewer words."""
    known, n = algorithms_with_products(), 64

    def words(name, sizes):
        cls = known[name]
        moves = cls.matrix_product.forward_moves(cls.grid_shape(sizes), "ab", (n, n, n))
        return sum(move.words for move in moves)
    assert words("agarwal", (4, 4, 4)) == words("3d", (4, 4, 4)) == 9 * n * n
    assert words("2.5d-sd", (8, 8, 1)) == words("cannon", (8, 8)) == (2 * 8 - 2 / 8) * n * n
    assert words("2.5d-sd", (4, 4, 4)) < words("2.5d-sd", (8, 8, 1))
