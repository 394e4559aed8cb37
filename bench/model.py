"""Machine models: what a trace costs in seconds on a machine described by a TOML file.

A product takes the larger of flops over the rate for its shape and of bytes over the memory's
bandwidth; an elementwise pass bytes over bandwidth; a collective alpha-beta costs on the level of
the network that it needs, whose links it shares.  Where the file has measured curves of passes and
collectives (`bench.calibrate` writes such files), these are read instead.  This is a model: the
trace alone is exact.
"""

import math
import sys
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np

from bench.cases import UsageError
from mm3d.choice import in_place
from mm3d.dry import PHASES, Collective, Gemm, Pass, Trace

TERMS = ("gemm", "memory", "node", "network", "latency")
Terms = dict[str, float]
LIKE = 0.6    # shapes are alike when the logarithms of their edges differ no more than this
FAR = 0.3     # weight of the figures themselves beside products of like shape


class Level(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Links: seconds of a message of no length, and bytes a second in one direction.

    Within a node the bandwidth is each rank's own; between nodes it is a node's, which its
    ranks share.
    """

    seconds_per_message: float
    bytes_per_second: float


class Achieved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of each figure that programs get out of it.

    Of a measured machine: in a step, of what operations get that follow themselves.
    """

    gemm: float
    memory: float
    node: float
    network: float
    latency: float = 1.0


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds measured at some sizes in bytes, in ascending order."""

    bytes: list[float]
    seconds: list[float]

    def at(self, size: float) -> float:
        """Seconds of `size` bytes: a power law between neighbours, the first's time below them,
        the last's rate above."""
        if size >= self.bytes[-1]:
            return self.seconds[-1] * size / self.bytes[-1]
        return math.exp(np.interp(math.log(max(size, 1)), np.log(self.bytes),
                                  np.log(self.seconds)))


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A collective measured along lines of `size` ranks, `stride` apart, all of them busy.

    `alpha` + `beta` bytes is the fit of least relative squares to the curve, for people.
    `pieces` is as in `mm3d.trace.Collective`.
    """

    kind: str
    size: int
    stride: int
    alpha: float
    beta: float
    curve: Curve
    pieces: bool = False

    @property
    def key(self) -> tuple[str, int, int, bool]:
        """What it is measured for."""
        return self.kind, self.size, self.stride, self.pieces


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine of nodes with so many ranks each; ranks are placed node by node.

    Attributes
    ----------
    memory_bytes, memory_bandwidth : float
        Of a rank.
    launch_seconds : float
        Of starting an operation.
    gemm_rate : dict of str to float
        Operations a second of large products, by dtype.
    gemm_half_size : tuple of float
        For the rows, the inner dimension and the columns of a product m x n by n x k: its time
        is that at the full rate times 1 + (first / m + second / n + third / k) / 3.
    gemm_seconds : float
        Of a product of no size, or of a batch of them.
    gemm_deviations : dict of str to float
        What products took, by their shape such as "256x64x512", over what these figures say.
    node, network : Level
        Links inside a node and between nodes.
    achieved : Achieved
        What is got out of these figures.
    sources : dict of str to str
        Where each figure is from.
    block : int
        Elements that elementwise work handles at a time; 0 for everything at once.
    passes : dict of str to Curve
        Seconds of elementwise operations by the bytes they read and write; "other" for those
        that are not named.  Empty where the bandwidth alone is known.
    collectives : list of Line
        What was measured, if anything; others follow from `node` and `network`.
    transport : str
        How the bytes of `collectives` travelled, as `mm3d.choice.settle` calls it, in several
        ways where some ranks are on other nodes; "" where nothing was measured.
    waiting : dict of int to float
        Seconds that a meeting of so many ranks takes longer between work than when there is
        nothing but meetings, since not all come at the same time and others have used the caches
        meanwhile.
    """

    name: str
    about: str
    ranks_per_node: int
    memory_bytes: float
    memory_bandwidth: float
    launch_seconds: float
    gemm_half_size: tuple[float, float, float]
    gemm_rate: dict[str, float]
    node: Level
    network: Level
    achieved: Achieved
    sources: dict[str, str]
    gemm_seconds: float = 0.0
    gemm_deviations: dict[str, float] = {}
    block: int = 0
    passes: dict[str, Curve] = {}
    collectives: list[Line] = []
    transport: str = ""
    waiting: dict[int, float] = {}

    @property
    def granule(self) -> int:
        """`block`, as `mm3d.dry.step` takes it."""
        return self.block or sys.maxsize

    def travels(self, transport: str) -> bool:
        """Whether its collectives travelled by `transport` too; true where either is ""."""
        return not self.transport or set(transport.split()) <= set(self.transport.split())


def load(name: str, dtype: str = "") -> Machine:
    """The machine called `name`, or described in the TOML file of that path.

    Raises
    ------
    UsageError
        When there is none, the file does not describe a machine, or no rate of products in
        `dtype`, where one is named.
    """
    supplied = {Path(file.name).stem: file
                for file in resources.files("bench").joinpath("machines").iterdir()
                if file.name.endswith(".toml")}
    file = Path(name) if name.endswith(".toml") else supplied.get(name)
    if file is None:
        raise UsageError(f"machine {name!r} is unknown: choose one of "
                         f"{', '.join(sorted(supplied))}, or name a .toml file")
    try:
        machine = msgspec.toml.decode(file.read_bytes(), type=Machine, strict=False)
    except (OSError, msgspec.DecodeError) as error:
        raise UsageError(f"machine file {name}: {error}") from error
    if dtype and dtype not in machine.gemm_rate:
        raise UsageError(f"machine {machine.name} has no rate for {dtype}: it has "
                         f"{', '.join(machine.gemm_rate) or 'none'}")
    return machine


def gemm_seconds(machine: Machine, gemm: Gemm) -> float:
    """A batch of products at the full figures of `machine`."""
    edges = (gemm.m, gemm.n, gemm.k)
    if not all(edges):
        return 0.0
    slowdown = 1 + sum(half / edge for half, edge in zip(machine.gemm_half_size, edges)) / 3
    size = np.dtype(gemm.dtype).itemsize
    moved = gemm.batch * size * (gemm.m * gemm.n + gemm.n * gemm.k + gemm.m * gemm.k)
    seconds = machine.gemm_seconds + max(
        gemm.flops / machine.gemm_rate[gemm.dtype] * slowdown, moved / machine.memory_bandwidth)
    return seconds * deviation(machine.gemm_deviations, edges)


def deviation(measured: dict[str, float], edges: tuple[int, int, int]) -> float:
    """How much longer a product takes than the figures say: as products of like shape did.

    It is the mean of what was `measured`, of logarithms as are the distances of shapes, each
    with the weight of its closeness; far from all of them the figures alone count.
    """
    total, weights = 0.0, FAR
    for shape, ratio in measured.items():
        apart = sum(math.log(edge / float(other)) ** 2
                    for edge, other in zip(edges, shape.split("x")))
        weight = math.exp(-apart / (2 * LIKE ** 2))
        total, weights = total + weight * math.log(ratio), weights + weight
    return math.exp(total / weights)


def pass_seconds(machine: Machine, event: Pass) -> float:
    """An elementwise operation at the full figures of `machine`."""
    if not machine.passes:
        return event.bytes / machine.memory_bandwidth
    return machine.passes.get(event.operation, machine.passes["other"]).at(event.bytes)


def meetings(event: Collective) -> int:
    """How often the ranks of a collective meet."""
    return 2 if event.kind == "all_reduce" else 1


def collective_terms(machine: Machine, event: Collective) -> Terms:
    """Seconds of one collective, when the same one runs along all parallel lines of the grid.

    Rings move (g-1)/g of the whole through each rank, an all-reduce twice, a pipelined broadcast
    or reduction all of it; where ranks share memory, a gather nothing.  A line that leaves its
    node crosses the node's link once for all of its members there, and the lines that pass
    through the node share that link.
    """
    measured = {line.key: line.curve for line in machine.collectives}
    for pieces in (event.pieces, False):    # where columns were not measured, as rows
        curve = measured.get((event.kind, event.size, event.stride, pieces))
        if curve is not None:
            waiting = meetings(event) * machine.waiting.get(event.size, 0.0)
            return {"node": curve.at(event.bytes), "latency": waiting}
    g = event.size
    share = {"all_gather": (g - 1) / g, "reduce_scatter": (g - 1) / g,
             "all_reduce": 2 * (g - 1) / g}.get(event.kind, 1.0)
    steps = math.ceil(math.log2(g)) * meetings(event)
    moved = share * event.bytes
    within = moved / machine.node.bytes_per_second
    widest, times = links(g, event.stride, machine.ranks_per_node)
    if widest == "node":
        if event.kind in copies_nothing(machine.transport):    # who reads the whole has its time
            within = 0.0
        return {"node": within, "latency": steps * machine.node.seconds_per_message}
    crossing = moved * times / machine.network.bytes_per_second
    level = "network" if crossing >= within else "node"
    return {level: max(within, crossing),
            "latency": steps * machine.network.seconds_per_message}


def copies_nothing(transport: str) -> frozenset[str]:
    """The collectives of ranks of one node that copy nothing with this `Machine.transport`: of
    several ways, those that leave the node are none for its ranks."""
    return in_place("shared" if "shared" in transport.split() else transport) & {"all_gather"}


def links(size: int, stride: int, per_node: int) -> tuple[str, float]:
    """The level that a line of `size` ranks needs, and how many times what moves through one of
    its ranks passes through a link there."""
    if per_node % (size * stride) == 0:
        return "node", 1.0
    return "network", per_node / min(size, max(1, per_node // stride))


def terms(machine: Machine, trace: Trace) -> dict[str, Terms]:
    """Seconds of each phase by what they are spent on, at the full figures of `machine`."""
    found = {phase: dict.fromkeys(TERMS, 0.0) for phase in PHASES}
    for (phase, _, event), times in trace.events.items():
        if phase not in found:
            continue
        spent = found[phase]
        if isinstance(event, Collective):
            for term, seconds in collective_terms(machine, event).items():
                spent[term] += times * seconds
            continue
        spent["latency"] += times * machine.launch_seconds
        if isinstance(event, Pass):
            spent["memory"] += times * pass_seconds(machine, event)
        else:
            spent["gemm"] += times * gemm_seconds(machine, event)
    return found


def seconds(machine: Machine, spent: Terms) -> float:
    """The sum of `spent`, each at the part that is achieved."""
    return sum(value / getattr(machine.achieved, term) for term, value in spent.items())


def step_seconds(machine: Machine, trace: Trace, recompute: bool = False) -> dict[str, float]:
    """Predicted seconds of forward and backward, which with `recompute` repeats the forward."""
    spent = terms(machine, trace)
    forward, backward = (seconds(machine, spent[phase]) for phase in PHASES)
    return {"forward": forward, "backward": backward + forward * recompute}
