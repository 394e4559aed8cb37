"""Who does what on a mesh, and what cannot be one."""
import numpy as np
import pytest

import mm3d
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme
from mm3d.training.mesh import check_data, stage_grids
from reference import all_refuse


@pytest.mark.ranks(4, slow=(8,))
def test_stages_are_the_slowest_direction(comm):
    share = comm.size // 2
    mesh = mm3d.Mesh(comm, stages=2, grid=[(share, 1, 1), (1, 1, share)])
    assert (mesh.stage, mesh.place) == divmod(comm.rank, share)
    assert mesh.rank(mesh.stage, mesh.place) == comm.rank
    assert mesh.shape == GridShape("dst", (1, 2, share))
    assert mesh.data is mesh.data_grid is None
    assert mesh.scheme.grid.shape == mesh.grids[mesh.stage]
    assert list(mesh.scheme.grid.coords.values()) == (
        [0, 0, mesh.place] if mesh.stage else [mesh.place, 0, 0])
    assert mesh.scheme.grid["x"].size == (1 if mesh.stage else share)


@pytest.mark.ranks(4, slow=(8,))
def test_replicas_are_the_slowest_direction(comm):
    """Directions r and d join equal places of the replicas, r the slower one."""
    for shards in (None, 1, 2):
        data = 4 if shards == 2 else 2
        mesh = mm3d.Mesh(comm, data=data, shards=shards, stages=comm.size // data, scheme="serial")
        assert mesh.shape == GridShape("dst", (data, comm.size // data, 1))
        assert mesh.replica == comm.rank // (comm.size // data)
        assert mesh.rank(mesh.stage, mesh.place) == comm.rank
        found = mesh.data_grid
        assert mesh.data.size == found.shape["d"] == (shards or data)
        assert found.coords["r"] * mesh.data.size + found.coords["d"] == mesh.replica
        same = [found["d"].comm.allgather(mesh.stage), found["r"].comm.allgather(mesh.stage)]
        assert {stage for stages in same for stage in stages} == {mesh.stage}
        ranks = np.array([float(mesh.replica), 1.0])
        assert found["r"].all_reduce(found["d"].all_reduce(ranks)).tolist() == [
            data * (data - 1) / 2, data]


def grids(*arguments, scheme="3d"):
    return stage_grids(find_scheme(scheme), *arguments)


def test_one_grid_for_all_stages_or_one_for_each():
    assert grids(8, 4, (2, 1, 1)) == (GridShape("xyz", (2, 1, 1)),) * 4
    assert grids(8, 2, [(2, 2, 1), GridShape("xyz", (1, 2, 2))]) == (
        GridShape("xyz", (2, 2, 1)), GridShape("xyz", (1, 2, 2)))
    assert grids(8, 2, None, scheme="1d") == (GridShape("x", (4,)),) * 2
    assert grids(8, 1) == (GridShape("xyz", (2, 2, 2)),)
    assert grids(2, 2, None, scheme="serial") == (GridShape("x", (1,)),) * 2


@pytest.mark.parametrize("arguments, said", [
    ((8, 3), "3 stages do not divide 8 ranks into equal groups: 1, 2, 4, 8 would do"),
    ((8, 0), "0 stages do not divide"), ((8, True), "True stages do not divide"),
    ((8, 4, (2, 2, 1)), "a grid of 2 x 2 x 1 has 4 ranks, but stage 0 has 2"),
    ((8, 2, [(4, 1, 1), (2, 1, 1)]), "a grid of 2 x 1 x 1 has 2 ranks, but stage 1 has 4"),
    ((8, 4, [(2, 1, 1)] * 3), "3 grids for 4 stages"),
    ((8, 4, (2, 1)), "should have 3 sizes"), ((8, 1, 8), "grid=8: sizes in a tuple would do")])
def test_what_is_no_mesh_is_named(arguments, said):
    with pytest.raises(ValueError, match=said):
        grids(*arguments)


def test_numbers_of_numpy_are_numbers_and_truth_is_none():
    two = np.int64(2)
    assert grids(8, two, (2, 2, 1)) == (GridShape("xyz", (2, 2, 1)),) * 2
    assert check_data(8, np.int32(4), two) == 2 and check_data(8, two, None) == 2
    for arguments, said in (((8, True, None), "data=True"), ((8, 2, True), "shards=True"),
                            ((8, 2.0, None), "data=2.0")):
        with pytest.raises(ValueError, match=f"{said} does not divide"):
            check_data(*arguments)


@pytest.mark.ranks(4)
def test_it_is_refused_on_all_ranks_alike(comm):
    for arguments in (dict(stages=3), dict(stages=2, grid=(3, 1, 1)), dict(stages=2, keep="all"),
                      dict(scheme="4d"), dict(data=3), dict(data=4, shards=3),
                      dict(data=2, stages=2, grid=(2, 1, 1))):
        with all_refuse(comm):
            mm3d.Mesh(comm, **arguments)


@pytest.mark.ranks(4)
def test_a_mesh_frees_the_communicators_of_its_grids(comm):
    mesh = mm3d.Mesh(comm, data=2, scheme="1d", grid=(2,))
    made = [axis.comm for grid in (mesh.scheme.grid, mesh.data_grid)
            for axis in grid.axes.values() if axis.size > 1]
    mesh.free()
    assert len(made) > 1 and not any(made)
