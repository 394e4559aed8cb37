"""What ``bench doctor --gpu`` checks besides: that this GPU computes and travels as it should.

Each is a function of `bench.doctor.child_jobs.Facts`, as those of `bench.doctor.checks` are.
"""

import subprocess
import sys
from typing import Callable

import numpy as np

from bench.checks.freivalds import EPS
from bench.doctor.checks import FAILED, Finding, OK, SKIPPED, WARNING
from bench.doctor.child_jobs import Facts, died, ended
from bench.experiments.gpu import device_checks, gpu_cases
from mm3d import launcher
from mm3d.arrays import backend as backends
from mm3d.arrays.products import matmul
from mm3d.transport.device import TRANSPORTS


def usable() -> backends.Backend | str:
    """The backend, or why there is none."""
    try:
        return backends.get("cupy")
    except ValueError as error:
        return str(error)


def device(facts: Facts) -> Finding:
    """CuPy finds a GPU."""
    found = usable()
    if isinstance(found, str):
        return Finding("device", FAILED, found)
    about = found.describe()
    return Finding("device", OK, f"{about['gpu']}, {about['gpu_memory'] / 2 ** 30:.0f} GiB, CUDA "
                   f"{about['cuda_runtime']}, driver {about['cuda_driver']}, more types: "
                   f"{', '.join(map(str, found.more_dtypes)) or 'none (ml_dtypes is missing)'}")


def on_device(check: Callable[[backends.Backend], Finding]) -> Callable[[Facts], Finding]:
    """A check of the backend, which can say nothing without one."""
    def checked(facts: Facts) -> Finding:
        found = usable()
        if isinstance(found, str):
            return Finding(check.__name__, SKIPPED, "no usable GPU")
        return check(found)
    checked.__name__, checked.__doc__ = check.__name__, check.__doc__
    return checked


@on_device
def products(backend: backends.Backend) -> Finding:
    """Products in every type, whose sums are float32 at least."""
    random, wrong, worst = np.random.default_rng(0), [], 0.0
    A, B = (random.standard_normal((257, 257)).astype(np.float32) for _ in range(2))
    for mode in gpu_cases.modes(backend):
        with mode:
            a, b = (backend.xp.astype(backend.asarray(x), np.dtype(mode.dtype)) for x in (A, B))
            found = backend.to_host(matmul(a, b)).astype(float)
            a, b = (backend.to_host(x).astype(float) for x in (a, b))
        # A result is rounded once to its type, and float32 sums differ in their order.
        error = np.max(np.abs(found - a @ b) / (np.abs(a) @ np.abs(b))) / EPS[str(mode)]
        worst = max(worst, error)
        if not error <= 4:
            wrong.append(f"{mode} by {error:.1f} units")
    text = ", ".join(map(str, gpu_cases.modes(backend)))
    return (Finding("products", FAILED, f"wrong: {', '.join(wrong)}") if wrong else
            Finding("products", OK, f"{text}: right to {worst:.2g} units in the last place"))


@on_device
def model(backend: backends.Backend) -> Finding:
    """Forward and backward of a layer, with every kernel, beside NumPy's."""
    found = {str(mode): device_checks.model_check(mode) for mode in
             [gpu_cases.Mode(backend, "float64"), *gpu_cases.modes(backend)]}
    wrong = [name for name, check in found.items() if not check.passed]
    text = ", ".join(f"{name} {check.error:.1e}" for name, check in found.items())
    return Finding("model", FAILED if wrong else OK,
                   f"{'wrong in ' + ', '.join(wrong) + ': ' if wrong else ''}errors {text}")


@on_device
def graph(backend: backends.Backend) -> Finding:
    """A product recorded as a CUDA graph and repeated on other numbers."""
    problem = device_checks.graph_problem(backend)
    return (Finding("graph", WARNING, f"no step can be a CUDA graph: {problem}") if problem else
            Finding("graph", OK, "a recorded product follows its operands"))


def transport(kind: str) -> Callable[[Facts], Finding]:
    """The check that ranks carry device arrays in this way, in a child job."""
    name = f"by {kind}"

    def checked(facts: Facts) -> Finding:
        if isinstance(usable(), str):
            return Finding(name, SKIPPED, "no usable GPU")
        command = [*facts.launcher, sys.executable, "-m", "mm3d.selftest"]
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            text=True, start_new_session=True,
            env=launcher.for_launcher(command)
            | {"MM3D_BACKEND": "cupy", "MM3D_TRANSPORT": kind})
        try:
            out, err = process.communicate(timeout=facts.limit)
            problem = died(process.returncode, f"{out}\n{err}") if process.returncode else ""
        except subprocess.TimeoutExpired:
            out, problem = ended(process), f"did not end within {facts.limit:g} seconds"
        if problem:
            return Finding(name, FAILED if kind == "staged" else WARNING,
                           f"MM3D_TRANSPORT={kind} {problem}")
        return Finding(name, OK, out.strip().splitlines()[-1])
    checked.__name__, checked.__doc__ = name, transport.__doc__
    return checked


CHECKS: list[Callable[[Facts], Finding]] = [device, products, model, graph,
                                            *map(transport, TRANSPORTS)]
