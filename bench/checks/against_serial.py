"""No time without a correct result: the measured model against the serial scheme."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

import mm3d
from bench.instruments.clock import wait_patiently
from bench.records.measurements import Check
from mm3d import ModelSizes, launcher

# Relative Frobenius errors that rounding alone stays below: (outputs, gradients).  They hold for
# the presets' sizes, where sums have up to some ten thousand terms: the error of a blocked sum
# grows slowly with its length, and is hundreds of eps for the deepest gradient.  A wrong or
# missing collective gives errors of order one.
TOLERANCES = {"float64": (1e-12, 1e-11), "float32": (1e-5, 5e-5)}

# Where results are rounded to few digits the serial scheme's are, too, in the same places but for
# partial sums, so that few roundings differ: distances of one from the next number, times the
# square root of the layers.  A factor of 1.02 is beyond that for up to two layers in bfloat16.
EPS = {"tf32": 2.0 ** -10, "float16": 2.0 ** -10, "bfloat16": 2.0 ** -7}
UNITS = 1.75

# Words of the whole quantities whose blocks come to rank 0 in one gather; where ranks share few
# cores, each gather has all of them take turns.
BATCH = 2 ** 24

Block = tuple[tuple[slice, ...], np.ndarray]


def tolerances(rounding: str, layers: int) -> tuple[float, float]:
    """The relative errors that outputs and gradients may have.

    Parameters
    ----------
    rounding : str
        What numbers are rounded to: the dtype, or "tf32" where products of float32 are.
    layers : int
        Of the model that is compared.
    """
    if rounding in TOLERANCES:
        return TOLERANCES[rounding]
    return (UNITS * EPS[rounding] * math.sqrt(layers),) * 2


def build(scheme, sizes: ModelSizes, seed: int, dtype: str, causal: bool = False,
          recompute: str = "none") -> mm3d.Transformer:
    """The Transformer of `sizes`: the same numbers whatever the scheme."""
    return mm3d.Transformer(scheme, sizes.layers, sizes.hidden, sizes.heads, sizes.batch,
                            sizes.seq, seed, dtype, causal, recompute=recompute)


@dataclass(frozen=True)
class Part:
    """A quantity that is compared, and this rank's block of it."""

    quantity: str
    block: Any
    layout: mm3d.Layout
    shape: tuple[int, ...]
    tolerance: float


def compare(model: mm3d.Transformer, output, input_gradient, sizes: ModelSizes, seed: int,
            rounding: str, other: Callable[[], dict[str, np.ndarray]] | None = None,
            causal: bool = False) -> list[Check]:
    """Outputs and gradients of one step of `model` against the serial scheme.

    Parameters
    ----------
    model : Transformer
        After one backward pass from cleared gradients, with ``model.random("input")`` and
        ``model.random("output gradient")``.
    output, input_gradient : array
        This rank's blocks of what that step gave.
    sizes, seed, causal
        What `model` was built from.
    rounding : str
        See `tolerances`.
    other : callable, optional
        Gives on rank 0 the quantities by name, to compare with instead of the serial scheme's.

    Returns
    -------
    list of Check
        The output, the input's gradient and that of every parameter, the same on every rank.
        Every copy of every block counts: the error is that of the worst copies together.

    Notes
    -----
    Blocks come together on rank 0, which computes the reference with all cores while the others
    sleep: many ranks may share few cores and one memory.  Of copies that are equal to the bit
    only the first is sent.
    """
    grid = model.grid
    forward, gradient = tolerances(rounding, sizes.layers)
    layout = model.outer.layout()
    parts = [Part("output", output, layout, model.shape, forward),
             Part("input gradient", input_gradient, layout, model.shape, gradient)]
    parts += [Part(f"gradient of {p.name}", p.grad, p.layout, p.shape, gradient)
              for p in model.parameters]
    found = _collect(parts, grid)
    checks = None
    if grid.rank == 0:
        with threadpool_limits(launcher.cores(), user_api="blas"):
            reference = other() if other else _reference(
                grid.backend, sizes, seed, model.dtype, causal)
        shapes = {part.quantity: part.shape for part in parts}
        reference = {name: np.reshape(a, shapes[name]) for name, a in reference.items()}
        checks = [Check(part.quantity, worst_error(found.pop(part.quantity),
                                                   reference.pop(part.quantity)), part.tolerance)
                  for part in parts]
    wait_patiently(grid.comm)
    return grid.comm.bcast(checks)


def failure(checks: list[Check], reference: str = "the serial scheme") -> str | None:
    """What to say of checks against `reference` that did not pass; None when all did."""
    failed = [check for check in checks if not check.passed]
    if not failed:
        return None
    worst = max(failed, key=lambda check: np.nan_to_num(check.error, nan=np.inf))
    return (f"differs from {reference}: {worst.quantity} has a relative error of "
            f"{worst.error:.2g}, tolerance {worst.tolerance:g} ({len(failed)} of {len(checks)} "
            f"quantities fail); no times were written")


def worst_error(blocks: list[Block], expected: np.ndarray) -> float:
    """Relative Frobenius error of the worst copy of each block.

    Parameters
    ----------
    blocks : list of (tuple of slice, ndarray)
        Where in the whole array a block lies, and the block; of one place there may be several.
    expected : ndarray
        The whole array.

    Returns
    -------
    float
        NaN where a block is none, has another shape than its place, or no block covers a place.
    """
    squares: dict[tuple, np.float64] = {}
    covered = np.zeros(expected.shape, bool)
    for place, block in blocks:
        wanted = expected[place].astype(np.float64)
        if block.shape != wanted.shape:
            return math.nan
        covered[place] = True
        square = np.float64(np.linalg.norm(block.astype(np.float64) - wanted)) ** 2
        key = tuple((s.start, s.stop) for s in place)
        squares[key] = np.maximum(squares.get(key, square), square)    # keeps a NaN
    if not covered.all():
        return math.nan
    difference = math.sqrt(sum(squares.values()))
    return difference / float(np.linalg.norm(expected.astype(np.float64))) if difference else 0.0


def _reference(backend, sizes: ModelSizes, seed: int, dtype: str,
               causal: bool) -> dict[str, np.ndarray]:
    """The quantities of `compare` by the serial scheme, on this rank alone."""
    scheme = mm3d.scheme("serial", MPI.COMM_SELF, backend=backend)
    model = build(scheme, sizes, seed, dtype, causal)
    y, saved = model.forward(model.random("input"))
    dx = model.backward(model.random("output gradient"), saved)
    host = backend.to_host
    return {"output": host(y), "input gradient": host(dx)} | {
        f"gradient of {p.name}": host(p.grad) for p in model.parameters}


def _collect(parts: list[Part], grid) -> dict[str, list[Block]] | None:
    """On rank 0, by quantity, the blocks of all ranks, but only once what is equal to the bit."""
    blocks, keys = [], []
    for part in parts:
        block = grid.backend.to_host(part.block)
        place = part.layout.slices(grid, part.shape)
        blocks.append((place, block))
        digest = hashlib.blake2b(np.ascontiguousarray(block), digest_size=20).digest()
        keys.append((tuple((s.start, s.stop) for s in place), block.shape, digest))
    everyone = grid.comm.allgather(keys)
    found: dict[str, list[Block]] = {part.quantity: [] for part in parts}
    for batch in _batches(parts):
        wanted = [k for k in batch if blocks[k][1].size and
                  [keys[k] for keys in everyone].index(keys[k]) == grid.rank]
        for sent in grid.comm.gather({k: blocks[k] for k in wanted}) or ():
            for k, block in sent.items():
                found[parts[k].quantity].append(block)
    return found if grid.rank == 0 else None


def _batches(parts: list[Part]) -> list[list[int]]:
    """The numbers of the parts, in groups that are sent together: of `BATCH` words or one part."""
    batches, words = [], BATCH
    for k, part in enumerate(parts):
        words += math.prod(part.shape)
        if words > BATCH:
            batches.append([])
            words = math.prod(part.shape)
        batches[-1].append(k)
    return batches
