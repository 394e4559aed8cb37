"""What tests of checkpoints ask of any model: its global arrays, and gradients given to it."""
import numpy as np


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
