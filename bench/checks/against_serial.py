"""Compare a model's outputs and gradients with those of the serial scheme."""

import hashlib
import math
from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

import mm3d
from bench.checks import tolerances
from bench.records.measurements import Check
from mm3d import launcher
from mm3d.launcher import wait_patiently
from mm3d.model.stack import Stack

# Words of the global quantities whose blocks are sent to rank 0 in one gather.  They are sent
# together because in each gather all ranks take turns where they share few cores.
WORDS_PER_GATHER = 2 ** 24

PlacedBlock = tuple[tuple[slice, ...], np.ndarray]


@dataclass(frozen=True)
class _Quantity:
    """A global quantity to compare: its name, this rank's block, and its tolerance."""

    name: str
    block: Any
    layout: mm3d.Layout
    shape: tuple[int, ...]
    tolerance: float


def compare_with_serial(model: mm3d.Transformer, output, input_gradient, rounding: str,
                        other: Callable[[], dict[str, np.ndarray]] | None = None,
                        words_per_gather: int = WORDS_PER_GATHER) -> list[Check]:
    """Compare outputs and gradients of one step of `model` with those of the serial scheme.

    Parameters
    ----------
    model : Transformer
        After one backward pass from cleared gradients, with ``model.random("input")`` and
        ``model.random("output gradient")``, of which this rank has blocks of the results.
    rounding : str
        See `bench.checks.tolerances.beside_serial`.
    other : callable, optional
        Returns on rank 0 the quantities by name, to compare with instead of the serial scheme's.
    words_per_gather : int
        Words that are gathered at once; a quantity of more is gathered alone.

    Notes
    -----
    The checks, of the output, the input's gradient and that of every parameter, are the same on
    every rank; the worst copy of each block counts.  Rank 0 gathers the blocks and computes the
    reference with all cores while the other ranks sleep, since many ranks may share few cores and
    one memory.  Of copies equal to the bit only the first is sent.
    """
    grid = model.grid
    forward, gradient = tolerances.beside_serial(rounding, model.stack.layers)
    layout = model.outer.layout()
    parts = [_Quantity("output", output, layout, model.shape, forward),
             _Quantity("input gradient", input_gradient, layout, model.shape, gradient)]
    parts += [_Quantity(f"gradient of {p.name}", p.grad, p.layout, p.shape, gradient)
              for p in model.parameters]
    found = _collect(parts, grid, words_per_gather)
    checks = None
    if grid.rank == 0:
        with threadpool_limits(launcher.cores(), user_api="blas"):
            reference = other() if other else _reference(grid.backend, model.stack)
        shapes = {part.name: part.shape for part in parts}
        reference = {name: np.reshape(a, shapes[name]) for name, a in reference.items()}
        checks = [Check(part.name,
                        worst_error(found.pop(part.name), reference.pop(part.name)),
                        part.tolerance) for part in parts]
    wait_patiently(grid.comm)
    return grid.comm.bcast(checks)


def worst_error(blocks: list[PlacedBlock], expected: np.ndarray) -> float:
    """Compute the relative Frobenius error of the worst copy of each block.

    Several blocks may have the same place in the global array.  The error is NaN if a block has a
    NaN or another shape than its place, or if a place has no block.
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


def _reference(backend, stack: Stack) -> dict[str, np.ndarray]:
    """Compute the quantities of `compare_with_serial` by the serial scheme, on this rank alone."""
    scheme = mm3d.scheme("serial", MPI.COMM_SELF, backend=backend)
    model = mm3d.Transformer(scheme, stack, recompute="none", master=None)
    y, saved = model.forward(model.random("input"))
    dx = model.backward(model.random("output gradient"), saved)
    host = backend.to_host
    return {"output": host(y), "input gradient": host(dx)} | {
        f"gradient of {p.name}": host(p.grad) for p in model.parameters}


def _collect(parts: list[_Quantity], grid, words: int) -> dict[str, list[PlacedBlock]] | None:
    """Gather the blocks of all ranks on rank 0, by quantity; of equal copies only the first."""
    blocks, keys = [], []
    for part in parts:
        block = grid.backend.to_host(part.block)
        place = part.layout.slices(grid, part.shape)
        blocks.append((place, block))
        digest = hashlib.blake2b(np.ascontiguousarray(block), digest_size=20).digest()
        keys.append((tuple((s.start, s.stop) for s in place), block.shape, digest))
    everyone = grid.comm.allgather(keys)
    found: dict[str, list[PlacedBlock]] = {part.name: [] for part in parts}
    for batch in _batches(parts, words):
        wanted = [k for k in batch if blocks[k][1].size and
                  [keys[k] for keys in everyone].index(keys[k]) == grid.rank]
        for sent in grid.comm.gather({k: blocks[k] for k in wanted}) or ():
            for k, block in sent.items():
                found[parts[k].name].append(block)
    return found if grid.rank == 0 else None


def _batches(parts: list[_Quantity], most: int) -> list[list[int]]:
    """Group the indices of the parts: at most `most` words a group, or one part."""
    batches, words = [], most
    for k, part in enumerate(parts):
        words += math.prod(part.shape)
        if words > most:
            batches.append([])
            words = math.prod(part.shape)
        batches[-1].append(k)
    return batches
