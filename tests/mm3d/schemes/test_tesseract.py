"""2.5-D: SUMMA in layers, whose terms of a weight's gradient are summed over the layers."""
import math

import numpy as np
import pytest

import mm3d
from mm3d.schemes.tesseract import Tesseract
from mm3d.transport.communicators import DryCommunicator
from models import SIZES, Parallelism, data, train


@pytest.mark.parametrize("ranks, grid", [
    (1, (1, 1, 1)), (4, (2, 2, 1)), (8, (2, 2, 2)), (16, (4, 4, 1)), (18, (3, 3, 2)),
    (32, (4, 4, 2)), (36, (6, 6, 1)), (64, (4, 4, 4))])
def test_its_own_grid_is_the_deepest_that_is_no_deeper_than_wide(ranks, grid):
    assert Tesseract.default_grid(ranks) == grid


@pytest.mark.parametrize("ranks, near", [(2, "1 or 4"), (12, "9 or 16"), (37, "36 or 48")])
def test_ranks_without_a_grid_are_refused_with_those_that_have_one(ranks, near):
    with pytest.raises(ValueError, match=f"^{ranks} ranks are no q x q x d .*: start {near}, or "
                                         f"name a grid .*grid=\\(1, 1, {ranks}\\)$"):
        Tesseract.default_grid(ranks)
    assert (1, 1, ranks) in [grid.sizes for grid in Tesseract.grids(ranks)]


def test_a_layer_that_is_no_square_is_refused():
    with pytest.raises(ValueError, match="^scheme '2.5d' needs a grid of q x q x d, not 1 x"):
        mm3d.scheme("2.5d", DryCommunicator(4), (1, 2, 2), "numpy")


def step(scheme, sizes: str):
    """Results of a training step on this rank, words of each collective, and calls."""
    model = mm3d.Transformer(scheme, **SIZES[sizes], dtype="float32")
    scheme.grid.reset_traffic()
    found = train(model, *data(**SIZES[sizes]))
    moved = {key: (t.calls, t.words) for key, t in scheme.grid.traffic().items()}
    return {name: np.array(a) for name, a in found.items()}, moved


@pytest.mark.ranks(1, 4)
def test_one_layer_is_summa(comm):
    """The same bits, and word for word the same collectives."""
    q = math.isqrt(comm.size)
    found = []
    for parallelism in (Parallelism("2d"), Parallelism("2.5d", (q, q, 1))):
        with parallelism.on(comm, "numpy") as scheme:
            found.append(step(scheme, "uneven"))
    (summa, moved), (layer, moved_in_layer) = found
    assert moved == moved_in_layer and bool(moved) == (comm.size > 1)
    assert all(np.array_equal(layer[name], a) for name, a in summa.items())
