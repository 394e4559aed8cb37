"""Measure a model of this machine with all ranks of a communicator.

It is a model for as many ranks on a node as measured it: more ranks than cores share the cores
in the figures too.
"""

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Sequence

import msgspec
import numpy as np
from mpi4py import MPI

from bench.errors import UsageError
from bench.experiments.products import operands
from bench.instruments import host as here
from bench.instruments.available_memory import total_memory
from bench.prediction import fits as fitting, machine_model, operations_alone, whole_steps
from bench.prediction.work import Work
from mm3d import launcher
from mm3d.arrays import backend as backends
from mm3d.transport.nodes import node_numbers

DTYPES = ("float32", "float64")
NOTHING = machine_model.Level(0.0, 1e15)    # links of one rank, where nothing travels


def measure(comm) -> machine_model.Machine | None:
    """Measure this machine with all ranks of `comm`, as a model for as many ranks.

    All that is timed is checked first, collectives exactly, with integers.  All is measured in
    rounds, so that what slows the machine for a while is in a few figures of each kind only.

    Returns
    -------
    model.Machine or None
        The model on rank 0, None on the others.

    Raises
    ------
    UsageError
        When the ranks run on several nodes, or the environment asks for a transport that there
        is not.
    exact.WrongResult
        When a result is wrong; the same on every rank.
    """
    transport, memory = operands.usual_transport(comm), total_memory()
    if memory is None:
        raise UsageError("/proc/meminfo does not say how much memory there is")
    nodes = len(set(node_numbers(comm)))
    if nodes > 1:
        raise UsageError(f"{comm.size} ranks on {nodes} nodes: calibrate measures one node, start "
                         f"all ranks on one")
    works = whole_steps.everywhere(comm.size, [], whole_steps.MODELS)
    networks = whole_steps.transformers(works, comm)
    steps, products, passes, collectives = [], [], [], []
    for turn in range(operations_alone.ROUNDS):
        steps.append(whole_steps.steps(networks, comm, turn))
        products.append([operations_alone.products(dtype, comm) for dtype in DTYPES])
        passes.append(operations_alone.passes(comm))
        collectives.append(operations_alone.collectives(comm))
    for network in networks:
        network.grid.free()
    if comm.rank:
        return None
    alone = Alone({dtype: operations_alone.least(rounds) for dtype,
                   rounds in zip(DTYPES, zip(*products))},
                  operations_alone.least(passes), operations_alone.least(collectives))
    return described(alone, works, np.median(np.concatenate(steps), axis=0), comm.size, transport,
                     memory)


@dataclass(frozen=True)
class Alone:
    """Seconds of operations that follow themselves, as `bench.prediction.operations_alone`
    measures them."""

    products: dict[str, dict[fitting.Shape, float]]    # by dtype
    passes: dict[tuple[str, int], float]
    collectives: dict[tuple[str, int, int, bool, int], float]


def described(alone: Alone, works: Sequence[Work], steps: np.ndarray, ranks: int, transport: str,
              memory: int) -> machine_model.Machine:
    """Fit a machine model to the measured operations.

    Parameters
    ----------
    alone : Alone
        What operations take alone.
    works, steps : sequence of Work, (n,) array
        Transformers, and the seconds of a step of each.
    ranks, transport, memory : int, str, int
        The ranks that measured, how their collectives travelled, and the node's bytes.
    """
    fits = {dtype: fitting.products(times) for dtype, times in alone.products.items()}
    curves = operations_alone.curves(alone.passes)
    lines = operations_alone.lines(alone.collectives)
    node = fitting.links(lines, ranks, transport).get("node", NOTHING)
    largest, first = curves["multiply"], fits[DTYPES[0]]
    environs = here.describe_host("numpy", ranks, MPI.Get_library_version(), "")
    started = (f"{environs['cpu_model']}, ranks: {ranks}, cores: {environs['cores']}, BLAS "
               f"threads a rank: {environs['blas_threads']}, transport: {transport}")
    machine = machine_model.Machine(
        name=f"{here.machine_slug()}-p{ranks}", about=started, ranks_per_node=ranks,
        memory_bytes=float(memory // ranks),
        memory_bandwidth=largest.bytes[-1] / largest.seconds[-1], launch_seconds=0.0,
        gemm_half_size=first.half, gemm_rate={d: fit.rate for d, fit in fits.items()},
        node=node, network=node, achieved=machine_model.Achieved(1.0, 1.0, 1.0, 1.0), sources={},
        gemm_seconds=first.start, gemm_deviations=first.deviations,
        block=backends.get("numpy").block, passes=curves, collectives=lines, transport=transport)
    machine = whole_steps.together(machine, works, steps)
    return msgspec.structs.replace(machine, sources=sources(machine, fits, environs))


def sources(machine: machine_model.Machine, fits: dict[str, fitting.Fit],
            environs: dict) -> dict[str, str]:
    """State the source of each figure of the model."""
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    what = ("processor time of all ranks over cores" if launcher.oversubscribed()
            else "makespans")
    how = (f"measured {when}, all ranks at once, {what}, the least of "
           f"{operations_alone.ROUNDS} rounds")
    off = {d: np.abs(fit.errors) for d, fit in fits.items()}
    fit = (f"{how}: products of {len(fits[DTYPES[0]].errors)} shapes; the fit is "
           + ", ".join(f"{100 * np.median(e):.0f} % off in the median and {100 * e.max():.0f} % "
                       f"at most in {d}" for d, e in off.items()))
    blas = f"{environs['blas']}, {environs['blas_architecture']} kernels"
    largest = machine.passes["multiply"].bytes[-1]
    whole = (f"measured {when}: what the makespans of two models' steps on every grid, medians of "
             f"{operations_alone.ROUNDS * whole_steps.ROUNDS} rounds, take beyond their parts")
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
            "block": "mm3d.arrays.backend.Backend.block",
            "passes": f"{how}: float32, NumPy {environs['numpy_version']}",
            "collectives": f"{how}: {environs['mpi']}; "
                           f"{environs['tuning_variables'] or 'no tuning variables'}",
            "transport": "how the bytes of collectives travelled",
            "waiting": whole}
