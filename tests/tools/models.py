"""What the tests of the model share: parallelisms, sizes, random states, and one training step.

Every parameter of a state is random, also the biases and the norms' weights, so that each of
them matters.  The serial model of the same state, computed by each rank for itself, is what all
parallelisms are compared with.
"""
import functools
from contextlib import contextmanager
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np
from mpi4py import MPI

import mm3d
from reference import fits


class Parallelism(NamedTuple):
    """A scheme, its grid and its options."""

    name: str
    grid: tuple[int, ...] | None = None
    options: dict[str, str] = {}

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.grid or ()))
        return " ".join([self.name, sizes, *self.options.values()])

    @contextmanager
    def on(self, comm, backend: str | None = None) -> Iterator[mm3d.Scheme]:
        """The scheme on the ranks of `comm`, freed at the end."""
        scheme = mm3d.scheme(self.name, comm, self.grid, backend, **self.options)
        yield scheme
        scheme.grid.free()    # not after a failure, when other ranks may never come to it


# Every scheme there is, on the grid that it chooses for itself.
CHOSEN = {ranks: [Parallelism(name) for name in mm3d.SCHEMES
                  if name != "serial" and fits(name, ranks)] for ranks in (1, 4, 6, 8)}

# One of each kind, for what depends little on the grid: on 4 ranks what 8 do not show.
SOME = {1: [Parallelism("serial"), Parallelism("3d")],
        4: [one for one in CHOSEN[4] if not fits(one.name, 8)],
        8: [*CHOSEN[8], Parallelism("3d", (1, 2, 4), {"rows": "positions", "keep": "both"})]}

SLABS = [Parallelism("3d", (1, 2, 2), {"keep": "both"}),
         Parallelism("3d", (2, 2, 1), {"rows": "positions"}), Parallelism("2.5d", (1, 1, 4))]

# Slabs and uneven grids; rows in whole sequences and not; operands kept and not.
PARALLELISMS = {
    1: CHOSEN[1],
    4: [*CHOSEN[4], *SLABS],
    6: [*CHOSEN[6], Parallelism("3d", (3, 2, 1)), Parallelism("3d", (2, 1, 3)),
        Parallelism("3d", (2, 1, 3), {"keep": "weight"}),
        Parallelism("faces", (3, 2, 1)), Parallelism("faces", (1, 2, 3))],
    8: [*SOME[8], Parallelism("3d", (4, 1, 2), {"keep": "weight"}),
        Parallelism("3d", (2, 4, 1), {"rows": "sequences"})]}
# The same for what runs on 8 ranks, too.
EACH_ONCE = PARALLELISMS | {4: [*SOME[4], *SLABS]}

SIZES = {    # the last two fit no grid of several ranks evenly
    "even": dict(layers=1, hidden=16, heads=8, batch=8, seq=8),
    "uneven": dict(layers=1, hidden=20, heads=5, batch=3, seq=7),
    "few": dict(layers=2, hidden=21, heads=3, batch=5, seq=2)}    # fewer heads than ranks
# Three layers are a group of two and one of one.
MODELS = {"even": SIZES["even"] | {"layers": 2}, "uneven": SIZES["uneven"] | {"layers": 3}}

Arrays = dict[str, np.ndarray]


def policies(parallelism: Parallelism, *names: str) -> list[str]:
    """The policies of recomputation among `names` that go with what the scheme keeps."""
    return [name for name in names
            if not (parallelism.options.get("keep") and "selective" in name)]


def shapes(layers: int, hidden: int) -> dict[str, tuple[int, ...]]:
    """Names and global shapes of the parameters, as the documentation gives them."""
    h = hidden
    parts = {"ln1.weight": (h,), "ln1.bias": (h,),
             "attention.qkv.weight": (h, 3 * h), "attention.qkv.bias": (3 * h,),
             "attention.proj.weight": (h, h), "attention.proj.bias": (h,),
             "ln2.weight": (h,), "ln2.bias": (h,),
             "mlp.up.weight": (h, 4 * h), "mlp.up.bias": (4 * h,),
             "mlp.down.weight": (4 * h, h), "mlp.down.bias": (h,)}
    return {f"layers.{n}.{part}": shape for n in range(layers) for part, shape in parts.items()}


def random_state(layers: int, hidden: int) -> Arrays:
    """Weights of N(0, 1 / fan-in), norms around 1, biases around 0."""
    rng, state = np.random.default_rng(7), {}
    for name, shape in shapes(layers, hidden).items():
        scale = 0.3 if len(shape) == 1 else shape[0] ** -0.5
        centre = 1 if name.endswith(("ln1.weight", "ln2.weight")) else 0
        state[name] = centre + scale * rng.standard_normal(shape)
    return state


def activation(batch: int, seq: int, hidden: int, seed: int) -> np.ndarray:
    """A global N(0, 1) activation."""
    return np.random.default_rng(seed).standard_normal((batch, seq, hidden))


def data(layers: int, hidden: int, heads: int, batch: int, seq: int) -> tuple[Any, Any, Arrays]:
    """The input, the output's gradient and the state for a model of these sizes."""
    return (activation(batch, seq, hidden, 1), activation(batch, seq, hidden, 2),
            random_state(layers, hidden))


def train(model: mm3d.Transformer, x: np.ndarray, dy: np.ndarray, state: Arrays,
          steps: int = 0) -> Arrays:
    """This rank's blocks of outputs and gradients of a model in `state`, after some steps of
    SGD, and of the parameters then."""
    model.load(state)
    for step in range(steps + 1):
        model.zero_gradients()
        y, saved = model.forward(model.shard(x))
        dx = model.backward(model.shard(dy), saved)
        for p in model.parameters if step < steps else ():
            p.value -= 0.01 * p.grad
    return {"y": y, "dx": dx, **{p.name: p.grad for p in model.parameters},
            **{f"new {p.name}": p.value for p in model.parameters}}


@functools.cache
def serial(sizes: str, causal: bool, steps: int = 0) -> Arrays:
    """`train` on one rank, in float64, for the `SIZES` of that name."""
    with Parallelism("serial").on(MPI.COMM_SELF, "numpy") as scheme:
        model = mm3d.Transformer(scheme, **SIZES[sizes], dtype="float64", causal=causal)
        # Copies: what is kept here is not to count as memory of later tests.
        return {name: np.array(a) for name, a in
                train(model, *data(**SIZES[sizes]), steps).items()}


def differences(model: mm3d.Transformer, results: Arrays, expected: Arrays,
                forward: float, backward: float) -> list[str]:
    """What differs, on this rank, by more than `forward` (y) or `backward` (the rest) relative
    to the norm of the whole array.

    Every rank compares its own block, so that copies are compared one by one.
    """
    wrong = [f"{name} is only on one side" for name in results.keys() ^ expected.keys()]
    layouts = dict.fromkeys(("y", "dx"), (model.outer.layout(), model.shape))
    for p in model.parameters:
        layouts[p.name] = layouts[f"new {p.name}"] = p.layout, p.shape
    to_host = model.grid.backend.to_host
    for name in results.keys() & expected.keys():
        layout, shape = layouts[name]
        b = expected[name].reshape(shape)[layout.slices(model.grid, shape)]
        a = to_host(results[name]).astype(float)
        error = np.linalg.norm(a - b) / np.linalg.norm(expected[name])
        if a.shape != b.shape or not error <= (forward if name == "y" else backward):
            wrong.append(f"{name}: {error:.1e}")
    return sorted(wrong)


def wrong_slopes(gradients: Arrays, dy: np.ndarray, output: Callable, x: np.ndarray,
                 state: Arrays) -> list[str]:
    """Names of the gradients of ``sum(dy * output(x, state))`` in the input ("dx") and in all of
    `state` that are not its central difference along a random direction."""
    rng, h, wrong = np.random.default_rng(3), 1e-5, []
    for name, a in {"dx": x, **state}.items():
        v = rng.standard_normal(a.shape)
        v /= np.linalg.norm(v)
        up, down = (np.vdot(dy, output(x + t * v, state) if name == "dx" else
                            output(x, state | {name: a + t * v})) for t in (h, -h))
        error = abs((up - down) / (2 * h) - np.vdot(gradients[name], v))
        if not error <= 1e-6 * np.linalg.norm(gradients[name]):
            wrong.append(f"{name}: {error:.1e}")
    return wrong


def passes(model: mm3d.Transformer, order: str) -> Arrays:
    """Copies of the results of passes of some micro-batches, such as "Fa Fb Ba Bb Wb Wa", and of
    the gradients in the end; D is backward in one piece."""
    saved, operands, found = {}, {}, {}
    model.zero_gradients()
    for kind, name in order.split():
        if kind == "F":
            found[f"y{name}"], saved[name] = model.forward(model.random(name))
        elif kind == "D":
            found[f"dx{name}"] = model.backward(model.random(f"d{name}"), saved.pop(name))
        elif kind == "B":
            found[f"dx{name}"], operands[name] = model.backward_input(model.random(f"d{name}"),
                                                                      saved.pop(name))
        else:
            model.backward_weights(operands.pop(name))
    found |= {p.name: p.grad for p in model.parameters}
    return {name: np.array(model.grid.backend.to_host(a)) for name, a in found.items()}


def different(found: Arrays, expected: Arrays) -> list[str]:
    """Names of the arrays that are not equal to the bit."""
    assert found.keys() == expected.keys()
    return [name for name, a in expected.items() if not np.array_equal(found[name], a)]
