"""Emulate a machine by a slower one: sizes shrunk, links slow, and work that is waited for.

With hidden size and sequence length divided by s, and batch and heads as they are, every array of
a Transformer layer has 1/s^2 of its elements, so every collective 1/s^2 of its words and every
elementwise pass 1/s^2 of its bytes; every product has 1/s^3 of its operations.  A machine whose
rate of products is divided by s as well takes 1/s^2 of the time for all of them.  If links are
slower by a factor F, and all work takes F times as long, a step takes F/s^2 times as long, and
computing keeps its ratio to communicating.  That factor is the same for all rows.
"""

import msgspec

from bench.cluster.spec import Cluster
from bench.errors import UsageError
from bench.prediction.machine_model import Achieved, Curve, Level, Machine
from bench.prediction.seconds import Terms, trace_terms
from mm3d.tracing.trace import Trace

# The ranks of an emulated node share memory for real.  Assumed: a fraction of what a core copies,
# since many ranks share few cores, and the time to pass a message on between processes.
SHARED_BYTES_PER_SECOND = 1e9
SECONDS_PER_MESSAGE = 2e-4
# Fitted to 26 rows on 8 to 64 ranks and two cores of Zen 5 (results, tables of commit 9273de8):
# processor seconds of a rank, with polling, Python and TCP, for a collective inside a node and for
# each other node in one between nodes.
CALL_SECONDS = 2.4e-4
PEER_SECONDS = 1.2e-4


def shrink_machine(machine: Machine, factor: float) -> Machine:
    """Return the machine that takes 1/factor^2 of the time for work whose lengths are divided.

    Parameters
    ----------
    machine : Machine
        The machine for the model before its lengths are divided.
    factor : float
        The factor by which hidden size and sequence length are divided.
    """
    square = factor ** 2

    def shrink_curve(curve: Curve) -> Curve:
        return Curve([size / square for size in curve.bytes],
                     [seconds / square for seconds in curve.seconds])
    deviations = {"x".join(f"{float(edge) / factor:g}" for edge in shape.split("x")): ratio
                  for shape, ratio in machine.gemm_deviations.items()}
    return msgspec.structs.replace(
        machine, gemm_rate={dtype: rate / factor for dtype, rate in machine.gemm_rate.items()},
        gemm_half_size=tuple(size / factor for size in machine.gemm_half_size),
        gemm_seconds=machine.gemm_seconds / square, gemm_deviations=deviations,
        launch_seconds=machine.launch_seconds / square,
        passes={name: shrink_curve(curve) for name, curve in machine.passes.items()})


def work_scale(machine: Machine, cluster: Cluster) -> float:
    """Return how many times slower the cluster's links are than those of the machine achieve.

    Raises
    ------
    UsageError
        When the links have no limit.
    """
    if cluster.link is None:
        raise UsageError(f"cluster {cluster}: links without a limit have no ratio to those of "
                         f"{machine.name}; give --work-scale")
    return machine.network.bytes_per_second * machine.achieved.network / (cluster.link / 8)


def emulating_machine(machine: Machine, shrink: float, scale: float,
                      cluster: Cluster | None, ranks_per_core: float = 0.0) -> Machine:
    """Return the model of the emulated cluster whose ranks wait for the work of `machine`.

    Parameters
    ----------
    machine : Machine
        The machine that is emulated.
    shrink, scale : float
        The factors of `shrink_machine`, and of its seconds.
    cluster : Cluster or None
        The emulated cluster; None for one node.
    ranks_per_core : float
        Ranks of all nodes that share a core for all that is not waited for; 0 to leave out what
        that takes.
    """
    shrunk, achieved = shrink_machine(machine, shrink), machine.achieved
    node = Level(SECONDS_PER_MESSAGE, SHARED_BYTES_PER_SECOND)
    network = node if cluster is None or cluster.link is None else Level(
        SECONDS_PER_MESSAGE + cluster.latency, cluster.link / 8)
    return msgspec.structs.replace(
        shrunk, name=f"{machine.name}, emulated", node=node, network=network,
        ranks_per_node=cluster.ranks if cluster else 2 ** 30,
        gemm_rate={dtype: rate / scale for dtype, rate in shrunk.gemm_rate.items()},
        memory_bandwidth=shrunk.memory_bandwidth / scale,
        gemm_seconds=shrunk.gemm_seconds * scale, launch_seconds=shrunk.launch_seconds * scale,
        passes={name: Curve(curve.bytes, [scale * seconds for seconds in curve.seconds])
                for name, curve in shrunk.passes.items()},
        collectives=[], waiting={}, node_waiting={}, transport="shared",
        call_seconds=CALL_SECONDS * ranks_per_core, peer_seconds=PEER_SECONDS * ranks_per_core,
        achieved=Achieved(achieved.gemm, achieved.memory, 1.0, 1.0))


def split_seconds(machine: Machine, trace: Trace) -> dict[str, tuple[float, float]]:
    """Predict the seconds of work, and those of communication, by phase."""
    found = {}
    for phase, spent in trace_terms(machine, trace).items():
        terms: Terms = {name: value / getattr(machine.achieved, name)
                        for name, value in spent.items()}
        work = terms["gemm"] + terms["memory"]
        found[phase] = work, sum(terms.values()) - work
    return found
