"""What tests of checkpoints ask of any model: its global arrays, and gradients given to it."""
import os
import warnings
import zlib
from pathlib import Path

import h5py
import numpy as np
from mpi4py import MPI

import mm3d
from mm3d.checkpoints.index_file import CHECKSUM_LINE


def set_gradients(model, seed: int) -> None:
    """The same global gradients on every mesh."""
    for t in model.trained:
        whole = np.random.default_rng([seed, *t.name.encode()]).standard_normal(t.shape)
        t.grad[...] = whole[t.layout.slices(t.grid, t.shape)]


def everything(model, optimizer=None) -> dict:
    """The global arrays of a model and of the moments, on every rank, in public shapes."""
    own = {}
    for index, t in enumerate(model.trained):
        arrays = {"parameters": t.master} | {
            f"optimizer/{name}": blocks[index]
            for name, blocks in (optimizer.state if optimizer else {}).items()}
        for kind, array in arrays.items():
            if t.counted:
                own.setdefault(f"{kind}/{t.name}", []).append(
                    (t.layout.slices(t.grid, t.shape), t.shape, t.public_shape, array.copy()))
    found = {}
    for every in model.comm.allgather(own):
        for path, parts in every.items():
            for place, shape, public, array in parts:
                whole = found.setdefault(path, (np.full(shape, np.nan, array.dtype), public))[0]
                whole[place] = array
    return {path: whole.reshape(public) for path, (whole, public) in found.items()}


def same(found: dict, expected: dict) -> bool:
    """Whether all arrays have the same names, types and bits."""
    return found.keys() == expected.keys() and all(
        a.dtype == expected[path].dtype and np.array_equal(a, expected[path])
        for path, a in found.items())


SIZES = dict(layers=1, hidden=6, heads=2, batch=4, seq=2)


def transformer(comm=MPI.COMM_SELF, **options):
    return mm3d.Transformer(mm3d.scheme("1d", comm, grid=(comm.size,)), **SIZES | options)


def release(*models) -> None:
    for model in models:
        model.free()
        model.mesh.free()


def saved(folder: Path, model, step: int, **options) -> str:
    """Save, and return what was warned of, in one text."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        path = mm3d.save(folder, model, step=step, **options)
    assert path.is_dir() and mm3d.restore(folder, model).step == step
    return "\n".join(str(one.message) for one in caught)


def names(folder: Path) -> list[str]:
    return sorted(os.listdir(folder))


class Calls:
    """Calls of the system in a save, before one of which, by its number, something happens."""

    NAMES = ("mkdir", "open", "ftruncate", "pwrite", "fsync", "rename", "unlink", "rmdir",
             "listdir")

    def __init__(self, monkeypatch, at: int, act, *more: str) -> None:
        self.count = 0
        for name in (*self.NAMES, *more):
            monkeypatch.setattr(os, name, self.watched(getattr(os, name), at, act))

    def watched(self, original, at, act):
        def call(*given, **options):
            self.count += 1
            if self.count == at:
                act()
            return original(*given, **options)
        return call


def as_before(path: Path) -> None:
    """Make of a checkpoint one of version 1, which had no checksum of the whole index."""
    index = path / "index.h5"
    index.write_bytes(CHECKSUM_LINE.sub(b"", index.read_bytes()))
    with h5py.File(index, "r+") as file:
        file.attrs["format"] = "mm3d checkpoint, version 1"
        file["blocks"].attrs["crc32"] = zlib.crc32(file["blocks"][()].tobytes())
        for name in {"model", "training"} & {*file}:
            del file[name]
