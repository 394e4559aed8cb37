"""Measure what a machine model is fitted to, with all ranks of a communicator, on one node or an
emulated cluster.

The model holds for this number of ranks: where ranks outnumber cores, they share the cores while
they are measured.
"""

from collections import defaultdict
from typing import Callable

import numpy as np

from bench.cluster.spec import Cluster
from bench.errors import UsageError
from bench.experiments.products import operands
from bench.instruments.available_memory import total_memory
from bench.instruments.sampling import measured_environment
from bench.prediction import whole_steps, work_list
from bench.prediction.calibration import operations_alone, record
from bench.records.measurements import Check, Measurements
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
LINK_STEPS = 3    # of each model in a round, where the links of a cluster make them long


def measure_samples(comm, progress: Callable[[str], None] = lambda line: None
                    ) -> Measurements | None:
    """Measure this machine with all ranks of `comm`.

    Every result is verified before it is timed, collectives exactly, with integers.  Measurements
    are made in rounds, so that a disturbance of the machine affects a few samples of each kind.
    Models that do not fit in memory together are measured in batches, each in all rounds.  On an
    emulated cluster, whose links make them long, a round has few steps of each model, and models
    are smaller where links are slow.

    Parameters
    ----------
    comm : mpi4py.MPI.Intracomm
        All ranks; each of them calls this.
    progress : callable, optional
        Is given a line on what was done, on every rank.

    Returns
    -------
    Measurements or None
        On rank 0 the record of all samples, to which `bench.prediction.calibration.fit` fits a
        machine model; None on the others.

    Raises
    ------
    UsageError
        When the ranks run on several nodes that are not those of an emulated cluster, or not
        equally many on each; the environment names an unknown transport; or the memory of this
        machine is unknown or too small for all ranks.
    WrongResult
        When a result is wrong; the same on every rank.
    """
    transport, cluster = operands.default_transport(comm), find_cluster(comm)
    if cluster:
        transport = transports_of_lines(comm)
    memory = check_memory(comm.size)
    many = comm.size > MANY
    works = work_list.list_works(comm.size, [], work_list.list_models(cluster, many),
                                 schemes=CLUSTER_SCHEMES_OF_MANY if many and cluster else (),
                                 most=GRIDS_OF_MANY if many and not cluster else GRIDS)
    batches = work_list.works_in_batches(works, comm.size, DTYPES[0])
    rounds = (operations_alone.LINK_ROUNDS if cluster else
              1 if many else operations_alone.ROUNDS)
    steps_of_each = LINK_STEPS if cluster else whole_steps.ROUNDS
    steps, collectives = [], None
    checks: list[Check] = []
    operations: dict[str, list[float]] = defaultdict(list)
    for number, batch in enumerate(batches, start=1):
        networks = whole_steps.make_transformers(batch, comm, checks, progress)
        which = f" of batch {number} of {len(batches)}" if len(batches) > 1 else ""
        of_batch = []
        for turn in range(rounds):
            of_batch.append(whole_steps.measure_steps(networks, comm, turn, steps_of_each))
            progress(f"round {turn + 1} of {rounds}: {len(batch)} models{which}, {steps_of_each} "
                     f"steps of each")
            if batch is batches[-1]:
                measure_operations(comm, operations)
                collectives = operations_alone.measure_collectives(comm, cluster, collectives)
                for point, taken in collectives.items():
                    operations[record.label_collective(*point)] += taken
                progress(f"round {turn + 1} of {rounds}: products, elementwise passes and "
                         "collectives")
        steps.append(np.concatenate(of_batch))
        grids = [network.grid for network in networks]
        del networks
        whole_steps.free_grids(grids)
    environment = measured_environment("numpy", comm) | {
        "memory_bytes": memory, "elementwise_block": backends.get("numpy").block}
    if comm.rank:
        return None
    return record.make_record(
        operations, works, np.concatenate(steps, axis=1), checks,
        {"transport": transport, "rounds": rounds}, environment)


def find_cluster(comm) -> Cluster | None:
    """Return the emulated cluster on several of whose nodes the ranks run; None on one node.

    Raises
    ------
    UsageError
        When the nodes are others, or have not equally many ranks.
    """
    nodes, cluster = node_numbers(comm), Cluster.from_environment()
    per_node = nodes.count(0)
    if per_node == comm.size:
        return None
    if cluster is None:
        raise UsageError(f"{comm.size} ranks on {len(set(nodes))} nodes: calibrate measures one "
                         f"node, or an emulated cluster (--cluster): start all ranks on one")
    if nodes != [rank // per_node for rank in range(comm.size)]:
        raise UsageError(f"{comm.size} ranks on {len(set(nodes))} nodes: start as many on each")
    return cluster


def check_memory(ranks: int) -> int:
    """Return the bytes of this machine's memory.

    Raises
    ------
    UsageError
        When they are unknown, or too few for the ranks.
    """
    memory = total_memory()
    if memory is None:
        raise UsageError("/proc/meminfo does not say how much memory there is")
    needed = (work_list.BYTES_OF_A_RANK + work_list.BYTES_OF_A_WORK) / work_list.USED
    if ranks * needed > memory:
        raise UsageError(f"{ranks} ranks: calibrate needs about {ranks * needed / 1e9:.1f} GB for "
                         f"them, and this machine has {memory / 1e9:.1f}: {int(memory // needed)} "
                         f"ranks at most would do")
    return memory


def measure_operations(comm, found: dict[str, list[float]]) -> None:
    """Measure products and elementwise passes, and add the samples to those in `found`."""
    for dtype in DTYPES:
        for shape, taken in operations_alone.measure_products(dtype, comm).items():
            found[record.label_product(dtype, shape)] += taken
    for (name, size), taken in operations_alone.measure_passes(comm).items():
        found[record.label_pass(name, size)] += taken


def transports_of_lines(comm) -> str:
    """Return the names of the transports along all lines that grids of the ranks have."""
    names: set[str] = set()
    for size, stride in operations_alone.list_placements(comm.size):
        grid = Grid(comm, "numpy", x=comm.size // size // stride, y=size, z=stride)
        names.add(grid["y"].transport.name)
        grid.free()
    return " ".join(sorted(names))
