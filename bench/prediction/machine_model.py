"""The description of a machine, read from a TOML file; `bench.prediction.seconds` predicts by
it."""

import math
import sys
from importlib import resources
from pathlib import Path

import msgspec
import numpy as np

from bench.errors import UsageError


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
    `pieces` is as in `mm3d.tracing.events.Collective`.
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
        How the bytes of `collectives` travelled, as `mm3d.transport.choice.settle` calls it, in
        several ways where some ranks are on other nodes; "" where nothing was measured.
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
        """`block`, as `mm3d.tracing.dry_run.step` takes it."""
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
                for file in resources.files("bench.prediction").joinpath("machines").iterdir()
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
