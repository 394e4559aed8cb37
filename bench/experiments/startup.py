"""Measure the cost of starting many ranks, and of what they do besides arithmetic.

For each number of ranks, a cube, `mpirun` starts in turns a program that only imports NumPy and
mpi4py, and one of mm3d, whose rank 0 reports, in seconds: the time until all ranks run, to make
the grid, to make a tiny model of one layer, and for its first two steps (the first opens the
shared memory); and the processor time of a small gather.  Both report rank 0's memory by stage.

``python -m bench.experiments.startup SECONDS``, with the time of the launch, is the program that
mpirun starts.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from bench.errors import UsageError
from mm3d import launcher
from mm3d.child_process import run_child
from mm3d.console import protect, say
from mm3d.grid.split import Split

MOST_RANKS = 4096    # that one machine starts
STAGES = ("all ranks run", "grid", "model", "first step", "step")
CALLS = 100    # of the small gather
ROUNDS = 3    # of a number of ranks, without mm3d and with it
PROGRAM = __spec__.name    # of this module, also where it is run as a program
MAPS = Path("/proc/self/smaps_rollup")    # what the system counts of a process' memory
PLAIN = f"""
import json, os, sys, time
def memory():
    return open("{MAPS}").read() if os.path.exists("{MAPS}") else ""
found = {{"Python": memory()}}
import numpy
found["NumPy"] = memory()
from mpi4py import MPI
MPI.COMM_WORLD.Barrier()
took = time.time() - float(sys.argv[1])
found["MPI"] = memory()
if MPI.COMM_WORLD.rank == 0:
    print(json.dumps({{"all ranks run": took, "memory": found}}))
"""


class FailedJob(Exception):
    """A job that ended with a failure; the message is its standard error."""


def check_cubes(counts: list[int]) -> None:
    """Raise UsageError unless all numbers of ranks are cubes and this process is no rank."""
    if launcher.local_ranks() > 1:
        raise UsageError("start starts mpirun itself: run it without, as in "
                         "python -m bench measure start")
    wrong = [ranks for ranks in counts
             if round(ranks ** (1 / 3)) ** 3 != ranks or ranks > MOST_RANKS]
    if wrong:
        raise UsageError(f"--ranks {wrong[0]}: give cubes, such as 8,27,64, of at most "
                         f"{MOST_RANKS} ranks")


def measure_start(ranks: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Start a job of `ranks` ranks without mm3d and one with it, see `check_cubes`; measure both.

    Returns of each: seconds of the first of `STAGES`; and "memory", by the stage after which it
    was read: resident and private bytes of rank 0, NaN where the system does not tell.  With mm3d
    also "transport", along the first direction of its grid; seconds of the other `STAGES`; and of
    a rank's processor time for a small gather, the mean of `CALLS`: "call".

    Raises FailedJob when the job ends with a failure.
    """
    sides = []
    for program in (("-c", PLAIN), ("-m", PROGRAM)):
        command = launcher.mpirun_command(ranks, sys.executable, *program, repr(time.time()))
        job = run_child(command, env=launcher.environment_to_start(command), with_parent=True)
        if job.status:
            raise FailedJob(f"{ranks} ranks:\n{job.err.strip()}")
        found = json.loads(job.out.strip().rpartition("\n")[2])
        sides.append({**found, "memory": {stage: resident_bytes(text) for stage, text
                                          in found["memory"].items()}})
    return sides[0], sides[1]


def resident_bytes(maps: str) -> tuple[float, float]:
    """Read resident and private bytes from the text of `MAPS`; NaN where it is empty."""
    kilobytes = {words[0]: int(words[1]) for line in maps.splitlines()
                 if (words := line.split())[-1] == "kB"}
    return tuple(1024 * sum(kilobytes.get(name, math.nan) for name in names)
                 for names in (["Rss:"], ["Private_Clean:", "Private_Dirty:"]))


def _memory() -> str:
    return MAPS.read_text(encoding="ascii", errors="replace") if MAPS.exists() else ""


def _run_rank(launched: float) -> None:
    """Run one rank of a job that was launched at that time; rank 0 prints its times as JSON."""
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
    memory = {"mm3d": _memory()}
    p = round(comm.size ** (1 / 3))
    scheme = timed("grid", lambda: mm3d.scheme("3d", comm, grid=(p, p, p)))
    memory["grid"] = _memory()
    model = timed("model", lambda: mm3d.Transformer(
        scheme, layers=1, hidden=2 * p * p, heads=p, batch=p * p, seq=2))
    x, dy = model.random("x"), model.random("dy")

    def step():
        model.backward(dy, model.forward(x)[1])

    timed("first step", step)
    timed("step", step)
    memory["steps"] = _memory()
    split = Split(scheme.grid.x, 0, 4 * p)
    block = x.reshape(-1)[:4].copy()
    begun = time.process_time()
    for _ in range(CALLS):
        split.all_gather(block)
    found["call"] = (time.process_time() - begun) / CALLS
    found["transport"] = scheme.grid.x.transport.name
    comm.Barrier()
    if comm.rank == 0:
        say(json.dumps(found | {"memory": memory}))


if __name__ == "__main__":
    protect()
    _run_rank(float(sys.argv[1]))
