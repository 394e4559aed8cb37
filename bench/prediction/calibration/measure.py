"""Measure what a machine model is fitted to, with all ranks of a communicator, on one node or an
emulated cluster.

The model holds for this number of ranks: where ranks outnumber cores, they share the cores while
they are measured.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Sequence

from bench.cluster.spec import Cluster
from bench.errors import UsageError
from bench.experiments.products import operands
from bench.instruments.available_memory import total_memory
from bench.instruments.sampling import measured_environment
from bench.prediction import whole_steps, work_list
from bench.prediction.calibration import operations_alone, record
from bench.prediction.work import Work
from bench.records.measurements import Measurements
from mm3d import launcher
from mm3d.arrays import backend as backends
from mm3d.transport.nodes import number_nodes

DTYPES = ("float32", "float64")    # of products; all else is of the first
MANY = 16    # ranks, beyond which less is measured: all takes long on shared cores
# A short step and a long one, to separate the costs of barriers from those of work.
MODELS = ((96, 8, 8, 32, 2), (448, 8, 8, 96, 1))    # hidden, heads, batch, seq, layers
SMALLER = (448, 320, 224, 160)    # features of the second model, for ever slower links
LINK_SECONDS = 1.2    # that a link may carry the matrices of a step: W twice and dW once
# Schemes that are fitted to many ranks of a cluster.  SUMMA's roots take turns, so in a step its
# broadcasts overlap as they do not alone; such steps would hide how long ranks wait.
CLUSTER_SCHEMES_OF_MANY = ("1d", "1d-sp", "3d")
# Of each scheme, and all of up to 8 ranks: whole steps are fitted with three or four figures.
GRIDS = 10


@dataclass(frozen=True)
class Extent:
    """How much is measured: whole steps of Transformers, products, passes and collectives.

    There are so many rounds over operations alone, and so many steps of each Transformer before
    each of them; `sizes` are in bytes of the arrays of elementwise passes.
    """

    works: list[Work]
    rounds: int
    steps: int
    shapes: Sequence[tuple[int, int, int]]
    sizes: Sequence[int]
    collectives: list[record.Point]


def choose_extent(ranks: int, cluster: Cluster | None, memory: float) -> Extent:
    """Choose how much is measured with so many ranks, which share a memory of so many bytes.

    Many ranks, and links of an emulated cluster, make steps long: there are fewer of them.
    """
    many = ranks > MANY
    works = work_list.list_works(ranks, [], list_models(cluster, many),
                                 schemes=CLUSTER_SCHEMES_OF_MANY if many and cluster else (),
                                 most=GRIDS)
    rounds, steps = (2, 3) if many or cluster else (3, 8)
    sizes = operations_alone.bytes_that_fit(ranks, memory)
    return Extent(works, rounds, steps, operations_alone.SHAPES, sizes,
                  operations_alone.list_collectives(ranks, sizes, cluster))


def list_models(cluster: Cluster | None, many: bool = False) -> tuple[tuple[int, ...], ...]:
    """List the sizes of the models whose steps are measured: smaller ones where links are slow.

    The short model then has half the features and half the tokens: ranks wait less between
    operations that are shorter.  Of `many` ranks it is left out: its steps are work of the shared
    cores alone, which longer ones hide behind the links.  The emulated cluster is None on one of
    its nodes.
    """
    if cluster is None or cluster.link is None:
        return MODELS
    _, heads, batch, seq, layers = MODELS[-1]
    matrices = 3 * 12 * 4    # bytes of float32 over the square of the features, W twice and dW
    hidden = next((hidden for hidden in SMALLER
                   if matrices * hidden ** 2 * 8 <= LINK_SECONDS * cluster.link), SMALLER[-1])
    long = (hidden, heads, batch, seq, layers)
    return (long,) if many else ((hidden // 2, heads, batch, seq // 2, layers), long)


def measure_samples(comm, progress: whole_steps.Report = lambda line: None,
                    extent: Extent | None = None) -> Measurements | None:
    """Measure this machine with all ranks of `comm`, by default what `choose_extent` chooses.

    Every result is verified before it is timed.  Whole steps and operations alone are measured in
    the same rounds, so that a disturbance of the machine affects a few samples of each kind.

    Returns on rank 0 the record of all samples, to which `bench.prediction.calibration.fit` fits a
    machine model; None on the others.

    Raises UsageError when the ranks run on several nodes that are not those of an emulated
    cluster, or not equally many on each; the environment names an unknown transport; or the memory
    of this machine is unknown or too small for all ranks.  WrongResult is the same on every rank.
    """
    transport = operands.default_transport(comm)
    cluster = find_cluster(number_nodes(comm), Cluster.from_environment())
    memory = read_memory(comm.size, total_memory())
    if cluster:
        transport = _transports_of_lines(comm)
    extent = extent or choose_extent(comm.size, cluster, memory)
    work = (operations_alone.processor_sampler(comm, launcher.cores())
            if launcher.oversubscribed() else operations_alone.makespan_sampler(comm))
    collective = (operations_alone.makespan_sampler(comm, operations_alone.LINK_SAMPLE)
                  if cluster else work)
    operations: dict[record.Point, list[float]] = defaultdict(list)

    def measure_operations(turn: int) -> None:
        if turn % extent.steps:
            return
        found = {}
        for dtype in DTYPES:
            found |= operations_alone.measure_products(comm, work, dtype, extent.shapes)
        found |= operations_alone.measure_passes(comm, work, extent.sizes)
        found |= operations_alone.time_collectives(comm, collective, extent.collectives)
        for point, taken in found.items():
            operations[point] += taken
        progress(f"round {turn // extent.steps} of {extent.rounds}: products, elementwise passes "
                 f"and collectives")

    batches = work_list.works_in_batches(extent.works, DTYPES[0], memory)
    steps, checks = whole_steps.measure_works(batches, comm, DTYPES[0], 0,
                                              extent.rounds * extent.steps, progress,
                                              measure_operations)
    environment = measured_environment("numpy", comm) | {
        "memory_bytes": memory, "elementwise_block": backends.get("numpy").block}
    if comm.rank:
        return None
    return record.make_calibration_record(operations, extent.works, steps.sum(axis=-1), checks,
                                          {"transport": transport, "rounds": extent.rounds},
                                          environment)


def find_cluster(nodes: Sequence[int], cluster: Cluster | None) -> Cluster | None:
    """Return the emulated cluster on several of whose nodes the ranks run; None on one node.

    `nodes` are those of each rank, numbered in the order of ranks.

    Raises UsageError when the nodes are others, or have not equally many ranks.
    """
    ranks, per_node = len(nodes), nodes.count(0)
    if per_node == ranks:
        return None
    if cluster is None:
        raise UsageError(f"{ranks} ranks on {len(set(nodes))} nodes: calibrate measures one node, "
                         f"or an emulated cluster (--cluster): start all ranks on one")
    if ranks % per_node or list(nodes) != [rank // per_node for rank in range(ranks)]:
        raise UsageError(f"{ranks} ranks on {len(set(nodes))} nodes: start as many on each")
    return cluster


def read_memory(ranks: int, memory: int | None) -> int:
    """Return the bytes of this machine's memory; UsageError when unknown, or too few for ranks."""
    if memory is None:
        raise UsageError("/proc/meminfo does not say how much memory there is")
    needed = (work_list.BYTES_OF_A_RANK + work_list.BYTES_OF_A_WORK) / work_list.USED
    if ranks * needed > memory:
        raise UsageError(f"{ranks} ranks: calibrate needs about {ranks * needed / 1e9:.1f} GB for "
                         f"them, and this machine has {memory / 1e9:.1f}: {int(memory // needed)} "
                         f"ranks at most would do")
    return memory


def _transports_of_lines(comm) -> str:
    """Return the names of the transports along all lines that grids of the ranks have."""
    names: set[str] = set()
    for size, stride in operations_alone.list_placements(comm.size):
        grid = operations_alone.line_grid(comm, size, stride)
        names.add(grid["y"].transport.name)
        grid.free()
    return " ".join(sorted(names))
