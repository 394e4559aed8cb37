"""Measure a machine model with all ranks of a communicator, on one node or an emulated cluster.

The model holds for this number of ranks: where ranks outnumber cores, they share the cores while
they are measured.
"""

from dataclasses import dataclass
from datetime import datetime, timezone
from typing import Callable, Sequence

import msgspec
import numpy as np
from mpi4py import MPI

from bench.cluster.spec import Cluster
from bench.errors import UsageError
from bench.experiments.products import operands
from bench.instruments import host
from bench.instruments.available_memory import total_memory
from bench.prediction import fits, machine_model, operations_alone, whole_steps, work_list
from bench.prediction.work import Work
from mm3d import launcher
from mm3d.arrays import backend as backends
from mm3d.grid.grid import Grid
from mm3d.transport.nodes import node_numbers

DTYPES = ("float32", "float64")
MANY = 16    # ranks, beyond which less is measured: all takes long on shared cores
# Of each scheme, and all of up to 8 ranks: whole steps are fitted with three or four figures.
GRIDS, GRIDS_OF_MANY = 10, 4
# Schemes that are fitted to many ranks of a cluster.  SUMMA's roots take turns, so in a step its
# broadcasts overlap as they do not alone; such steps would hide how long ranks wait.
CLUSTER_SCHEMES_OF_MANY = ("1d", "1d-sp", "3d")
LINK_STEPS = 2    # of each model in a round, where the links of a cluster make them long
NO_LINKS = machine_model.Level(0.0, 1e15)    # of one rank, which sends nothing


def measure_machine(comm, progress: Callable[[str], None] = lambda line: None
                    ) -> machine_model.Machine | None:
    """Measure this machine with all ranks of `comm`.

    Every result is verified before it is timed, collectives exactly, with integers.  Measurements
    are made in rounds, so that a disturbance of the machine affects a few samples of each kind.
    Models that do not fit in memory together are measured in batches, each in all rounds.  On an
    emulated cluster, whose links make them long, a round has one or two steps of each model, and
    models are smaller where links are slow.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        All ranks; each of them calls this.
    progress : callable, optional
        Is given a line on what was done, on every rank.

    Returns
    -------
    Machine or None
        The model on rank 0, None on the others.

    Raises
    ------
    UsageError
        When the ranks run on several nodes that are not those of an emulated cluster, or not
        equally many on each; the environment names an unknown transport; or the memory of this
        machine is unknown or too small for all ranks.
    WrongResult
        When a result is wrong; the same on every rank.
    """
    transport, memory = operands.default_transport(comm), total_memory()
    nodes, cluster = node_numbers(comm), Cluster.from_environment()
    per_node = nodes.count(0)
    if per_node < comm.size:
        if cluster is None:
            raise UsageError(f"{comm.size} ranks on {len(set(nodes))} nodes: calibrate measures "
                             f"one node, or an emulated cluster (--cluster): start all ranks on "
                             f"one")
        if nodes != [rank // per_node for rank in range(comm.size)]:
            raise UsageError(f"{comm.size} ranks on {len(set(nodes))} nodes: start as many on "
                             f"each")
        transport = transports_of_lines(comm)
    else:
        cluster = None
    if memory is None:
        raise UsageError("/proc/meminfo does not say how much memory there is")
    needed = (work_list.BYTES_OF_A_RANK + work_list.BYTES_OF_A_WORK) / work_list.USED
    if comm.size * needed > memory:
        raise UsageError(f"{comm.size} ranks: calibrate needs about "
                         f"{comm.size * needed / 1e9:.1f} GB for them, and this machine has "
                         f"{memory / 1e9:.1f}: {int(memory // needed)} ranks at most would do")
    many = comm.size > MANY
    works = work_list.list_works(comm.size, [], work_list.list_models(cluster, many),
                                 schemes=CLUSTER_SCHEMES_OF_MANY if many and cluster else (),
                                 most=GRIDS_OF_MANY if many and not cluster else GRIDS)
    batches = work_list.works_in_batches(works, comm.size, DTYPES[0])
    rounds = (operations_alone.LINK_ROUNDS if cluster else
              1 if many else operations_alone.ROUNDS)
    steps_of_each = (1 if many else LINK_STEPS) if cluster else whole_steps.ROUNDS
    steps, products, passes, collectives = [], [], [], []
    for number, batch in enumerate(batches, start=1):
        networks = whole_steps.make_transformers(batch, comm, progress)
        which = f" of batch {number} of {len(batches)}" if len(batches) > 1 else ""
        of_batch = []
        for turn in range(rounds):
            of_batch.append(whole_steps.measure_steps(networks, comm, turn, steps_of_each))
            progress(f"round {turn + 1} of {rounds}: {len(batch)} models{which}, "
                     + ("a step" if steps_of_each == 1 else f"{steps_of_each} steps") + " of each")
            if batch is batches[-1]:
                products.append([operations_alone.measure_products(dtype, comm)
                                 for dtype in DTYPES])
                passes.append(operations_alone.measure_passes(comm))
                collectives.append(operations_alone.measure_collectives(
                    comm, cluster, collectives[-1] if collectives else None))
                progress(f"round {turn + 1} of {rounds}: products, elementwise passes and "
                         "collectives")
        steps.append(np.concatenate(of_batch))
        grids = [network.grid for network in networks]
        del networks
        whole_steps.free_grids(grids)
    if comm.rank:
        return None
    by_dtype = {dtype: operations_alone.least_seconds(of_rounds)
                for dtype, of_rounds in zip(DTYPES, zip(*products))}
    alone = OperationSeconds(by_dtype, operations_alone.least_seconds(passes),
                             operations_alone.least_seconds(collectives), rounds)
    return fit_machine(alone, works, np.concatenate(steps, axis=1), comm.size, transport, memory,
                       per_node)


def transports_of_lines(comm) -> str:
    """Return the names of the transports along all lines that grids of the ranks have."""
    names: set[str] = set()
    for size, stride in operations_alone.list_placements(comm.size):
        grid = Grid(comm, "numpy", x=comm.size // size // stride, y=size, z=stride)
        names.add(grid["y"].transport.name)
        grid.free()
    return " ".join(sorted(names))


@dataclass(frozen=True)
class OperationSeconds:
    """Seconds of operations repeated alone, as measured by `bench.prediction.operations_alone`:
    the least of `rounds`."""

    products: dict[str, dict[fits.Shape, float]]    # by dtype
    passes: dict[tuple[str, int], float]
    collectives: dict[tuple[str, int, int, bool, int], float]
    rounds: int


def fit_machine(alone: OperationSeconds, works: Sequence[Work], steps: np.ndarray, ranks: int,
                transport: str, memory: int, per_node: int = 0) -> machine_model.Machine:
    """Fit a machine model to measured operations and steps.

    Parameters
    ----------
    alone : OperationSeconds
        Seconds of operations repeated alone.
    works : sequence of Work
        Transformers.
    steps : (rounds, n) ndarray
        Seconds of steps of each, of which the medians count.
    ranks : int
        Number of ranks that measured.
    transport : str
        The transport of their collectives.
    memory : int
        Bytes of memory of the machine.
    per_node : int
        Ranks on a node; by default all.
    """
    per_node = per_node or ranks
    products = {dtype: fits.fit_products(times) for dtype, times in alone.products.items()}
    curves = operations_alone.make_curves(alone.passes)
    lines = operations_alone.make_lines(alone.collectives)
    links = fits.fit_links(lines, per_node, transport)
    node = links.get("node", NO_LINKS)
    largest, first = curves["multiply"], products[DTYPES[0]]
    environs = host.describe_host("numpy", ranks, MPI.Get_library_version(), "")
    started = (f"{environs['cpu_model']}, ranks: {ranks}, cores: {environs['cores']}, BLAS "
               f"threads a rank: {environs['blas_threads']}, transport: {transport}"
               f"{machine_model.cluster_suffix()}")
    machine = machine_model.Machine(
        name=f"{host.machine_slug()}-p{ranks}", about=started, ranks_per_node=per_node,
        ranks=ranks if per_node < ranks else 0,
        memory_bytes=float(memory // ranks),
        memory_bandwidth=largest.bytes[-1] / largest.seconds[-1], launch_seconds=0.0,
        gemm_half_size=first.half, gemm_rate={d: fit.rate for d, fit in products.items()},
        node=node, network=links.get("network", node),
        achieved=machine_model.Achieved(1.0, 1.0, 1.0, 1.0), sources={},
        gemm_seconds=first.start, gemm_deviations=first.deviations,
        cores=launcher.cores() if launcher.oversubscribed() else 0,
        block=backends.get("numpy").block, passes=curves, collectives=lines, transport=transport)
    machine = whole_steps.fit_step_losses(machine, works, np.median(steps, axis=0))
    return msgspec.structs.replace(machine, sources=state_sources(
        machine, products, environs, rounds=alone.rounds, steps=len(steps),
        grids=len({(work.scheme, work.grid) for work in works})))


def state_sources(machine: machine_model.Machine, products: dict[str, fits.ProductFit],
                  environs: dict, rounds: int, steps: int, grids: int) -> dict[str, str]:
    """Return the source of each figure of the model, as its file states it.

    `rounds` are those of operations alone, `steps` the steps of each model on each of `grids`.
    """
    when = datetime.now(timezone.utc).strftime("%Y-%m-%d")
    what = ("processor time of all ranks over cores" if launcher.oversubscribed()
            else "makespans")
    least = f"the least of {rounds} rounds" if rounds > 1 else "one round"
    how, together = (f"measured {when}, all ranks at once, {way}, {least}"
                     for way in (what, "makespans" if machine.ranks else what))
    off = {d: np.abs(fit.errors) for d, fit in products.items()}
    fit = (f"{how}: products of {len(products[DTYPES[0]].errors)} shapes; the fit is "
           + ", ".join(f"{100 * np.median(e):.0f} % off in the median and {100 * e.max():.0f} % "
                       f"at most in {d}" for d, e in off.items()))
    blas = f"{environs['blas']}, {environs['blas_architecture']} kernels"
    largest = machine.passes["multiply"].bytes[-1]
    whole = (f"measured {when}: what the makespans of whole steps on {grids} grids, medians "
             f"of {steps} rounds, take beyond their parts")
    return {"ranks_per_node": f"ranks of the job, measured {when}",
            "memory_bytes": "the node's memory over its ranks",
            "memory_bandwidth": f"{how}: c = a * b, {largest / 1e6:.0f} MB in all",
            "launch_seconds": f"{whole} (Python {environs['python']})",
            "gemm_half_size": f"{fit}; {DTYPES[0]}", "gemm_rate": f"{fit}; {blas}",
            "gemm_seconds": f"{fit}; {DTYPES[0]}",
            "gemm_deviations": f"{how}: these products over the fit; {DTYPES[0]}",
            "node": "the fits of gathers and scatters of all ranks, the bandwidth of those that "
                    "copy; one rank moves nothing",
            "network": "the fits of lines between nodes, whose links a node's ranks share"
                       if machine.ranks else
                       "not measured: as inside the node",
            "ranks": "ranks of the job",
            "cores": f"of this machine, if {environs['ranks']} ranks share them; else 0",
            "achieved": whole,
            "block": "mm3d.arrays.backend.Backend.block",
            "passes": f"{how}: float32, NumPy {environs['numpy_version']}",
            "collectives": f"{together}: {environs['mpi']}; "
                           f"{environs['tuning_variables'] or 'no tuning variables'}",
            "transport": "how the bytes of collectives travelled",
            "waiting": whole, "node_waiting": whole}
