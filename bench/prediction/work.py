"""Name a product or a Transformer on a grid, run it dry, and predict its seconds."""

from dataclasses import dataclass

from bench.experiments.products.problem import Problem, product_grid
from bench.prediction.machine_model import Machine
from bench.prediction.seconds import place_trace, step_seconds
from bench.prediction.shared_cores import trace_on_cores
from mm3d.arrays import backend as backends
from mm3d.grid.shape import GridShape
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.tracing.events import PHASES
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import Trace
from mm3d.transport.communicators import DryCommunicator

SIZE_NAMES = {"matmul": "MNK", "layer": ("hidden", "heads", "batch", "seq", "layers")}
Seconds = dict[str, float]    # by phase
ORDER = "order="    # before the order of the ranks in a label


@dataclass(frozen=True)
class Work:
    """A product of matrices or a Transformer, with its scheme and grid.

    The kind is "matmul" or "layer", with M, N and K and a form such as "ab", or hidden, heads,
    batch, seq and layers.  The order has the directions from the one that varies slowest over
    consecutive ranks, which fill the nodes, to the fastest; "" for the order of the grid.
    """

    kind: str
    scheme: str
    grid: GridShape
    sizes: tuple[int, ...]
    form: str = ""
    order: str = ""

    @property
    def label(self) -> str:
        """Return the name in files, such as ``matmul 3d 2x1x1 512x512x512 ab``."""
        parts = [self.kind, self.scheme, self.grid.compact, "x".join(map(str, self.sizes)),
                 self.form, self.order and ORDER + self.order]
        return " ".join(filter(None, parts))

    @property
    def problem(self) -> tuple:
        """Return what is computed, on whatever grid."""
        return self.kind, self.sizes, self.form

    @classmethod
    def parse(cls, label: str) -> "Work":
        """Return the work that a label names."""
        kind, scheme, grid, sizes, *more = label.split()
        form = "".join(word for word in more if not word.startswith(ORDER))
        order = "".join(word[len(ORDER):] for word in more if word.startswith(ORDER))
        return cls(kind, scheme, GridShape.parse(grid, find_scheme(scheme).directions),
                   tuple(map(int, sizes.split("x"))), form, order)


def trace_work(work: Work, dtype: str, machine: Machine) -> Trace:
    """Run rank 0 of `work` dry, as `machine` computes elementwise work and shares its cores."""
    if work.kind == "layer":
        trace = trace_on_cores(
            lambda rank: dry_run.extrapolate_step(
                work.scheme, work.grid.ranks, work.grid, rank, dtype=dtype,
                block=machine.elementwise_block, **dict(zip(SIZE_NAMES["layer"], work.sizes))),
            work.scheme, work.grid, machine.cores_shared_by(work.grid.ranks))
    else:
        backend = backends.get(DryBackend())
        backend.reset(machine.elementwise_block)
        grid = product_grid(work.scheme, DryCommunicator(work.grid.ranks), work.grid, backend)
        problem, trace = Problem(work.scheme, work.form, grid, work.sizes, dtype), backend.trace
        with observed(problem.grid, trace, problem):
            for phase in PHASES:
                getattr(problem, phase)()
    return place_trace(trace, work.grid, work.order) if work.order else trace


def predict_seconds(machine: Machine, work: Work, dtype: str) -> Seconds:
    """Predict the seconds of forward and backward on `machine`."""
    return step_seconds(machine, trace_work(work, dtype, machine))
