"""The verb ``calibrate``: a machine model of the machine that it runs on, as a TOML file.

It is a model for as many ranks on a node as measured it: more ranks than cores share the cores
in the figures too.
"""

from datetime import datetime, timezone
from pathlib import Path

import msgspec
import numpy as np
from mpi4py import MPI

from bench import fits as fitting
from bench import machine as here
from bench import exact, machinefile, model, operands, placement, probes, sampling, trials
from bench.cases import UsageError
from bench.output import say
from mm3d import backend as backends
from mm3d import environment
from mm3d.choice import in_place

DTYPES = ("float32", "float64")
NOTHING = model.Level(0.0, 1e15)    # links of one rank, where nothing travels


def calibrate(arguments, comm) -> int:
    """Measure this machine with all ranks of the job and write the file; 0 when it was written.

    All that is timed is checked first, collectives exactly, with integers.

    Raises
    ------
    UsageError
        When the file cannot be written, ranks run on several nodes, or the environment asks for
        a transport that there is not.
    """
    path, transport = Path(arguments.out), operands.usual_transport(comm)
    machinefile.check("--out", path, comm)
    nodes = len(set(placement.numbers(comm)))
    if nodes > 1:
        raise UsageError(f"{comm.size} ranks on {nodes} nodes: calibrate measures one node, start "
                         f"all ranks on one")
    try:
        found = measured(comm, transport)
    except exact.WrongResult as wrong:
        return sampling.failed("calibrate", f"{wrong}; no file was written", comm)
    status = machinefile.publish(found, path, comm)
    if comm.rank == 0:
        say(described(found))
    return status


def measured(comm, transport: str) -> model.Machine:
    """The model of this machine with that transport; the same on every rank.

    All is measured in rounds, so that what slows the machine for a while is in a few figures of
    each kind only.
    """
    works = trials.everywhere(comm.size, [], trials.MODELS)
    networks = trials.transformers(works, comm)
    steps, products, passes, collectives = [], [], [], []
    for turn in range(probes.ROUNDS):
        steps.append(trials.steps(networks, comm, turn))
        products.append([probes.products(dtype, comm) for dtype in DTYPES])
        passes.append(probes.passes(comm))
        collectives.append(probes.collectives(comm))
    for network in networks:
        network.grid.free()
    fits = {dtype: fitting.products(probes.least(rounds))
            for dtype, rounds in zip(DTYPES, zip(*products))}
    curves, lines = probes.curves(probes.least(passes)), probes.lines(probes.least(collectives))
    node = fitting.links(lines, comm.size, transport).get("node", NOTHING)
    largest = curves["multiply"]
    environs = here.describe("numpy", comm.size, MPI.Get_library_version(), "")
    first = fits[DTYPES[0]]
    started = (f"{environs['cpu_model']}, ranks: {comm.size}, cores: {environs['cores']}, BLAS "
               f"threads a rank: {environs['blas_threads']}, transport: {transport}")
    machine = model.Machine(
        name=f"{here.slug()}-p{comm.size}", about=started, ranks_per_node=comm.size,
        memory_bytes=float(memory_bytes() // comm.size),
        memory_bandwidth=largest.bytes[-1] / largest.seconds[-1], launch_seconds=0.0,
        gemm_half_size=first.half, gemm_rate={d: fit.rate for d, fit in fits.items()},
        node=node, network=node, achieved=model.Achieved(1.0, 1.0, 1.0, 1.0), sources={},
        gemm_seconds=first.start, gemm_deviations=first.deviations,
        block=backends.get("numpy").block, passes=curves, collectives=lines, transport=transport)
    machine = trials.together(machine, works, np.median(np.concatenate(steps), axis=0))
    return msgspec.structs.replace(machine, sources=sources(machine, fits, environs))


def memory_bytes() -> int:
    """Of the node."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return 1024 * int(line.split()[1])
    raise UsageError("/proc/meminfo does not say how much memory there is")


def sources(machine: model.Machine, fits: dict[str, fitting.Fit],
            environs: dict) -> dict[str, str]:
    """Where each figure is from."""
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    what = ("processor time of all ranks over cores" if environment.oversubscribed()
            else "makespans")
    how = f"measured {when}, all ranks at once, {what}, the least of {probes.ROUNDS} rounds"
    off = {d: np.abs(fit.errors) for d, fit in fits.items()}
    fit = (f"{how}: products of {len(fits[DTYPES[0]].errors)} shapes; the fit is "
           + ", ".join(f"{100 * np.median(e):.0f} % off in the median and {100 * e.max():.0f} % "
                       f"at most in {d}" for d, e in off.items()))
    blas = f"{environs['blas']}, {environs['blas_architecture']} kernels"
    largest = machine.passes["multiply"].bytes[-1]
    whole = (f"measured {when}: what the makespans of two models' steps on every grid, medians of "
             f"{probes.ROUNDS * trials.ROUNDS} rounds, take beyond their parts")
    return {"ranks_per_node": f"ranks of the job, measured {when}",
            "memory_bytes": "the node's memory over its ranks",
            "memory_bandwidth": f"{how}: c = a * b, {largest / 1e6:.0f} MB in all",
            "launch_seconds": f"{whole} (Python {environs['python']})",
            "gemm_half_size": f"{fit}; {DTYPES[0]}", "gemm_rate": f"{fit}; {blas}",
            "gemm_seconds": f"{fit}; {DTYPES[0]}",
            "gemm_deviations": f"{how}: these products over the fit; {DTYPES[0]}",
            "node": "the fits of gathers and scatters of all ranks, the bandwidth of those that "
                    "copy; one rank moves nothing",
            "network": "not measured: as inside the node",
            "achieved": whole,
            "block": "mm3d.backend.Backend.block",
            "passes": f"{how}: float32, NumPy {environs['numpy_version']}",
            "collectives": f"{how}: {environs['mpi']}; "
                           f"{environs['tuning_variables'] or 'no tuning variables'}",
            "transport": "how the bytes of collectives travelled",
            "waiting": whole}


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
    waiting = ", ".join(f"{1e6 * seconds:.0f} us for {size} ranks"
                        for size, seconds in machine.waiting.items())
    lines.append(f"in a step: {machine.achieved.gemm:.0%} of all rates"
                 + f"; waiting {waiting}" * bool(waiting))
    placed = in_place(machine.transport)
    lines += [f"{line.kind}{' of columns' * line.pieces} of {line.size} ranks {line.stride} "
              f"apart: {1e6 * line.alpha:.0f} us, "
              + ("read where it lies" if line.kind in placed else
                 f"{1e-9 / line.beta if line.beta else np.inf:.2f} GB/s")
              for line in machine.collectives]
    return "\n".join(lines)
