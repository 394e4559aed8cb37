"""Check the results of a device against NumPy before it is timed.

Products and kernels are compared with float64; a model, whose results combine the roundings of
many operations, with NumPy's that rounds in the same places (`bench.checks.rounding`).
"""

from dataclasses import replace
from typing import Any, Callable

import numpy as np
from mpi4py import MPI

import mm3d
from bench.checks import operation, tolerances
from bench.checks.against_serial import worst_error
from bench.checks.passed import require_passed
from bench.checks.tolerances import EPS
from bench.checks.rounding import rounding_backend
from bench.experiments.gpu import gpu_cases
from bench.experiments.gpu.gpt_steps import FEW, GptStep, TorchGptStep, gradients_of, make_gpt
from bench.experiments.gpu.gpu_cases import Mode
from bench.experiments.training.timed_step import draw_batch
from bench.records.measurements import Check
from mm3d.arrays import backend as backends
from mm3d.arrays.backend import Array, Backend
from mm3d.arrays.products import matmul
from mm3d.config import Model

SIZES = dict(layers=1, hidden=96, heads=6, batch=3, seq=32)
KERNEL_TOLERANCE = 16    # relative error of a result, in units of the last place
RunStep = Callable[[str | Backend, str], dict[str, np.ndarray]]
TORCH_ROUNDINGS = 4
LOSS_ERROR = 1e-5    # relative, of sums in float32
COMPARED = 8    # first and last rows (or columns) of a result that are compared


def check_products(mode: Mode, a: Array, b: Array, results: dict[str, Array],
                   seed: int) -> list[Check]:
    """Compare each of the `results` with A B; WrongResult if one differs."""
    size = " x ".join(map(str, a.shape))
    return [check for how, c in results.items() for check in operation.check_own_product(
        f"C of {size} {mode}, {how}", (a, b, c), seed, eps=EPS[str(mode)])]


def check_kernels(mode: Mode, a: Array, b: Array, c: Array) -> list[Check]:
    """Check the kernels of `gpu_cases.elementwise_calls` at the size that is timed.

    The first and last columns of sums over rows are compared, the first and last rows of all
    other results.

    Raises
    ------
    WrongResult
        When one is wrong.
    """
    backend = mode.backend

    def ends(x: Array, dim: int = 0) -> np.ndarray:
        few, skipped = min(COMPARED, x.shape[dim]), (slice(None),) * dim
        return np.concatenate([
            backend.to_host(x[(*skipped, rows, ...)]).astype(np.float64)
            for rows in (slice(0, few), slice(x.shape[dim] - few, None))], dim)
    A, B, C = map(ends, (a, b, c))
    readable = gpu_cases.elementwise_calls(backends.get("numpy"), A, B, C)
    cases = gpu_cases.elementwise_calls(backend, a, b, c)
    columns = ends(a, 1)
    sums = {"sum_rows": columns.sum(0), "sum_products": (columns * ends(b, 1)).sum(0)}
    found = []
    for name, (_, step) in cases.items():
        given = step()
        if name in sums:
            error = _relative(ends(given), sums[name])
        else:
            readable[name][1]()
            error = _relative(ends(c), C)
        found.append(Check(f"{name} {mode.dtype}", error, KERNEL_TOLERANCE * EPS[mode.dtype]))
    return require_passed(found)


def run_model_step(library: str | Backend, dtype: str) -> dict[str, np.ndarray]:
    """Run a step of a causal layer of `SIZES`; return its output and all gradients, by name."""
    scheme = mm3d.scheme("serial", MPI.COMM_SELF, None, library)
    net = mm3d.Transformer(scheme, **SIZES, dtype=dtype, causal=True)
    y, saved = net.forward(net.random("x"))
    arrays = {"output": y, "input gradient": net.backward(net.random("dy"), saved)} | {
        f"gradient of {p.name}": p.grad for p in net.parameters}
    return {name: scheme.grid.backend.to_host(a).astype(float) for name, a in arrays.items()}


def check_model(mode: Mode, run_step: RunStep = run_model_step,
                what: str = "a layer") -> Check:
    """Compute the worst relative error of `run_step` in `mode`, with its tolerance.

    The reference is in float64 for float64 and float32, else in NumPy rounded as `mode` rounds.
    """
    few = str(mode) not in tolerances.SERIAL
    with rounding_backend(mode.tf32) as library:
        expected = run_step(library, mode.dtype if few else "float64")
    with mode:
        found = run_step(mode.backend, mode.dtype)
    error = float(np.max([_relative(a, expected[name]) for name, a in found.items()]))
    return Check(f"{what} of hidden {SIZES['hidden']} {mode}", error,
                 tolerances.beside_serial(str(mode), SIZES["layers"])[1])


def check_layer(mode: Mode, run_step: RunStep = run_model_step,
                what: str = "a layer") -> list[Check]:
    """Compare a step of `SIZES` with NumPy's; WrongResult if it differs."""
    return require_passed([check_model(mode, run_step, what)])


def run_gpt_step(library: str | Backend, dtype: str, like: Model) -> dict[str, np.ndarray]:
    """Compute loss and gradients of a GPT of `SIZES`, built `like` another; return them by name.
    """
    how = like.architecture
    small = replace(how, head=None, kv_heads=how.kv_heads and 2, inner=how.inner and 160,
                    window=how.window and SIZES["seq"] // 4)
    model = make_gpt(library, dtype, {**SIZES, "vocab": 5 * SIZES["heads"], "tied": like.tied,
                                      "architecture": small})
    loss = model.step(*draw_batch(model.config.model))
    return {"loss": np.array([loss])} | {
        name: model.mesh.scheme.grid.backend.to_host(a).astype(float)
        for name, a in gradients_of(model).items()}


def check_losses(mode: Mode, ours: GptStep, theirs: TorchGptStep) -> list[Check]:
    """Take `FEW` steps on both sides and compare their losses; WrongResult if one differs.

    AdamW changes the later ones.  They may differ by a tenth of what it changed in a step, or by
    a rounding.
    """
    losses = np.array([[ours(), theirs()] for _ in range(FEW)])
    eps = max(EPS[str(mode)], LOSS_ERROR)
    changed = np.abs(np.diff(losses[:, 1], prepend=losses[0, 1]))
    return require_passed([
        Check(f"loss {number} of {mode} beside PyTorch's", abs(float(a - b)),
              float(max(eps * abs(b), change / 10)))
        for number, ((a, b), change) in enumerate(zip(losses, changed))])


def check_loss(mode: Mode, step: GptStep) -> list[Check]:
    """Take a step; WrongResult unless its loss, after those before, is a finite number."""
    return require_passed([Check(f"a loss of {mode} that is not finite",
                                 float(not np.isfinite(step())), 0.0)])


def check_beside_torch(mode: Mode, what: str, results: dict[str, Array],
                       theirs: dict[str, Any], layers: int = 1) -> list[Check]:
    """Compare the first and last rows of the results of `layers` layers with PyTorch's.

    PyTorch rounds in other places: differences may be `TORCH_ROUNDINGS` tolerances.

    Raises
    ------
    WrongResult
        When one differs.
    """
    tolerance = TORCH_ROUNDINGS * tolerances.beside_serial(str(mode), layers)[1]
    found = []
    for name, a in results.items():
        shape = (-1, a.shape[-1]) if a.ndim > 1 else (1, -1)
        a, b = mode.backend.xp.reshape(a, shape), theirs[name].reshape(shape)
        for rows in (slice(0, COMPARED), slice(max(0, a.shape[0] - COMPARED), None)):
            own = mode.backend.to_host(a[rows, :]).astype(np.float64)
            found.append(Check(f"{name} of {what} {mode} beside PyTorch's",
                               _relative(own, b[rows].double().cpu().numpy()), tolerance))
    return require_passed(found)


def check_finite(backend: Backend, name: str,
                 step: Callable[[], tuple[Array, ...]]) -> list[Check]:
    """Raise WrongResult when a result of `step` has an infinite number or a NaN."""
    wrong = sum(int((~np.isfinite(backend.to_host(a).astype(np.float32))).sum()) for a in step())
    return require_passed([Check(f"numbers of {name} that are not finite", float(wrong), 0.0)])


def graph_problem(backend: Backend) -> str:
    """Return why a product cannot be recorded as a graph and repeated; "" if it can.

    A product is the likeliest to fail: cuBLAS must neither wait nor allocate meanwhile.
    """
    first = np.arange(256, dtype=np.float32).reshape(16, 16) % 7
    a = backend.asarray(first)
    try:
        again = backend.graph(lambda: matmul(a, a))
        for given in (first, first - 3):
            a[...] = backend.asarray(given)
            if not np.array_equal(backend.to_host(again()), given @ given):
                return "a recorded product, repeated, is not the product of what is there then"
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return str(error)
    return ""


def _relative(found: np.ndarray, expected: np.ndarray) -> float:
    return worst_error([(tuple(slice(0, n) for n in expected.shape), found)], expected)
