"""GPTs with experts for tests: the steps of a training, and what one rank makes of them."""
import functools

import numpy as np
from mpi4py import MPI

import mm3d
from gpts import RATE, tokens_and_targets
from mm3d.model.experts.options import ExpertDesign

SIZES = dict(layers=2, hidden=12, heads=2, vocab=17, batch=6, seq=5)
CASES = [(mm3d.Experts(5, every=1, gate="mixtral", capacity=0.8, z=0.1, balance=0.1),
          2),
         (mm3d.Experts(7, top=3, every=2, capacity=None, z=0.1, balance=0.1), 1),
         (mm3d.Experts(4, top=2, every=2, gate="sigmoid-bias", capacity=0.9, order="choice",
                       design=ExpertDesign(7, 5, True, groups=2, top_groups=2, factor=1.5)), 1)]


def train(mesh, case: int, steps: int = 2, batch: int = 6, **options) -> dict[str, np.ndarray]:
    """Losses and routings of some steps of SGD and of an evaluation, and the last gradients."""
    experts, microbatches = CASES[case]
    sizes = SIZES | {"batch": batch}
    model = mm3d.GPT(mesh, **sizes, experts=experts, microbatches=microbatches,
                     **({"dtype": "float64"} | options))
    found, losses = {}, []
    for step in range(steps):
        losses.append(model.step(*tokens_and_targets(sizes, step)))
        for one in model.routings.values():
            found |= {f"{one.name} chosen {step}": one.chosen, f"{one.name} {step}": one.dropped}
            losses += [one.balance, one.z]
        found |= {name: a for name, a in model.gradients().items()}
        for p in model.trained:
            p.master -= RATE * p.grad
        model.update_biases()
        model.refresh()
    losses.append(model.evaluate(*tokens_and_targets(sizes, steps)))
    found |= {name: a for name, a in model.state().items() if name.endswith("router.bias")}
    model.free()
    return found | {"losses": np.array(losses)}


@functools.cache
def serial(case: int, steps: int = 2, batch: int = 6) -> dict[str, np.ndarray]:
    mesh = mm3d.Mesh(MPI.COMM_SELF, 1, "serial", backend="numpy")
    found = train(mesh, case, steps, batch)
    mesh.free()
    return found


def assert_same(found, expected) -> None:
    assert found.keys() == expected.keys()
    for name, a in found.items():
        b = expected[name]
        if a.dtype == np.int64:
            assert np.array_equal(a, b), name
        elif name == "losses":
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-12)
        else:
            assert np.linalg.norm(a - b) <= 1e-11 * np.linalg.norm(b), name
