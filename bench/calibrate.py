"""The verb ``calibrate``: a machine model of the machine that it runs on, as a TOML file.

It is a model for as many ranks on a node as measured it: more ranks than cores share the cores
in the figures too.
"""

import itertools
import json
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import msgspec
import numpy as np
from mpi4py import MPI

from bench import machine as here
from bench import model, probes
from bench.cases import UsageError
from mm3d import backend as backends
from mm3d import environment

DTYPES = ("float32", "float64")


def calibrate(arguments, comm) -> int:
    """Measure this machine with all ranks of the job and write the file; 0 when it was.

    Raises
    ------
    UsageError
        When the file cannot be written, or ranks run on several nodes.
    """
    path = Path(arguments.out)
    problem = None
    if comm.rank == 0 and not (path.suffix == ".toml" and writable(path.parent)):
        problem = (f"--out {path}: a .toml file in a folder that exists and can be written would "
                   f"do")
    if environment.local_ranks() not in (1, comm.size):
        problem = "calibrate measures one node: start all ranks on one"
    problems = [text for text in comm.allgather(problem) if text]
    if problems:
        raise UsageError(problems[0])
    found = measured(comm)
    text = None
    if comm.rank == 0:
        path.write_text(written(found))
        text = f"{described(found)}\nwritten: {path}"
        print(text, flush=True)
    comm.Barrier()
    return 0


def writable(folder: Path) -> bool:
    """Whether files can be made in it, found out by making one."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def measured(comm) -> model.Machine:
    """The model of this machine; the same on every rank."""
    times = {dtype: probes.products(dtype, comm) for dtype in DTYPES}
    fits = {dtype: fitted(found) for dtype, found in times.items()}
    passes = probes.passes(comm)
    lines = probes.collectives(comm) if comm.size > 1 else []
    node = link(lines, comm.size)
    largest = passes["multiply"]
    environs = here.describe("numpy", comm.size, MPI.Get_library_version(), "")
    first = fits[DTYPES[0]]
    started = (f"{environs['cpu_model']}, ranks: {comm.size}, cores: {environs['cores']}, BLAS "
               f"threads a rank: {environs['blas_threads']}")
    machine = model.Machine(
        name=f"{here.slug()}-p{comm.size}", about=started, ranks_per_node=comm.size,
        memory_bytes=float(memory_bytes() // comm.size),
        memory_bandwidth=largest.bytes[-1] / largest.seconds[-1], launch_seconds=0.0,
        gemm_half_size=first.half, gemm_rate={d: fit.rate for d, fit in fits.items()},
        node=node, network=node, achieved=model.Achieved(1.0, 1.0, 1.0, 1.0), sources={},
        gemm_seconds=first.start, block=backends.get("numpy").block, passes=passes,
        collectives=lines)
    machine = msgspec.structs.replace(machine, launch_seconds=probes.python(machine, comm))
    return msgspec.structs.replace(machine, sources=sources(machine, fits, environs))


class Fit(msgspec.Struct, frozen=True):
    """Products by shape: seconds of one of no size, the rate, what its edges cost, and the
    relative errors of the fit at the shapes that were measured."""

    start: float
    rate: float
    half: tuple[float, float, float]
    errors: list[float]


def fitted(times: dict[probes.Shape, float]) -> Fit:
    """seconds = start + flops / rate (1 + sum of half / edge / 3), of least relative squares."""
    shapes = np.array(list(times), float)
    took = np.array(list(times.values()))
    m, n, k = shapes.T
    terms = np.stack([np.ones(len(took)), 2 * m * n * k, n * k, m * k, m * n], axis=1)
    found = nonnegative(terms / took[:, None], np.ones(len(took)))
    rate = 1 / found[1]
    errors = terms @ found / took - 1
    return Fit(float(found[0]), float(rate), tuple((1.5 * rate * found[2:]).tolist()),
               errors.tolist())


def nonnegative(A: np.ndarray, b: np.ndarray) -> np.ndarray:
    """The c >= 0 that makes |A c - b| least: the best of all choices of columns."""
    best, least = np.zeros(A.shape[1]), np.inf
    for count in range(1, A.shape[1] + 1):
        for chosen in map(list, itertools.combinations(range(A.shape[1]), count)):
            c = np.linalg.lstsq(A[:, chosen], b, rcond=None)[0]
            residual = np.linalg.norm(A[:, chosen] @ c - b)
            if (c >= 0).all() and residual < least:
                best, least = np.zeros(A.shape[1]), residual
                best[chosen] = c
    return best


def link(lines: list[model.Line], ranks: int) -> model.Level:
    """The links of the node by all-gathers of all ranks, for what was not measured."""
    for line in lines:
        if (line.kind, line.size) == ("all_gather", ranks):
            moved = (ranks - 1) / ranks
            return model.Level(line.alpha, moved / max(line.beta, 1e-15))
    return model.Level(0.0, 1e15)    # one rank: nothing travels


def memory_bytes() -> int:
    """Of the node."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return 1024 * int(line.split()[1])
    raise UsageError("/proc/meminfo does not say how much memory there is")


def sources(machine: model.Machine, fits: dict[str, Fit], environs: dict) -> dict[str, str]:
    """Where each figure is from."""
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    how = f"measured {when}, all ranks at once, the least of {probes.ROUNDS} rounds"
    off = {d: np.abs(fit.errors) for d, fit in fits.items()}
    fit = (f"{how}: products of {len(fits[DTYPES[0]].errors)} shapes; the fit is "
           + ", ".join(f"{100 * np.median(e):.0f} % off in the median and {100 * e.max():.0f} % "
                       f"at most in {d}" for d, e in off.items()))
    blas = f"{environs['blas']}, {environs['blas_architecture']} kernels"
    largest = machine.passes["multiply"].bytes[-1]
    return {"ranks_per_node": f"ranks of the job, measured {when}",
            "memory_bytes": "the node's memory over its ranks",
            "memory_bandwidth": f"{how}: c = a * b, {largest / 1e6:.0f} MB in all",
            "launch_seconds": f"{how}: a tiny model's step beyond its operations, over their "
                              f"number (Python {environs['python']})",
            "gemm_half_size": f"{fit}; {DTYPES[0]}", "gemm_rate": f"{fit}; {blas}",
            "gemm_seconds": f"{fit}; {DTYPES[0]}",
            "node": "the fit of the all-gather of all ranks; one rank moves nothing",
            "network": "not measured: as inside the node",
            "achieved": "all: the figures are measured, not nominal",
            "block": "mm3d.backend.Backend.block",
            "passes": f"{how}: float32, NumPy {environs['numpy_version']}",
            "collectives": f"{how}: {environs['mpi']}; "
                           f"{environs['tuning_variables'] or 'no tuning variables'}"}


def written(machine: model.Machine) -> str:
    """The TOML file of a machine."""
    plain = msgspec.to_builtins(machine)
    lines, tables = [], []
    for name, value in plain.items():
        if isinstance(value, dict):
            tables += _table(name, value)
        elif isinstance(value, list) and value and isinstance(value[0], dict):
            for item in value:
                tables += ["", f"[[{name}]]", *(f"{key} = {_value(v)}"
                                                for key, v in item.items())]
        else:
            lines.append(f"{name} = {_value(value)}")
    about = "# Measured by `python -m bench calibrate`; see `bench.model.Machine` for the units."
    return "\n".join([about, *lines, *tables, ""])


def _table(name: str, value: dict) -> list[str]:
    return ["", f"[{name}]", *(f"{key} = {_value(v)}" for key, v in value.items())]


def _value(value) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(v)}" for key, v in value.items()) + " }"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(map(_value, value)) + "]"
    return f"{value:.5g}" if isinstance(value, float) else json.dumps(value)


def described(machine: model.Machine) -> str:
    """The figures for people."""
    half = ", ".join(f"{edge:.0f}" for edge in machine.gemm_half_size)
    rates = ", ".join(f"{d} {rate / 1e9:.1f}" for d, rate in machine.gemm_rate.items())
    lines = [machine.about,
             f"products: {rates} GFLOP/s a rank, half sizes {half}, "
             f"{1e6 * machine.gemm_seconds:.1f} us each",
             "passes: " + ", ".join(
                 f"{name} {curve.bytes[-1] / curve.seconds[-1] / 1e9:.1f} GB/s"
                 for name, curve in machine.passes.items() if name != "other"),
             f"Python: {1e6 * machine.launch_seconds:.1f} us an operation"]
    lines += [f"{line.kind} of {line.size} ranks {line.stride} apart: {1e6 * line.alpha:.0f} us, "
              f"{1e-9 / line.beta if line.beta else np.inf:.2f} GB/s"
              for line in machine.collectives]
    return "\n".join(lines)
