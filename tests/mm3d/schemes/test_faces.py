"""Operands on faces of the grid: the words of the balanced algorithms, and unequal memory."""
import numpy as np
import pytest

import mm3d
from mm3d import ModelSizes
from mm3d.grid.split import FaceSplit
from mm3d.model import cost
from mm3d.tracing import dry_run
from reference import every_grid, grids, integers

EVEN = dict(layers=1, hidden=64, heads=8, batch=16, seq=8)


@every_grid
def test_layouts_put_matrices_on_faces(comm):
    """Ranks of the face hold the blocks, the others none, and their union is the matrix."""
    a = integers((5, 7), 0)
    for grid in grids(comm):
        for spec, face in (("xy0,z", "y"), ("z,yx0", "x"), ("xz0,y", "z")):
            layout = mm3d.Layout(spec)
            block = layout.shard(a, grid)
            balanced = mm3d.Layout(spec.replace(f"{face}0", "")).shard(a, grid)
            if grid.coords[face] == 0:
                assert np.array_equal(block, balanced)
            else:
                assert block.size == 0 and block.ndim == 2
            assert np.array_equal(layout.unshard(block, grid, a.shape), a)
            split = layout.split(grid, a.shape, face)
            assert isinstance(split, FaceSplit) and split.counts[1:] == [0] * (grid[face].size - 1)
            grid.reset_traffic()
            assert np.array_equal(split.all_gather(block), balanced), (grid, spec)
            found = split.reduce_scatter(balanced.copy())
            assert np.array_equal(found, block * grid[face].size) and found.shape == block.shape
            assert {kind for _, kind in grid.traffic()} == (
                {"broadcast", "reduce"} if grid[face].size > 1 else set())


def memory(scheme: str, grid: tuple[int, ...], field: str) -> list[int]:
    """What each rank of a grid holds in a dry run."""
    ranks = int(np.prod(grid))
    return [getattr(dry_run.trace_step(scheme, ranks, grid, rank, **EVEN), field)
            for rank in range(ranks)]


@pytest.mark.parametrize("field", ["parameters", "saved"])
def test_the_first_rank_holds_as_many_times_the_mean_as_the_grid_is_wide(field):
    """On p x p x p ranks p times; some hold nothing.  Balanced, all hold the same.  What is saved
    counts gathered vectors, which all ranks have, so it is a little less."""
    unequal, equal = (memory(scheme, (2, 2, 2), field) for scheme in ("faces", "3d"))
    assert unequal.index(max(unequal)) == 0
    ratio = max(unequal) / (sum(unequal) / 8)
    assert 1.9 < ratio <= 2.1 and max(equal) - min(equal) <= 0.05 * max(equal)
    assert min(unequal) <= 0.05 * max(unequal)


def test_weights_and_vectors_are_stored_once():
    stored = sum(memory("faces", (2, 1, 3), "parameters"))
    assert stored == 2 * 4 * cost.parameters(ModelSizes(**EVEN))
