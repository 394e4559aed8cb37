"""What a run is held against: the machine's peak rates, and the memory of a step."""

import gc
import math
import time
from typing import Any, Callable

import numpy as np

from bench.footprint import Resident
from mm3d import cost, dry, environment, timing
from mm3d.backend import Backend
from mm3d.record import Group, Variable

SIZE = 512          # of the square matrices whose product is the peak
BYTES = 3 * 2 ** 26  # of the three arrays of the sum, over all ranks of a node
SAMPLE = 0.005      # seconds that one rank alone works in a sample
ALONE = 0.1         # seconds that one rank works while the others, falling asleep, wait
ROUNDS = 2          # the best of which counts


def peaks(backend: Backend, dtype: str, comm) -> Group | None:
    """The group ``machine``: rates of matrix products and of memory, on rank 0.

    Of every rank while all work at once (their calls over the makespan), and of one rank while
    the others sleep, with the threads that a rank has.  The product is C = AB of square matrices,
    the memory's the sum c = a + b, which moves as many bytes as STREAM's triad.

    Parameters
    ----------
    backend : Backend
        Whose rates.
    dtype : str
        Of the matrices and arrays.
    comm : mpi4py.MPI.Intracomm
        All ranks; each must call this.
    """
    xp, itemsize = backend.xp, np.dtype(dtype).itemsize
    length = BYTES // (3 * itemsize * min(comm.size, environment.local_ranks()))
    a, b, c = (xp.ones((SIZE, SIZE), dtype=getattr(xp, dtype)) for _ in range(3))
    u, v, w = (xp.ones((length,), dtype=getattr(xp, dtype)) for _ in range(3))
    work = {"gemm": (lambda: backend.gemm(a, b, c), 2 * SIZE ** 3, "s-1"),
            "memory": (lambda: xp.add(u, v, out=w), 3 * length * itemsize, "byte s-1")}
    clock, found = timing.Clock(comm), {}
    for name, (step, amount, units) in work.items():
        alone, together = _rates(step, amount, backend.synchronize, clock, comm)
        found[f"{name}_alone"] = Variable(np.float64(alone), units, ())
        found[f"{name}_together"] = Variable(np.float64(together), units, ())
    return Group({}, found) if comm.rank == 0 else None


def _rates(step: Callable[[], Any], amount: int, synchronize: Callable[[], None],
           clock: timing.Clock, comm) -> tuple[float, float]:
    """The best rates of rank 0 alone, and of each rank when all work at once."""
    step()    # touches the memory
    timing.wait_patiently(comm)
    seconds, begun = math.inf, time.perf_counter()
    while comm.rank == 0 and time.perf_counter() < begun + ALONE:
        start = time.perf_counter()
        step()
        synchronize()
        seconds = min(seconds, time.perf_counter() - start)
    timing.wait_patiently(comm)
    seconds = comm.bcast(seconds)
    calls = max(1, math.ceil(SAMPLE / seconds))

    def several() -> None:
        for _ in range(calls):
            step()
    makespan = min(timing.spans(several, comm, synchronize, clock)[0].max()
                   for _ in range(ROUNDS))
    return amount / seconds, amount * calls / float(makespan)


class StepMemory:
    """The bytes of every rank in one step of a model.

    Made right before the step; `between` is called between forward and backward, `group` after
    it.  Every rank makes one.

    Parameters
    ----------
    model : Transformer
        Whose step it is, from cleared gradients.
    resident : Resident
        Made before the model.
    """

    def __init__(self, model, resident: Resident) -> None:
        self.model, self.resident, self.backend = model, resident, model.grid.backend
        # What others left behind goes first.
        gc.collect()
        self.backend.trim()
        resident.mark()
        self.backend.reset_peak()

    def between(self, saved: Any) -> None:
        """Note what forward leaves for backward."""
        self.kept, self.after = self.model.saved_bytes(saved), self.backend.memory()["in_use"]

    def group(self, sizes: dict[str, int], comm) -> Group | None:
        """The group ``memory`` of a run, on rank 0; `sizes` are the model's."""
        model, peak = self.model, self.backend.memory()["peak"]
        parameters, gradients = (sum(math.prod(a.shape) * np.dtype(model.dtype).itemsize
                                     for a in arrays) for arrays in zip(
            *((p.value, p.grad) for p in model.parameters)))
        device = math.nan if self.backend.host_buffers else float(peak)
        everyone = comm.gather((parameters, gradients, self.kept, peak - self.after, peak, device,
                                self.resident.growth()))
        if everyone is None:
            return None
        names = ("parameters", "gradients", "saved", "transient", "pool_peak", "device_peak",
                 "resident_growth")
        columns = zip(names, np.array(everyone, np.float64).T)
        return Group({"rank": range(comm.size)},
                     {name: Variable(values, "byte", ("rank",)) for name, values in columns}
                     | _expected(model, sizes))


def _expected(model, sizes: dict[str, int]) -> dict[str, Variable]:
    """Closed forms a rank, and the peak of a dry run of rank 0, which has the largest blocks."""
    grid, itemsize = model.grid, np.dtype(model.dtype).itemsize
    parameters = cost.parameters(sizes["layers"], sizes["hidden"])
    saved = cost.saved_words(model.scheme.name, grid.shape, **sizes)
    run = dry.extended(model.scheme.name, grid.size, tuple(grid.shape.values()),
                       block=grid.backend.block, **sizes, dtype=model.dtype)
    found = {"parameters": parameters * itemsize / grid.size,
             "gradients": parameters * itemsize / grid.size,
             "saved": saved * itemsize / grid.size, "pool_peak": run.pool_peak}
    return {f"expected_{name}": Variable(np.float64(value), "byte", ())
            for name, value in found.items()}
