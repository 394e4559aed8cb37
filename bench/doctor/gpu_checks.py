"""Check that the GPU here computes right, and that its arrays travel: ``bench doctor --gpu``.

Each check is a function of `bench.doctor.child_jobs.Facts`, as in `bench.doctor.checks`.
"""

import sys
from typing import Callable

import numpy as np

from bench.checks.tolerances import EPS
from bench.doctor.checks import FAILED, Finding, OK, SKIPPED, WARNING
from bench.doctor.child_jobs import Facts, describe_failure
from bench.experiments.gpu import device_checks, gpu_cases
from mm3d import launcher
from mm3d.arrays import backend as backends
from mm3d.arrays.products import matmul
from mm3d.child_process import run_child
from mm3d.transport.choice import DEVICE_TRANSPORTS


def find_backend() -> backends.Backend | str:
    """Return CuPy's backend, or the reason why there is none."""
    try:
        return backends.get("cupy")
    except ValueError as error:
        return str(error)


def device(facts: Facts) -> Finding:
    """Check that CuPy finds a GPU."""
    found = find_backend()
    if isinstance(found, str):
        return Finding("device", FAILED, found)
    about = found.describe_device()
    return Finding("device", OK, f"{about['gpu']}, {about['gpu_memory'] / 2 ** 30:.0f} GiB, CUDA "
                   f"{about['cuda_runtime']}, driver {about['cuda_driver']}, more types: "
                   f"{', '.join(map(str, found.more_dtypes)) or 'none (ml_dtypes is missing)'}, "
                   f"flash attention: {about.get('flash_attention', 'none')}")


def needs_backend(check: Callable[[backends.Backend], Finding]) -> Callable[[Facts], Finding]:
    """Turn a check of a backend into one of the facts, skipped without a usable GPU."""
    def checked(facts: Facts) -> Finding:
        found = find_backend()
        if isinstance(found, str):
            return Finding(check.__name__, SKIPPED, "no usable GPU")
        return check(found)
    checked.__name__, checked.__doc__ = check.__name__, check.__doc__
    return checked


@needs_backend
def products(backend: backends.Backend) -> Finding:
    """Check products in every dtype; their sums are at least float32."""
    random, wrong, worst = np.random.default_rng(0), [], 0.0
    A, B = (random.standard_normal((257, 257)).astype(np.float32) for _ in range(2))
    for mode in gpu_cases.list_modes(backend):
        with mode:
            a, b = (backend.xp.astype(backend.asarray(x), np.dtype(mode.dtype)) for x in (A, B))
            found = backend.to_host(matmul(a, b)).astype(float)
            a, b = (backend.to_host(x).astype(float) for x in (a, b))
        # A result is rounded once to its dtype, and float32 sums differ by their order.
        error = np.max(np.abs(found - a @ b) / (np.abs(a) @ np.abs(b))) / EPS[str(mode)]
        worst = max(worst, error)
        if not error <= 4:
            wrong.append(f"{mode} by {error:.1f} units")
    text = ", ".join(map(str, gpu_cases.list_modes(backend)))
    return (Finding("products", FAILED, f"wrong: {', '.join(wrong)}") if wrong else
            Finding("products", OK, f"{text}: right to {worst:.2g} units in the last place"))


@needs_backend
def model(backend: backends.Backend) -> Finding:
    """Compare forward and backward of a layer, which call every kernel, with NumPy's."""
    found = {str(mode): device_checks.check_model(mode) for mode in
             [gpu_cases.Mode(backend, "float64"), *gpu_cases.list_modes(backend)]}
    wrong = [name for name, check in found.items() if not check.passed]
    text = ", ".join(f"{name} {check.error:.1e}" for name, check in found.items())
    return Finding("model", FAILED if wrong else OK,
                   f"{'wrong in ' + ', '.join(wrong) + ': ' if wrong else ''}errors {text}")


@needs_backend
def graph(backend: backends.Backend) -> Finding:
    """Check that a product recorded as a CUDA graph can be repeated on other numbers."""
    problem = device_checks.graph_problem(backend)
    return (Finding("graph", WARNING, f"no step can be a CUDA graph: {problem}") if problem else
            Finding("graph", OK, "a recorded product follows its operands"))


def transport_check(kind: str) -> Callable[[Facts], Finding]:
    """Return the check that a transport moves device arrays between ranks, in a child job."""
    name = f"by {kind}"

    def checked(facts: Facts) -> Finding:
        if isinstance(find_backend(), str):
            return Finding(name, SKIPPED, "no usable GPU")
        command = [*facts.launcher, sys.executable, "-m", "mm3d.selftest"]
        environment = {"MM3D_BACKEND": "cupy", "MM3D_TRANSPORT": kind}
        child = run_child(command, facts.limit,
                          env=launcher.environment_to_start(command) | environment)
        problem = describe_failure(child.status, f"{child.out}\n{child.err}", facts.limit)
        if problem:
            return Finding(name, FAILED if kind == "staged" else WARNING,
                           f"MM3D_TRANSPORT={kind} {problem}")
        return Finding(name, OK, child.out.strip().splitlines()[-1])
    checked.__name__, checked.__doc__ = name, transport_check.__doc__
    return checked


GPU_CHECKS: list[Callable[[Facts], Finding]] = [device, products, model, graph,
                                                *map(transport_check, DEVICE_TRANSPORTS)]
