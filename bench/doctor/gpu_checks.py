"""Check that the GPU here computes right, and that its arrays travel: ``bench doctor --gpu``."""

import sys

import numpy as np

from bench.checks.tolerances import EPS
from bench.doctor.checks import FAILED, OK, WARNING, DoctorCheck, Finding, skip_unless
from bench.doctor.child_jobs import Facts, describe_failure
from bench.experiments.gpu import device_checks, gpu_cases
from mm3d import launcher
from mm3d.arrays import backend as backends
from mm3d.arrays.products import matmul
from mm3d.child_process import run_child
from mm3d.transport.choice import DEVICE_TRANSPORTS


def device(facts: Facts) -> Finding:
    """Check that CuPy finds a GPU."""
    try:
        found = backends.get("cupy")
    except ValueError as error:
        return Finding(FAILED, str(error))
    about = found.describe_device()
    return Finding(OK, f"{about['gpu']}, {about['gpu_memory'] / 2 ** 30:.0f} GiB, CUDA "
                   f"{about['cuda_runtime']}, driver {about['cuda_driver']}, more types: "
                   f"{', '.join(map(str, found.more_dtypes)) or 'none (ml_dtypes is missing)'}, "
                   f"flash attention: {about.get('flash_attention', 'none')}")


needs_gpu = skip_unless(lambda facts: device(facts).state == OK, "no usable GPU")


@needs_gpu
def products(facts: Facts) -> Finding:
    """Check products in every dtype; their sums are at least float32."""
    backend = backends.get("cupy")
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
    return (Finding(FAILED, f"wrong: {', '.join(wrong)}") if wrong else
            Finding(OK, f"{text}: right to {worst:.2g} units in the last place"))


@needs_gpu
def model(facts: Facts) -> Finding:
    """Compare forward and backward of a layer, which call every kernel, with NumPy's."""
    backend = backends.get("cupy")
    found = {str(mode): device_checks.check_model(mode) for mode in
             [gpu_cases.Mode(backend, "float64"), *gpu_cases.list_modes(backend)]}
    wrong = [name for name, check in found.items() if not check.passed]
    text = ", ".join(f"{name} {check.error:.1e}" for name, check in found.items())
    return Finding(FAILED if wrong else OK,
                   f"{'wrong in ' + ', '.join(wrong) + ': ' if wrong else ''}errors {text}")


@needs_gpu
def graph(facts: Facts) -> Finding:
    """Check that a product recorded as a CUDA graph can be repeated on other numbers."""
    problem = device_checks.graph_problem(backends.get("cupy"))
    return (Finding(WARNING, f"no step can be a CUDA graph: {problem}") if problem else
            Finding(OK, "a recorded product follows its operands"))


def transport_check(kind: str) -> DoctorCheck:
    """Return the check that a transport moves device arrays between ranks, in a child job."""
    def check(facts: Facts) -> Finding:
        command = [*facts.launcher, sys.executable, "-m", "mm3d.selftest"]
        environment = {"MM3D_BACKEND": "cupy", "MM3D_TRANSPORT": kind}
        child = run_child(command, facts.limit,
                          env=launcher.environment_to_start(command) | environment)
        problem = describe_failure(child.status, f"{child.out}\n{child.err}", facts.limit)
        if problem:
            return Finding(FAILED if kind == "staged" else WARNING,
                           f"MM3D_TRANSPORT={kind} {problem}")
        return Finding(OK, child.out.strip().splitlines()[-1])
    check.__name__ = f"by {kind}"
    return needs_gpu(check)


GPU_CHECKS: list[DoctorCheck] = [device, products, model, graph,
                                 *map(transport_check, DEVICE_TRANSPORTS)]
