"""Started on the ranks of an emulated cluster: rank 0 prints what they see, as JSON."""
import json
import os
import sys
from pathlib import Path

import numpy as np
from bench.instruments.wire import WireRecorder
from mm3d import launcher
from mpi4py import MPI

BYTES = int(sys.argv[1])
world = MPI.COMM_WORLD
node = world.Split_type(MPI.COMM_TYPE_SHARED)
seen = world.gather({
    "cluster": json.loads(os.environ["MM3D_CLUSTER"]), "host": os.uname().nodename,
    "ranks": node.size, "tcp": [Path(f"/proc/sys/net/ipv4/tcp_{name}").read_text().strip()
                                for name in ("congestion_control", "slow_start_after_idle")],
    "oversubscribed": launcher.oversubscribed(),
    "memory": sorted(path.name for path in Path("/dev/shm").glob("mine-*")),
    "devices": sorted(line.split(":")[0].strip()
                      for line in Path("/proc/net/dev").read_text().splitlines()[2:])})
wire = WireRecorder(world)
block = np.zeros(BYTES, np.int8)
wire.start()
begun = MPI.Wtime()
# The first rank of the first node sends to the last of the last.
if world.rank == 0:
    world.Send(block, world.size - 1)
elif world.rank == world.size - 1:
    world.Recv(block, 0)
world.Barrier()
seconds = MPI.Wtime() - begun
counts = wire.stop()
if world.rank == 0:
    received, _, sent, packets = counts.tolist()
    print(json.dumps({"seen": seen, "seconds": seconds, "nodes": wire.nodes, "sent": sent,
                      "received": received, "packets": packets}))
