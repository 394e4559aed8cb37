"""Measure the machine's peak rates, and the memory of a step."""

import gc
import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any, Callable

import numpy as np

from bench.cases.variants import itemsize
from bench.instruments.clock import Clock
from bench.instruments.peak_memory import Resident
from bench.instruments.sampling import makespan_of
from bench.records.measurements import Group, Variable
from mm3d import launcher
from mm3d.arrays.backend import Backend
from mm3d.launcher import wait_patiently
from mm3d.model import cost
from mm3d.tracing import dry_run
from mm3d.transport.nodes import create_node_communicator

SIZE = 512          # of the square matrices: larger ones reach no higher rate
TIMES = 6           # least ratio of the sum's arrays together to a node's caches
LEAST = 192 << 20   # least bytes of the arrays, also where the system lists no caches
ON_DEVICE = 768 << 20    # bytes of each rank's arrays on a device, several times its cache
PART = 8            # the arrays take at most 1 / PART of the node's memory
SAMPLE = 0.02       # least seconds of a sample
ROUNDS = 5          # samples; the best counts
TimedCall = tuple[Callable[[], Any], int]    # and its operations or the bytes that it moves


def measure_peaks(backend: Backend, dtype: str, comm, quick: bool = False,
                  count_caches: Callable[[], float] | None = None,
                  rate: Callable[..., float] | None = None) -> Group | None:
    """Measure the group ``machine``: rates of matrix products and of memory; on rank 0.

    First one rank works while the others sleep, then as many ranks of each node as it has cores
    at once.  The rate of these together is divided by all ranks of the node, since ranks that
    outnumber cores take turns; so a node's rates do not depend on the number of ranks.  On a
    device all ranks work at once, each on arrays of `ON_DEVICE` bytes.  Ranks have as many BLAS
    threads as in a run.

    The product is C = AB of square matrices.  The memory's rate is that of c = a + b in float32,
    whose arrays are together several times as large as the last-level caches of a node, in both
    cases; a quick run adds arrays of `LEAST` bytes, and reports leave its rate out.  The bytes of
    a, b and c are counted once, as in STREAM's triad, without the third more of a processor that
    reads the lines of c before it writes them (write-allocate).
    """
    node = create_node_communicator(comm)
    at_work = node.bcast(min(node.size, launcher.cores()) if backend.host_buffers else node.size)
    caches = (count_caches or cache_bytes)() if backend.host_buffers else math.nan
    total = node.bcast(summed_bytes(math.nan if quick else caches) if backend.host_buffers
                       else ON_DEVICE)
    workers = comm.Split(int(node.rank >= at_work), comm.rank)
    teams = {"alone": (comm.Split(int(comm.rank > 0), comm.rank), comm.rank == 0, 1, 1),
             "together": (workers, node.rank < at_work, at_work, node.size)}
    found = {"memory_arrays": Variable(np.float64(total), "byte", ()),
             "last_level_caches": Variable(np.float64(caches), "byte", ()),
             "ranks_at_work": Variable(np.int64(at_work), "1", ())}
    for who, (team, works, working, sharing) in teams.items():
        for name, units in (("gemm", "s-1"), ("memory", "byte s-1")):
            wait_patiently(comm)
            if works:
                share = total // working if backend.host_buffers else total
                step, amount = (_product(backend, dtype) if name == "gemm"
                                else add_arrays(backend, share))
                best = (rate or _best_rate)(step, amount, backend.synchronize, team)
                found[f"{name}_{who}"] = Variable(np.float64(best * working / sharing), units, ())
                del step
        wait_patiently(comm)
        team.Free()
    node.Free()
    return Group({}, found) if comm.rank == 0 else None


def cache_bytes(cpus: Path = Path("/sys/devices/system/cpu")) -> float:
    """Return the bytes of this node's last-level caches together; NaN if the system lists none."""
    levels: dict[int, dict[str, int]] = {}
    for cache in cpus.glob("cpu[0-9]*/cache/index[0-9]*"):
        try:
            level, size, shared = ((cache / name).read_text(encoding="ascii").strip()
                                   for name in ("level", "size", "shared_cpu_list"))
            unit = {"K": 2 ** 10, "M": 2 ** 20}[size[-1]]
            levels.setdefault(int(level), {})[shared] = int(size[:-1]) * unit
        except (OSError, KeyError, ValueError, IndexError):    # this one is not described
            continue
    return float(sum(levels[max(levels)].values())) if levels else math.nan


def summed_bytes(caches: float) -> int:
    """Return the bytes of the sum's arrays on a node, all ranks together, for its `caches`."""
    wanted = LEAST if math.isnan(caches) else max(LEAST, TIMES * int(caches))
    return min(wanted, os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // PART)


def _product(backend: Backend, dtype: str) -> TimedCall:
    """Return a call that multiplies square matrices, and its operations."""
    a, b, c = (backend.empty((SIZE, SIZE), dtype) for _ in range(3))
    for matrix in (a, b, c):
        matrix[...] = 1
    return lambda: backend.gemm(a, b, c), 2 * SIZE ** 3


def add_arrays(backend: Backend, total: int) -> TimedCall:
    """Return a call that adds arrays of `total` bytes together, and the bytes that it moves."""
    xp, length = backend.xp, max(1, total // 12)
    a, b, c = (xp.ones((length,), dtype=xp.float32) for _ in range(3))
    return lambda: xp.add(a, b, out=c), 12 * length


def _best_rate(step: Callable[[], Any], amount: int, synchronize: Callable[[], None],
               team) -> float:
    """Measure the best rate per rank while all of `team` work at once."""
    makespan = makespan_of(step, team, synchronize, Clock(team))
    makespan(1)    # touches the memory
    calls = math.ceil(SAMPLE / makespan(1))
    return amount * calls / min(makespan(calls) for _ in range(ROUNDS))


class StepMemory:
    """Measure the memory of every rank in one step of a model, in bytes.

    Make it right before the step, with cleared gradients; call `note_saved` between forward and
    backward, and `group` after the step, on every rank.  `resident` is made before the model.
    """

    def __init__(self, model, resident: Resident) -> None:
        self.model, self.resident, self.backend = model, resident, model.grid.backend
        # Free the memory of earlier work first.
        gc.collect()
        self.backend.release_idle_memory()
        resident.mark()
        self.backend.reset_peak()

    def note_saved(self, saved: Any) -> None:
        """Note the memory that forward leaves for backward."""
        self.kept, self.after = self.model.saved_bytes(saved), self.backend.memory()["in_use"]

    def group(self, comm) -> Group | None:
        """Return the group ``memory`` of a run, on rank 0, None elsewhere; all ranks call it."""
        model, peak = self.model, self.backend.memory()["peak"]
        parameters, gradients = (sum(math.prod(a.shape) * itemsize(model.dtype)
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
                     | _expected(model))


def _expected(model) -> dict[str, Variable]:
    """Compute the parameters a rank, and run rank 0 dry, whose blocks are the largest."""
    grid, scheme, size = model.grid, model.scheme, itemsize(model.dtype)
    parameters = cost.parameters(model.sizes)
    # bfloat16 takes as much as float16, which dry runs have.
    stack = replace(model.stack, dtype="float16" if size == 2 else model.dtype)
    run = dry_run.extrapolate_step(
        scheme.name, grid.size, grid.shape.sizes, block=grid.backend.block,
        options={name: getattr(scheme, name) for name in scheme.options}, **stack.fields())
    found = {"parameters": parameters * size / grid.size,
             "gradients": parameters * size / grid.size,
             "saved": run.saved, "pool_peak": run.pool_peak}
    return {f"expected_{name}": Variable(np.float64(value), "byte", ())
            for name, value in found.items()}
