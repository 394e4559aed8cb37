"""Measure what many ranks cost before and beside the arithmetic.

For each number of ranks, a cube, `mpirun` is started once and rank 0 tells, in seconds: until all
ranks run, to make the grid, to make a tiny model of one layer, and for its steps, the first of
which opens the shared memory; and in microseconds of a rank's processor time, a small gather.

``python -m bench.experiments.startup SECONDS``, with the time of the launch, is what mpirun
starts.
"""

import json
import subprocess
import sys
import time
from dataclasses import dataclass

from bench.errors import UsageError
from mm3d import launcher

PHASES = ("all ranks run", "grid", "model", "first step", "step")
CALLS = 100
PROGRAM = __spec__.name    # of this module, also where it is run as a program


@dataclass(frozen=True)
class Start:
    """The cost of one job.

    Attributes
    ----------
    ranks : int
        Of the job.
    transport : str
        Along the first direction of its grid.
    seconds : dict of str to float
        By `PHASES`.
    call : float
        Seconds of a rank's processor time for a small gather, the mean of `CALLS`.
    """

    ranks: int
    transport: str
    seconds: dict[str, float]
    call: float


class FailedJob(Exception):
    """A job that was started ended with a failure; the message is what it printed."""


def check_cubes(every: list[int]) -> None:
    """Raise UsageError for numbers of ranks that are no cubes, and when started by mpirun."""
    if launcher.local_ranks() > 1:
        raise UsageError("start starts mpirun itself: run it without, as in python -m bench start")
    wrong = [ranks for ranks in every if round(ranks ** (1 / 3)) ** 3 != ranks]
    if wrong:
        raise UsageError(f"--ranks {wrong[0]}: give cubes, such as 8,27,64")


def measure_start(ranks: int) -> Start:
    """Start a job of `ranks` ranks and measure what they cost.

    Raises
    ------
    UsageError
        When that is no cube, or this process was started by mpirun itself.
    FailedJob
        When the job ends with a failure.
    """
    check_cubes([ranks])
    command = launcher.mpirun_command(ranks, sys.executable, "-m", PROGRAM, repr(time.time()))
    done = subprocess.run(command, capture_output=True, text=True,
                          env=launcher.for_launcher(command))
    if done.returncode:
        raise FailedJob(f"{ranks} ranks:\n{done.stderr.strip()}")
    found = json.loads(done.stdout.strip().rpartition("\n")[2])
    return Start(ranks, found["transport"], {name: found[name] for name in PHASES}, found["call"])


def rank(launched: float) -> None:
    """Run as one rank of the job; rank 0 prints its times as JSON."""
    import mm3d
    from mpi4py import MPI
    comm, found = MPI.COMM_WORLD, {}

    def timed(name: str, step):
        begun = time.perf_counter()
        result = step()
        comm.Barrier()
        found[name] = time.perf_counter() - begun
        return result

    comm.Barrier()
    found["all ranks run"] = time.time() - launched
    p = round(comm.size ** (1 / 3))
    scheme = timed("grid", lambda: mm3d.scheme("3d", comm, grid=(p, p, p)))
    model = timed("model", lambda: mm3d.Transformer(
        scheme, layers=1, hidden=2 * p * p, heads=p, batch=p * p, seq=2))
    x, dy = model.random("x"), model.random("dy")

    def step():
        model.backward(dy, model.forward(x)[1])

    timed("first step", step)
    timed("step", step)
    split = scheme.grid.x.split(0, 4 * p)
    block = x.reshape(-1)[:4].copy()
    begun = time.process_time()
    for _ in range(CALLS):
        split.all_gather(block)
    found["call"] = (time.process_time() - begun) / CALLS
    found["transport"] = scheme.grid.x.transport.name
    comm.Barrier()
    if comm.rank == 0:
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    rank(float(sys.argv[1]))
