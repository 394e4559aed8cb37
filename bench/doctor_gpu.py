"""What ``bench doctor --gpu`` checks besides: that this GPU computes and travels as it should.

Each is a function of `bench.facts.Facts`, as those of `bench.checks` are.
"""

import os
import subprocess
import sys
from typing import Callable

import numpy as np
from mpi4py import MPI

import mm3d
from bench import gpucases
from bench.checks import FAILED, OK, SKIPPED, WARNING, Finding
from bench.facts import Facts, died, ended
from mm3d import backend as backends
from mm3d import environment
from mm3d.device import TRANSPORTS

# Relative errors that a model's step may have, by the type it computes in.
TOLERANCES = {"float64": 1e-11, "float32": 1e-4, "tf32": 1e-2, "float16": 1e-2, "bfloat16": 1e-1}
SIZES = dict(layers=1, hidden=96, heads=6, batch=3, seq=32)


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
    for mode in gpucases.modes(backend):
        with mode:
            a, b = (backend.xp.astype(backend.asarray(x), np.dtype(mode.dtype)) for x in (A, B))
            found = backend.to_host(backends.matmul(a, b)).astype(float)
            a, b = (backend.to_host(x).astype(float) for x in (a, b))
        # A result is rounded once to its type, and float32 sums differ in their order.
        bits = {"tf32": 10, "float16": 10, "bfloat16": 7}.get(str(mode), 23)
        error = np.max(np.abs(found - a @ b) / (np.abs(a) @ np.abs(b))) * 2 ** bits
        worst = max(worst, error)
        if not error <= 4:
            wrong.append(f"{mode} by {error:.1f} units")
    text = ", ".join(map(str, gpucases.modes(backend)))
    return (Finding("products", FAILED, f"wrong: {', '.join(wrong)}") if wrong else
            Finding("products", OK, f"{text}: right to {worst:.2g} units in the last place"))


@on_device
def model(backend: backends.Backend) -> Finding:
    """Forward and backward of a layer, with every kernel, beside NumPy's in float64."""
    def step(library: str | backends.Backend, dtype: str) -> list[np.ndarray]:
        scheme = mm3d.scheme("serial", MPI.COMM_SELF, None, library)
        net = mm3d.Transformer(scheme, **SIZES, dtype=dtype, causal=True)
        y, saved = net.forward(net.random("x"))
        arrays = [y, net.backward(net.random("dy"), saved), *(p.grad for p in net.parameters)]
        return [scheme.grid.backend.to_host(a).astype(float) for a in arrays]
    expected, wrong, errors = step("numpy", "float64"), [], {}
    modes = gpucases.modes(backend)
    for mode in [gpucases.Mode(backend, "float64"), *modes]:
        with mode:
            found = step(backend, mode.dtype)
        errors[str(mode)] = max(float(np.linalg.norm(a - b) / np.linalg.norm(b))
                                for a, b in zip(found, expected))
        if not errors[str(mode)] <= TOLERANCES[str(mode)]:
            wrong.append(str(mode))
    text = ", ".join(f"{name} {error:.1e}" for name, error in errors.items())
    return Finding("model", FAILED if wrong else OK,
                   f"{'wrong in ' + ', '.join(wrong) + ': ' if wrong else ''}errors {text}")


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
            env=os.environ | environment.launcher_environment()
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


CHECKS: list[Callable[[Facts], Finding]] = [device, products, model, *map(transport, TRANSPORTS)]
