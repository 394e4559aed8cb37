"""Report the environment of every rank: the program that ``bench doctor`` starts as a child job.

``python -m bench.doctor.census census [VARIABLE ...]`` prints a line of JSON for each world of
ranks that the launcher has made, with the values of these variables on each rank; ``exchange``
sends device buffers between the ranks and prints whether they arrived.  An MPI that cannot read
them may crash, so this is a program of its own.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import mm3d  # noqa: F401  (before NumPy and MPI start: sets the variables that they read)

import numpy as np

from bench.instruments import host
from mm3d import control_groups, launcher
from mm3d.arrays import backend as backends
from mm3d.arrays.device_choice import gpu_of_rank
from mm3d.console import protect, say

CENSUS_MARK = "mm3d-census "
WORDS = 1 << 16    # per message: too many to be sent eagerly, too few to take time


def _find_gpus() -> dict[str, Any]:
    """Find the bus addresses of the GPUs that this process can use, and why CuPy cannot be used.

    Without CuPy the GPUs are the numbers in CUDA_VISIBLE_DEVICES.
    """
    try:
        import cupy
        count = cupy.cuda.runtime.getDeviceCount()
        return {"gpus": [str(cupy.cuda.Device(i).pci_bus_id) for i in range(count)],
                "gpu_source": "CUDA", "cupy": ""}
    except (ImportError, RuntimeError) as error:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return {"gpus": [name for name in visible.split(",") if name.strip()],
                "gpu_source": "CUDA_VISIBLE_DEVICES",
                "cupy": f"{type(error).__name__}: {' '.join(str(error).split())}"}


def _own_gpu(gpus: list[str], comm) -> dict[str, str]:
    """Return as "gpu" the one of `gpus` that this rank computes on; every rank calls it."""
    from mm3d.transport.nodes import create_node_communicator
    node = create_node_communicator(comm)
    number = node.rank
    node.Free()
    try:
        return {"gpu": gpus[gpu_of_rank(number, len(gpus))] if gpus else "", "gpu_problem": ""}
    except ValueError as error:
        return {"gpu": "", "gpu_problem": str(error)}


def best_kernels(cpuinfo: Path = host.CPUINFO) -> str:
    """Return the vector instructions that BLAS should use on this processor; "" if unknown."""
    if launcher.fastest_kernels(cpuinfo):
        return "avx2"
    flags = host.processor_flags(cpuinfo)
    return next((name for name in ("avx512f", "avx2") if name in flags), "")


def take_census(*variables: str) -> list[dict[str, Any]]:
    """Gather the environment of each rank of this world, in rank order; every rank calls it.

    The values of `variables` are in ``variables``, None where one is not set.
    """
    from mpi4py import MPI
    from bench.instruments.clock import Clock
    from mm3d.transport.nodes import number_nodes
    comm = MPI.COMM_WORLD
    nodes = number_nodes(comm)
    node = nodes[comm.rank]
    gpus, clock = _find_gpus(), Clock(comm)
    mine = {"size": comm.size, "node": nodes.index(node),    # numbered by its first rank
            "local_rank": nodes[:comm.rank].count(node), "ranks_on_node": nodes.count(node),
            "cores": launcher.cores(), "cpu_quota": control_groups.cpu_quota(),
            **gpus, **_own_gpu(gpus["gpus"], comm),
            "variables": {name: os.environ.get(name) for name in variables},
            "mpi": host.mpi_name(MPI.Get_library_version()),
            "best_kernels": best_kernels(), **host.describe_blas(),
            "compiler": getattr(backends.get("numpy"), "compiler", ""),
            "clock_resolution": clock.resolution(), "clock_offset_error": clock.offset_error}
    return comm.allgather(mine)


def exchange_buffers() -> str:
    """Move device buffers between all ranks; return which arrived wrong, "" if none.

    The calls are those of `mm3d.transport.device.DeviceTransport`: all-gather(v), all-to-all(v),
    broadcast and messages between two ranks.  There is no reduction: mm3d sums on the device.
    """
    import cupy
    # The device's context has to exist when MPI starts, and on this rank's own GPU.
    count = cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(gpu_of_rank(launcher.local_rank() or 0, count)).use()
    cupy.zeros(1)
    from mpi4py import MPI
    from mm3d.transport.nodes import create_node_communicator
    comm = MPI.COMM_WORLD
    node = create_node_communicator(comm)
    cupy.cuda.Device(gpu_of_rank(node.rank, count)).use()    # where no launcher has told it
    size, rank = comm.size, comm.rank
    mine, source = cupy.full(WORDS, rank + 1, dtype="float32"), (rank - 1) % size
    gathered, scattered = (cupy.zeros(size * WORDS, dtype="float32") for _ in range(2))
    sent, passed = cupy.full(WORDS, size, dtype="float32"), cupy.zeros(WORDS, dtype="float32")
    if rank:
        sent = cupy.zeros(WORDS, dtype="float32")
    cupy.cuda.Device().synchronize()
    lengths = [WORDS] * size
    blocks = lengths, [WORDS * of for of in range(size)]
    comm.Allgatherv(mine, [gathered, blocks])
    # Every rank sends its one block to every rank.
    comm.Alltoallv([mine, (lengths, [0] * size)], [scattered, blocks])
    comm.Bcast(sent, 0)
    requests = [comm.Irecv(passed, source), comm.Isend(mine, (rank + 1) % size)]
    MPI.Request.Waitall(requests)
    ranks = np.repeat(np.arange(1, size + 1), WORDS)
    wrong = [name for name, got, expected in (
        ("an all-gather", gathered, ranks), ("an all-to-all", scattered, ranks),
        ("a broadcast", sent, size), ("a message", passed, source + 1))
        if not (cupy.asnumpy(got) == expected).all()]
    problems = [text for text in comm.allgather(", ".join(wrong)) if text]
    return f"{problems[0]} arrived wrong on {len(problems)} ranks" if problems else ""


def main(report: str, *variables: str) -> None:
    """Make the report "census" or "exchange", and print it on rank 0 of the world."""
    found = take_census(*variables) if report == "census" else exchange_buffers()
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 0:
        # One write: several worlds may share the output.
        say(f"{CENSUS_MARK}{json.dumps(found)}")


if __name__ == "__main__":
    protect()
    main(*sys.argv[1:])
