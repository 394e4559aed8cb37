"""Started on the ranks of an emulated cluster, whose nodes have clocks of their own: see `AHEAD`.

Each node but the first enters a namespace in which the monotonic clock is ahead.  Rank 0 prints as
JSON what the clocks find, and the times at which all ranks were between two barriers.
"""
import json
import os
import sys

AHEAD = 1000    # seconds by which the clock of node 1 is ahead, of node 2 twice that, ...
node = json.loads(os.environ["MM3D_CLUSTER"])["node"]
if len(sys.argv) == 1:
    os.execvp("unshare", ["unshare", "--time", "--fork", "--monotonic", str(AHEAD * node),
                          sys.executable, __file__, "inside"])

import platform  # noqa: E402
import time  # noqa: E402

from bench.instruments import clock  # noqa: E402
from mpi4py import MPI  # noqa: E402

clock._kernel = platform.node    # the nodes of an emulated cluster share one kernel
world = MPI.COMM_WORLD
found = clock.Clock(world)
world.Barrier()
before = found.now()
world.Barrier()
between = found.now()
world.Barrier()
after = found.now()
seen = world.gather({"node": node, "offset": found.offset, "error": found.offset_error,
                     "times": [before, between, after], "own": time.perf_counter()})
if world.rank == 0:
    print(json.dumps(seen))
