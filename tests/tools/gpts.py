"""GPTs for tests, their data, and a few steps of SGD with them."""
import functools

import numpy as np
import pytest
from mpi4py import MPI

import mm3d

# No size of these but the batch fits a grid evenly; every row has its own number of targets.
SIZES = dict(layers=2, hidden=12, heads=2, vocab=17, batch=4, seq=5)
RATE = 0.5


def tokens_and_targets(sizes=SIZES, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Random tokens and targets; some of these are ignored, more in some rows than in others."""
    rng, shape = np.random.default_rng(seed), (sizes["batch"], sizes["seq"])
    tokens, targets = (rng.integers(0, sizes["vocab"], shape) for _ in range(2))
    targets[0, :] = targets[-1, 2] = -1
    return tokens, targets


def train(mesh: mm3d.Mesh, steps: int = 2, sizes=SIZES, **options) -> dict[str, np.ndarray]:
    """Losses of some steps of SGD and of an evaluation after them, and the last gradients; with
    experts also the routing of each step, and the biases of the routers."""
    model = mm3d.GPT(mesh, **sizes, **({"dtype": "float64"} | options))
    losses, found = [], {}
    for step in range(steps):
        losses.append(model.step(*tokens_and_targets(sizes, step)))
        for one in model.routings.values():
            found |= {f"{one.name} chosen {step}": one.chosen, f"{one.name} {step}": one.dropped}
            losses += [one.balance, one.z]
        found |= model.gradients()
        for p in model.trained:
            p.master -= RATE * p.grad
        model.update_biases()
        model.refresh()
    losses.append(model.evaluate(*tokens_and_targets(sizes, steps)))
    if model.experts:
        found |= {name: a for name, a in model.state().items() if name.endswith("router.bias")}
    model.free()
    return {"losses": np.array(losses)} | found


def alone(sizes=SIZES, **options) -> dict[str, np.ndarray]:
    """`train` on one rank."""
    mesh = mm3d.Mesh(MPI.COMM_SELF, 1, "serial", backend="numpy")
    found = train(mesh, sizes=sizes, **options)
    mesh.free()
    return found


@functools.cache
def serial(**options) -> dict[str, np.ndarray]:
    """`train` on one rank, once for each of the `options`."""
    return alone(**options)


def case_of(comm, cases: dict[int, list], number: int):
    """The case of that number on so many ranks, or a skipped test."""
    if number >= len(cases[comm.size]):
        pytest.skip(f"{comm.size} ranks have {len(cases[comm.size])} cases")
    return cases[comm.size][number]


def differences(found, expected, loss: float = 1e-12, gradient: float = 1e-11) -> list[str]:
    """What differs by more than these bounds: losses, gradients relative to their norm, and
    whole numbers at all."""
    wrong = [f"{name} is only on one side" for name in found.keys() ^ expected.keys()]
    for name in found.keys() & expected.keys():
        error = np.linalg.norm(found[name] - expected[name])
        bound = loss if name == "losses" else gradient * np.linalg.norm(expected[name])
        if not error <= bound * (expected[name].dtype != np.int64):
            wrong.append(f"{name}: {error:.1e}")
    return sorted(wrong)
