"""No time without a correct result: the measured model against the serial scheme."""

import numpy as np
from mpi4py import MPI
from threadpoolctl import threadpool_limits

import mm3d
from bench.cases import Sizes
from mm3d import environment, timing
from mm3d.store import Check

# Relative Frobenius errors that rounding alone stays below: (outputs, gradients).  They hold for
# the presets' sizes, where sums have up to some ten thousand terms: the error of a blocked sum
# grows slowly with its length, and is hundreds of eps for the deepest gradient.  A wrong or
# missing collective gives errors of order one.
TOLERANCES = {"float64": (1e-12, 1e-11), "float32": (1e-5, 5e-5)}


def build(scheme, sizes: Sizes, seed: int, dtype: str) -> mm3d.Transformer:
    """The Transformer of `sizes`: the same numbers whatever the scheme."""
    return mm3d.Transformer(scheme, layers=sizes.layers, hidden=sizes.hidden, heads=sizes.heads,
                            batch=sizes.batch, seq=sizes.seq, seed=seed, dtype=dtype)


def compare(model: mm3d.Transformer, output, input_gradient, sizes: Sizes, seed: int,
            dtype: str) -> list[Check]:
    """Outputs and gradients of one step of `model` against the serial scheme.

    Parameters
    ----------
    model : Transformer
        After one backward pass from cleared gradients, with ``model.random("input")`` and
        ``model.random("output gradient")``.
    output, input_gradient : array
        This rank's blocks of what that step gave.
    sizes, seed, dtype
        What `model` was built from.

    Returns
    -------
    list of Check
        The output, the input's gradient and that of every parameter, the same on every rank.

    Notes
    -----
    Rank 0 computes the reference with all cores while the others sleep, and one quantity at a
    time is brought together there: many ranks may share few cores and one memory.
    """
    grid = model.grid
    reference = None
    if grid.rank == 0:
        with threadpool_limits(environment.cores(), user_api="blas"):
            reference = _reference(grid.backend, sizes, seed, dtype)
    timing.wait_patiently(grid.comm)

    forward, gradient = TOLERANCES[dtype]
    layout = model.outer.layout()
    parts = [("output", output, layout, model.shape, forward),
             ("input gradient", input_gradient, layout, model.shape, gradient)]
    parts += [(f"gradient of {p.name}", p.grad, p.layout, p.shape, gradient)
              for p in model.parameters]
    checks = []
    for quantity, block, layout, shape, tolerance in parts:
        whole = _collect(block, layout, grid, shape)
        if reference is not None:
            error = relative_error(whole, reference.pop(quantity))
            checks.append(Check(quantity, error, tolerance))
    return grid.comm.bcast(checks)


def failure(checks: list[Check]) -> str | None:
    """What to say of checks that did not pass; None when all did."""
    failed = [check for check in checks if not check.passed]
    if not failed:
        return None
    worst = max(failed, key=lambda check: np.nan_to_num(check.error, nan=np.inf))
    return (f"differs from the serial scheme: {worst.quantity} has a relative error of "
            f"{worst.error:.2g}, tolerance {worst.tolerance:g} ({len(failed)} of {len(checks)} "
            f"quantities fail); no times were written")


def relative_error(found: np.ndarray, expected: np.ndarray) -> float:
    """Frobenius norm of the difference over that of `expected`, in float64."""
    expected = expected.astype(np.float64)
    difference = np.linalg.norm(found.astype(np.float64) - expected)
    return float(difference / np.linalg.norm(expected)) if difference else 0.0


def _reference(backend, sizes: Sizes, seed: int, dtype: str) -> dict[str, np.ndarray]:
    """The quantities of `compare` by the serial scheme, on this rank alone."""
    scheme = mm3d.scheme("serial", MPI.COMM_SELF, backend=backend)
    model = build(scheme, sizes, seed, dtype)
    y, saved = model.forward(model.random("input"))
    dx = model.backward(model.random("output gradient"), saved)
    host = backend.to_host
    return {"output": host(y), "input gradient": host(dx)} | {
        f"gradient of {p.name}": host(p.grad) for p in model.parameters}


def _collect(block, layout, grid, shape: tuple[int, ...]) -> np.ndarray | None:
    """The whole array on rank 0; NaN where no rank holds a part of it."""
    blocks = grid.comm.gather(grid.backend.to_host(block))
    if blocks is None:
        return None
    whole = np.full(shape, np.nan, blocks[0].dtype)
    for coords, part in zip(grid.everywhere(), blocks):
        place = layout.slices(grid, shape, coords)
        if part.size:
            whole[place] = part
    return whole
