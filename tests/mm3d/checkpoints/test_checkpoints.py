"""A checkpoint has the same bits on every mesh, whatever wrote it."""
import os

import h5py
import numpy as np
import pytest
from mpi4py import MPI

import mm3d
from mm3d.checkpoints import block_files
from checkpoint_models import everything, release, same, set_gradients

SIZES = dict(layers=4, hidden=15, heads=3, batch=4, seq=2)    # divides by neither 2 nor 4
# Stages, scheme, grid, schedule.
MESHES = {1: [(1, "3d", (1, 1, 1), "gpipe"), (1, "serial", None, "gpipe")],
          4: [(2, "3d", (1, 2, 1), "zb-v"), (1, "3d", (4, 1, 1), "gpipe"),
              (1, "2d", (2, 2), "gpipe"), (4, "serial", None, "1f1b"), (2, "1d", (2,), "gpipe"),
              (1, "3d", (2, 1, 2), "gpipe"), (2, "3d", (2, 1, 1), "interleaved:2")]}
KINDS = {"AdamW": lambda model: mm3d.AdamW(model, 0.01, clip=1.0),
         "SGD": lambda model: mm3d.SGD(model, 0.01, momentum=0.9)}


def pipeline(comm, stages=1, scheme="3d", grid=(1, 1, 1), schedule="gpipe", **options):
    mesh = mm3d.Mesh(comm, stages, scheme, grid)
    return mm3d.Pipeline(mesh, schedule, **(SIZES | options), microbatches=2)


def step(model, optimizer, seed: int) -> None:
    """A step with the same global gradients on every mesh."""
    set_gradients(model, seed)
    optimizer.step()


@pytest.fixture
def trained(comm, shared_tmp_path):
    """Saves a model after two steps of an optimizer; gives the folder and what was saved."""
    def make(mesh=(), kind="AdamW", own=comm, **options):
        model = pipeline(own, *mesh, **options)
        optimizer = KINDS[kind](model)
        for seed in (1, 2):
            step(model, optimizer, seed)
        mm3d.save(shared_tmp_path, model, optimizer, curve="shown")
        saved = everything(model, optimizer)
        release(model)
        return shared_tmp_path, saved
    return make


@pytest.mark.ranks(1, 4)
def test_every_mesh_reads_what_any_mesh_has_written(comm, trained):
    """Guards against checkpoints of blocks that are equal (pytorch/torchtitan#811), of stages in
    the order of ranks where a schedule is a V (pytorch/torchtitan#774), and of the weight of
    queries, keys and values as if it were one matrix (NVIDIA/Megatron-LM#2769)."""
    meshes = MESHES[comm.size]
    folder, expected = trained(meshes[0])
    for mesh in meshes:
        model = pipeline(comm, *mesh, seed=7)
        optimizer = KINDS["AdamW"](model)
        optimizer.lr = 0.5
        found = mm3d.restore(folder, model, optimizer)
        assert same(everything(model, optimizer), expected), mesh
        assert (found.step, found.attributes) == (2, {"curve": "shown"})
        assert (optimizer.steps, optimizer.lr) == (2, 0.01)
        release(model)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("mesh", [5, *(pytest.param(n, marks=pytest.mark.slow)
                                       for n in (1, 2, 3, 4, 6))])
def test_one_rank_reads_what_four_have_written_and_they_read_what_it_writes(comm, trained, mesh,
                                                                            shared_tmp_path):
    folder, expected = trained(MESHES[4][mesh], "SGD")
    if comm.rank == 0:
        one = pipeline(MPI.COMM_SELF, seed=7)
        optimizer = KINDS["SGD"](one)
        mm3d.restore(folder, one, optimizer)
        assert same(everything(one, optimizer), expected)
        mm3d.save(shared_tmp_path / "one", one, optimizer)
        release(one)
    comm.Barrier()
    model = pipeline(comm, *MESHES[4][mesh], seed=8)
    optimizer = KINDS["SGD"](model)
    mm3d.restore(shared_tmp_path / "one", model, optimizer)
    assert same(everything(model, optimizer), expected)
    release(model)


@pytest.mark.ranks(1, 4)
def test_h5py_alone_opens_whole_arrays_wherever_the_folder_is(comm, trained, shared_tmp_path,
                                                              monkeypatch):
    folder, expected = trained(MESHES[comm.size][0])
    if comm.rank:
        return
    moved = folder.rename(shared_tmp_path.with_name("moved"))
    monkeypatch.chdir("/")
    with h5py.File(moved / "step-00000002" / "index.h5") as index:
        found = {}
        index.visititems(lambda name, item: found.update({name: item[()]}) if isinstance(
            item, h5py.Dataset) and name != "blocks" else None)
        assert same(found, expected)
        assert index.attrs["step"] == 2 and index["optimizer"].attrs["lr"] == 0.01
        assert index["optimizer"].attrs["name"] == "AdamW"
    (moved / "step-00000002" / "blocks-00000.h5").unlink()
    with h5py.File(moved / "step-00000002" / "index.h5") as index:
        assert any(np.isnan(item[()]).any() for item in index["parameters"].values())


@pytest.mark.ranks(4)
def test_each_rank_writes_its_own_and_reads_what_it_needs(comm, trained, monkeypatch):
    monkeypatch.setattr(block_files, "PIECE_BYTES", 64)    # of one row, mostly
    folder, expected = trained(MESHES[4][1])     # divided by rows
    path, read, preadv = folder / "step-00000002", [], os.preadv
    assert len(list(path.glob("blocks-*.h5"))) == 4
    monkeypatch.setattr(os, "preadv", lambda *given: read.append(preadv(*given)) or read[-1])
    model = pipeline(comm, *MESHES[4][1], seed=3)
    optimizer = KINDS["AdamW"](model)
    mm3d.restore(folder, model, optimizer)
    total = sum(a.nbytes for a in expected.values())
    assert comm.allreduce(sum(read)) == total and 0.2 * total < sum(read) < 0.3 * total
    release(model)


@pytest.mark.ranks(1)
def test_float16_with_masters_and_loss_scaling(comm, shared_tmp_path):
    found = []
    for seed in (0, 5):
        model = pipeline(comm, dtype="float16", master="float32", seed=seed)
        optimizer = mm3d.AdamW(model, 0.01, loss_scaling=mm3d.LossScaling(512.0, interval=2))
        if seed == 0:
            for _ in range(3):
                step(model, optimizer, 1)
            mm3d.save(shared_tmp_path, model, optimizer)
        else:
            mm3d.restore(shared_tmp_path, model, optimizer)
        found.append((everything(model, optimizer), optimizer.numbers(), model.loss_scale,
                      {p.name: p.value.copy() for p in model.parameters}))
        release(model)
    one, other = found
    assert same(one[0], other[0]) and one[1:3] == other[1:3] and same(one[3], other[3])
    assert one[1]["loss_scaling.scale"] == 1024 and one[1]["loss_scaling.good_steps"] == 1
