"""The verb ``start``: what many ranks cost before and beside the arithmetic.

For each number of ranks, a cube, `mpirun` is started once and rank 0 tells, in seconds: until all
ranks run, to make the grid, to make a tiny model of one layer, and for its steps, the first of
which opens the shared memory; and in microseconds of a rank's processor time, a small gather.
"""

import json
import subprocess
import sys
import time

from bench.cases import UsageError
from bench.formats import Column, Notes, Rows, Table, render
from mm3d import environment

PHASES = ("all ranks run", "grid", "model", "first step", "step")
CALLS = 100


def start(arguments) -> int:
    """Print the table; 0 when every job ended well.

    Raises
    ------
    UsageError
        When started under mpirun, or a number of ranks is no cube.
    """
    if environment.local_ranks() > 1:
        raise UsageError("start starts mpirun itself: run it without, as in python -m bench start")
    wrong = [ranks for ranks in arguments.ranks if round(ranks ** (1 / 3)) ** 3 != ranks]
    if wrong:
        raise UsageError(f"--ranks {wrong[0]}: give cubes, such as 8,27,64")
    rows: Rows = []
    for ranks in arguments.ranks:
        command = environment.mpirun_command(ranks, sys.executable, "-m", "bench.start",
                                             repr(time.time()))
        done = subprocess.run(command, capture_output=True, text=True,
                              env=environment.for_launcher(command))
        if done.returncode:
            print(f"failed: {ranks} ranks:\n{done.stderr.strip()}", file=sys.stderr)
            return 1
        found = json.loads(done.stdout.strip().rpartition("\n")[2])
        rows.append([ranks, found["transport"], *(f"{found[name]:#.3g}" for name in PHASES),
                     f"{1e6 * found['call']:.0f}"])
    columns = [Column("ranks"), Column("transport"), *(Column(name, "(s)") for name in PHASES),
               Column("a small gather", "(us of CPU)")]
    print(render([Table(f"Many ranks on {environment.cores()} cores", columns, rows),
                  Notes("About these figures:", [
                      "once each; a step is forward and backward of one tiny layer; the gather is "
                      f"the mean of {CALLS} along x, all that a rank's processor spends on it"])]))
    return 0


def rank(launched: float) -> None:
    """What each rank does; rank 0 prints what it found."""
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
