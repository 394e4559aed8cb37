"""Describe a machine, and read its description from a TOML file.

`bench.prediction.seconds` predicts seconds from the description.
"""

import math
import re
import sys
from typing import Any, Iterator, Literal

import msgspec
import numpy as np

from bench.cases.variants import VARIANT_DTYPES
from bench.cluster.spec import Cluster
from bench.errors import UsageError
from bench.text_files import read_described
from mm3d.grid.axis import COLLECTIVES
from mm3d.transport.choice import HOST_TRANSPORTS

TEXTS = ("name", "about", "sources", "transport", "kind", "pieces",
         "kernels", "attention")    # all else is numbers
SMALLEST, LARGEST = 1e-30, 1e30    # so that no quotient of two numbers is 0 or infinite
LEAST = {**dict.fromkeys(("launch_seconds", "seconds_per_message", "gemm_half_size",
                          "gemm_seconds", "block", "ranks", "cores", "waiting",
                          "node_waiting"), 0),
         "ranks_per_node": 1, "alpha": -LARGEST, "beta": -LARGEST}    # of others it is `SMALLEST`
NUMBERS = ("gemm_rate", "gemm_deviations", "waiting", "node_waiting")    # by names
SHAPE = re.compile("x".join([r"0*[1-9]\d*"] * 3))    # of a product
RETIRED = ("call_seconds", "peer_seconds")    # 0 in all files that were measured


class Level(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A level of the network.

    Attributes
    ----------
    seconds_per_message, bytes_per_second : float
        Latency, and bandwidth in one direction, which inside a node each rank has to itself, and
        which the ranks of a node share between nodes.
    """

    seconds_per_message: float
    bytes_per_second: float


class Achieved(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Fractions of the machine's figures that a step achieves.

    On a calibrated machine: fractions of the rates of operations repeated alone.

    Attributes
    ----------
    gemm, memory, node, network : float
        Of the rate of products, of the memory's bandwidth, and of both levels' bandwidths.
    latency : float
        Of the speed of messages and of starts: seconds are divided by it.
    """

    gemm: float
    memory: float
    node: float
    network: float
    latency: float = 1.0


MOST = dict.fromkeys(Achieved.__struct_fields__, 1)    # of others it is `LARGEST`


class Curve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds measured at several sizes.

    Attributes
    ----------
    bytes, seconds : list of float
        The sizes, ascending, and as many seconds.
    """

    bytes: list[float]
    seconds: list[float]

    def at(self, size: float) -> float:
        """Interpolate the seconds of `size` bytes.

        Between measured sizes it is a power law, below the first the seconds of the first, above
        the last the straight line through the last and a size of at most a quarter of it, or the
        rate of the last where that line would fall.
        """
        if size >= self.bytes[-1]:
            return self.seconds[-1] + self._last_slope() * (size - self.bytes[-1])
        return math.exp(np.interp(math.log(max(size, 1)), np.log(self.bytes),
                                  np.log(self.seconds)))

    def _last_slope(self) -> float:
        """Return the seconds per byte beyond the last size.

        A smaller size within a factor of four would give a slope that is mostly noise.
        """
        last, took = self.bytes[-1], self.seconds[-1]
        smaller = [(n, t) for n, t in zip(self.bytes, self.seconds) if n <= last / 4 and t < took]
        if not smaller:
            return took / last
        before, earlier = smaller[-1]
        return (took - earlier) / (last - before)


class Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A collective measured along all lines of `size` ranks, `stride` apart, at once.

    Attributes
    ----------
    kind : str
        The collective, such as "all_gather".
    size, stride : int
        Ranks of a line, and the distance between them.
    alpha, beta : float
        The fit ``alpha + beta bytes`` of least relative squares to the curve, for the reader;
        predictions read the curve.
    curve : Curve
        The measured seconds.
    pieces : bool
        As in `mm3d.tracing.events.Collective`.
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
        """Return the key of the measurement."""
        return self.kind, self.size, self.stride, self.pieces


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A machine of equal nodes, with consecutive ranks on a node.

    Attributes
    ----------
    name, about : str
        The machine, and a line that describes it.
    ranks_per_node : int
        Number of ranks on a node.
    memory_bytes, memory_bandwidth : float
        Memory of a rank, and its bandwidth in bytes a second.
    launch_seconds : float
        Seconds to start an operation.
    gemm_rate : dict of str to float
        Operations a second of large products, by dtype.
    gemm_half_size : tuple of float
        Half sizes a, b and c of a product m x n by n x k, which takes
        1 + (a / m + b / n + c / k) / 3 times as long as at the full rate.
    gemm_seconds : float
        Seconds of a product, or batch of products, of no size.
    gemm_deviations : dict of str to float
        Measured seconds of products over those by these figures, by shape such as "256x64x512".
    node, network : Level
        Links inside a node and between nodes.
    achieved : Achieved
        Fractions of these figures that a step achieves.
    sources : dict of str to str
        Source of each figure.
    block : int
        Elements that elementwise work handles at a time; 0 for whole arrays.
    passes : dict of str to Curve
        Seconds of elementwise operations by bytes read and written; "other" for all not named.
        Empty if only the bandwidth is known.
    collectives : list of Line
        Measured collectives; all others are predicted from `node` and `network`.
    transport : str
        Transport of `collectives` (see `mm3d.transport.choice.choose_transport`); several names
        where some ranks are on other nodes; "" if nothing was measured.
    ranks : int
        Number of ranks that measured it on several nodes; 0 for one node.
    cores : int
        Number of cores that the measuring ranks shared; 0 where each had its own.
    waiting : dict of int to float
        Seconds that a barrier takes longer in a step than repeated alone, by its number of ranks:
        they arrive at different times, and other work has used the caches.
    node_waiting : dict of int to float
        The same for barriers inside a node; `waiting` is then for those between nodes alone.
    kernels, attention : {"numpy", "own", "fused"}, {"flash", "softmax"}
        The kernels that run elementwise work and attention, see `bench.prediction.kernels`.
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
    ranks: int = 0
    cores: int = 0
    waiting: dict[int, float] = {}
    node_waiting: dict[int, float] = {}
    kernels: Literal["numpy", "own", "fused"] = "numpy"
    attention: Literal["flash", "softmax"] = "flash"

    @property
    def measured_ranks(self) -> int:
        """Return the number of ranks that measured a calibrated machine."""
        return self.ranks or self.ranks_per_node

    @property
    def described(self) -> str:
        """Return `about`, and by which kernels work is priced."""
        kind = "mm3d's" if self.kernels == "own" else self.kernels
        return f"{self.about}; " + ("a kernel for each operation of NumPy" if kind == "numpy" else
                                    f"{kind} kernels, attention by {self.attention}")

    @property
    def elementwise_block(self) -> int:
        """Return `block` as an argument of `mm3d.tracing.dry_run.trace_step`: never 0."""
        return self.block or sys.maxsize

    def cores_shared_by(self, ranks: int) -> int:
        """Return the number of cores that `ranks` ranks share; 0 if that is not known."""
        return self.cores if ranks == self.measured_ranks else 0

    def matches_transport(self, transport: str) -> bool:
        """Return whether its collectives were measured with `transport`; True if either is ""."""
        return not self.transport or set(transport.split()) <= set(self.transport.split())


def cluster_suffix(cluster: Cluster | None) -> str:
    """Return the end of `Machine.about` for a machine measured in `cluster`; "" for None."""
    return f"; {cluster.describe()}" if cluster else ""


def check_machine(machine: Machine, name: str, ranks: int, transport: str,
                  cluster: Cluster | None) -> None:
    """Raise UsageError for a machine measured with other ranks, elsewhere or otherwise.

    `name` is the value of ``--machine``, `transport` the name of that of the ranks, and `cluster`
    the emulated one that they are in.  Machines that nobody measured are for all ranks.
    """
    count = machine.measured_ranks
    if machine.passes and count != ranks:
        raise UsageError(f"--machine {name} was measured with {count} rank{'s' * (count > 1)}, "
                         f"not {ranks}: start that many, or calibrate with {ranks}")
    mark = "; emulated cluster, "
    there = "".join(machine.about.rpartition(mark)[1:] if mark in machine.about else ())
    here = cluster_suffix(cluster)
    if (machine.passes or machine.collectives) and there != here:
        names = [text.removeprefix("; ") or "no emulated cluster" for text in (there, here)]
        raise UsageError(f"--machine {name} was measured in {names[0]}, and this is {names[1]}: "
                         f"start it there, or measure a new file here")
    if not machine.matches_transport(transport):
        remedy = ("start more ranks, or " if ranks == 1 else
                  f"set MM3D_TRANSPORT={machine.transport}, or "
                  * (machine.transport in HOST_TRANSPORTS))
        raise UsageError(f"--machine {name} was measured with transport {machine.transport}, not "
                         f"{transport}: {remedy}calibrate again")


def load_machine(name: str, dtype: str = "") -> Machine:
    """Read a supplied machine by its name, or a TOML file by its path.

    Raises UsageError when there is no such machine, the file does not describe one, or it has no
    rate of products in `dtype`, if given.
    """
    machine = read_described(
        "machine", name, Machine,
        lambda tree: msgspec.convert(tree, Machine, str_keys=True),
        lambda tree: next(_problems(tree), ""), RETIRED)
    if dtype and (lacking := missing_rate(machine, dtype)):
        raise UsageError(lacking)
    return machine


def missing_rate(machine: Machine, dtype: str) -> str:
    """Say that a machine has no rate of products in `dtype`, and which it has; "" if it has."""
    if dtype in machine.gemm_rate:
        return ""
    return (f"machine {machine.name} has no rate for {dtype}: it has "
            f"{', '.join(machine.gemm_rate) or 'none'}")


def _problems(value: Any, key: str = "", field: str = "") -> Iterator[str]:
    """Describe values of a machine file that are no numbers or out of range, and wrong names.

    `key` is the place of `value`, and `field` the field of a `Machine`, or of its parts, there.
    """
    if field in TEXTS:
        return
    if isinstance(value, list):
        for place, item in enumerate(value):
            yield from _problems(item, f"{key}[{place}]", field)
    elif isinstance(value, dict):
        for name, item in value.items():
            # A name that a user has chosen is no field.
            of = field if field in NUMBERS else "curve" if field == "passes" else name
            yield from _problems(item, f"{key}.{name}".lstrip("."), of)
        yield from _wrong_names(value, key, field)
    else:
        least, most = LEAST.get(field, SMALLEST), MOST.get(field, LARGEST)
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not least <= value <= most:
            yield f"{key} = {value!r}: a number from {least:g} to {most:g} would do"


def _wrong_names(table: dict[str, Any], key: str, field: str) -> Iterator[str]:
    """Describe wrong names in a table, and wrong numbers of a curve."""
    for name, value in table.items():
        if field == "gemm_rate" and name not in VARIANT_DTYPES:
            yield f"{key}.{name} = {value}: rates of {', '.join(VARIANT_DTYPES)} would do"
        if field == "gemm_deviations" and not SHAPE.fullmatch(name):
            yield f"{key}: {name!r} is no shape such as 256x64x512"
        if field == "collectives" and name == "kind" and value not in COLLECTIVES:
            yield f"{key}.kind = {value!r}: {', '.join(COLLECTIVES)} would do"
    if field == "passes" and table and "other" not in table:
        yield f"{key}: a curve named other, for all operations without one, would do too"
    sizes, seconds = table.get("bytes"), table.get("seconds")
    if isinstance(sizes, list) and isinstance(seconds, list) and not (
            0 < len(sizes) == len(seconds) and sizes == sorted(set(sizes))):
        yield f"{key}: as many seconds as bytes, which ascend, would do"
