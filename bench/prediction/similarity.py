"""Emulate a machine by a slower one: sizes shrunk, links slow, and work that is waited for.

With hidden size and sequence length divided by s, and batch and heads as they are, every array of
a Transformer layer has 1/s^2 of its elements, so every collective 1/s^2 of its words and every
elementwise pass 1/s^2 of its bytes; every product has 1/s^3 of its operations.  A machine whose
rate of products is divided by s as well takes 1/s^2 of the time for all of them.  If links are
slower by a factor F, and all work takes F times as long, a step takes F/s^2 times as long, and
computing keeps its ratio to communicating.  That factor is the same for all rows.
"""

from collections import Counter
from copy import copy

import msgspec

from bench.cases.paper import Row, load_tables
from bench.cases.variants import Variant
from bench.cluster.spec import Cluster
from bench.errors import UsageError
from bench.prediction.machine_model import Achieved, Curve, Level, Machine
from bench.prediction.seconds import achieved_seconds, place_trace, trace_terms
from mm3d import ModelSizes
from mm3d.grid.shape import GridShape
from mm3d.tracing import dry_run
from mm3d.tracing.events import Collective
from mm3d.tracing.trace import Trace

# The share of a full Ethernet frame, which a link counts whole, that is data of TCP.
PAYLOAD = 1448 / 1514
SHARED_MEMORY = Level(0.0, 1e30)    # inside a node: copies are software


def shrink_machine(machine: Machine, factor: float) -> Machine:
    """Return a machine that takes 1/factor^2 of the time when lengths are divided by `factor`.

    Hidden size and sequence length are divided; `machine` is for the undivided model.
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
    """Return the achieved rate of the machine's links over the rate of the cluster's.

    Raises UsageError when the links have no limit.
    """
    if cluster.link is None:
        raise UsageError(f"cluster {cluster}: links without a limit have no ratio to those of "
                         f"{machine.name}; give --work-scale")
    return machine.network.bytes_per_second * machine.achieved.network / _link_bytes(cluster.link)


def _link_bytes(link: float) -> float:
    """Return the bytes of messages that a link of `link` bit/s carries in a second."""
    return PAYLOAD * link / 8


def emulating_machine(machine: Machine, shrink: float, scale: float,
                      cluster: Cluster | None) -> Machine:
    """Return the model of the emulated cluster whose ranks wait for the work of `machine`.

    It has links and waits alone: software takes no time.  `shrink` and `scale` are the factors of
    `shrink_machine`, and of its seconds; the emulated `cluster` is None for one node.
    """
    shrunk, achieved = shrink_machine(machine, shrink), machine.achieved
    network = SHARED_MEMORY if cluster is None or cluster.link is None else Level(
        cluster.latency, _link_bytes(cluster.link))
    return msgspec.structs.replace(
        shrunk, name=f"{machine.name}, emulated", node=SHARED_MEMORY, network=network,
        ranks_per_node=cluster.ranks if cluster else 2 ** 30,
        gemm_rate={dtype: rate / scale for dtype, rate in shrunk.gemm_rate.items()},
        memory_bandwidth=shrunk.memory_bandwidth / scale,
        gemm_seconds=shrunk.gemm_seconds * scale, launch_seconds=shrunk.launch_seconds * scale,
        passes={name: Curve(curve.bytes, [scale * seconds for seconds in curve.seconds])
                for name, curve in shrunk.passes.items()},
        collectives=[], waiting={}, node_waiting={}, transport="shared hierarchical chain ordered",
        achieved=Achieved(achieved.gemm, achieved.memory, 1.0, 1.0))


def split_seconds(machine: Machine, trace: Trace) -> dict[str, tuple[float, float]]:
    """Predict the seconds of work, with launches of kernels, and of communication, by phase."""
    alone, found = copy(trace), {}
    alone.events = Counter({key: times for key, times in trace.events.items()
                            if not isinstance(key[-1], Collective)})
    worked = trace_terms(machine, alone)
    for phase, spent in trace_terms(machine, trace).items():
        work = achieved_seconds(machine, worked[phase])
        found[phase] = work, achieved_seconds(machine, spent) - work
    return found


def predict_phases(machine: Machine, scheme: str, grid: GridShape, order: str, sizes: ModelSizes,
                   variant: Variant, recompute: str = "none") -> dict[str, tuple[float, float]]:
    """Predict the seconds of work, and those of communication, of a step by phase.

    `order` has the grid's directions from the one that varies slowest over nodes to the fastest.
    """
    trace = dry_run.extrapolate_step(
        scheme, grid.ranks, grid.sizes, dtype=variant.dtype, options=variant.options(scheme),
        causal=variant.causal, recompute=recompute, **sizes)
    return split_seconds(machine, place_trace(trace, grid, order))


def predict_original(machine: Machine, row: Row, grid: GridShape, order: str, sizes: ModelSizes,
                     variant: Variant,
                     recompute: str = "none") -> dict[str, tuple[float, float]]:
    """Predict a layer's step of a row on the machine that is emulated; see `predict_phases`.

    Hidden size and sequence length are the published ones; batch and heads are those of `sizes`.
    """
    published = ModelSizes(**{**sizes, "hidden": row.hidden, "layers": 1,
                              "seq": load_tables().settings.seq})
    return predict_phases(machine, row.scheme, grid, order, published, variant, recompute)
