"""Describe a product or a Transformer on a grid, run it dry and predict its seconds."""

from dataclasses import dataclass

from bench.experiments.products.problem import Problem
from bench.prediction.machine_model import Machine
from bench.prediction.seconds import step_seconds
from mm3d.arrays import backend as backends
from mm3d.grid.shape import GridShape
from mm3d.schemes import lookup
from mm3d.tracing import dry_run
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.tracing.events import PHASES
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import Trace
from mm3d.transport.silent import DryCommunicator

NAMES = {"matmul": "MNK", "layer": ("hidden", "heads", "batch", "seq", "layers")}
Seconds = dict[str, float]    # by phase


@dataclass(frozen=True)
class Work:
    """A product C = AB or a Transformer, and how it is divided.

    Attributes
    ----------
    kind : {"matmul", "layer"}
        Which.
    scheme, grid : str, GridShape
        How it is divided.
    sizes : tuple of int
        M, N and K, or hidden, heads, batch, seq and layers.
    form : str
        Of a product; "" for a Transformer.
    """

    kind: str
    scheme: str
    grid: GridShape
    sizes: tuple[int, ...]
    form: str = ""

    @property
    def label(self) -> str:
        """Return a text such as ``matmul 3d 2x1x1 512x512x512 ab``."""
        return " ".join([self.kind, self.scheme, self.grid.compact,
                         "x".join(map(str, self.sizes)), self.form]).rstrip()

    @property
    def ranks(self) -> int:
        """Return the ranks of the grid."""
        return self.grid.ranks

    @classmethod
    def of(cls, label: str) -> "Work":
        """Parse a label."""
        kind, scheme, grid, sizes, *form = label.split()
        return cls(kind, scheme, GridShape.parse(grid, lookup(scheme).directions),
                   tuple(map(int, sizes.split("x"))), *form)


def trace(work: Work, dtype: str, block: int) -> Trace:
    """Run rank 0 of `work` dry, elementwise in blocks of `block` elements."""
    if work.kind == "layer":
        return dry_run.extended(work.scheme, work.ranks, work.grid, dtype=dtype, block=block,
                                **dict(zip(NAMES["layer"], work.sizes)))
    backend = backends.get(DryBackend())
    backend.begin(block)
    problem = Problem(work.scheme, work.form, DryCommunicator(work.ranks), work.grid, work.sizes,
                      dtype, 0, backend)
    with observed(problem.grid, backend.trace, problem):
        for phase in PHASES:
            problem.steps[phase]()
    return backend.trace


def predicted(machine: Machine, work: Work, dtype: str) -> Seconds:
    """Predict seconds of forward and backward on `machine`."""
    return step_seconds(machine, trace(work, dtype, machine.granule))
