"""What every rank of a job sees: the child that ``bench doctor`` starts under the launcher.

``python -m bench.doctor.census census`` prints one line of JSON for each world of ranks that comes
about, ``python -m bench.doctor.census exchange`` sends device buffers around and says whether they
arrived.  An MPI that cannot read them may crash, which is why this is a program of its own.
"""

import json
import os
import sys
from typing import Any

import numpy as np

import mm3d  # noqa: F401  (before MPI starts: sets the variables that it reads)
from bench.instruments import host
from mm3d import launcher

MARK = "mm3d-census "
WORDS = 1 << 16    # of an exchange: beyond what is sent eagerly, below what takes time


def gpus() -> tuple[list[str], str]:
    """The GPUs that this process can use, by bus address, and who says so.

    Where no CUDA library can tell, the numbers in CUDA_VISIBLE_DEVICES stand for them.
    """
    try:
        import cupy
        count = cupy.cuda.runtime.getDeviceCount()
        return [str(cupy.cuda.Device(i).pci_bus_id) for i in range(count)], "CUDA"
    except (ImportError, RuntimeError):
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
        return [name for name in visible.split(",") if name.strip()], "CUDA_VISIBLE_DEVICES"


def best_kernels() -> str:
    """Vector instructions of this processor that BLAS kernels should use; "" where unknown."""
    flags = host.processor_flags()
    return next((name for name in ("avx512f", "avx2") if name in flags), "")


def census() -> list[dict[str, Any]]:
    """What each rank of this world sees, in rank order (every rank calls it)."""
    from mpi4py import MPI
    from bench.instruments.clock import Clock
    from mm3d.transport.nodes import node_numbers
    comm = MPI.COMM_WORLD
    nodes = node_numbers(comm)
    node = nodes[comm.rank]
    seen, source = gpus()
    clock = Clock(comm)
    mine = {"size": comm.size, "node": nodes.index(node),    # known by its first rank
            "local_rank": nodes[:comm.rank].count(node), "ranks_on_node": nodes.count(node),
            "cores": launcher.cores(), "gpus": seen,
            "gpu_source": source, "mpi": host.mpi_name(MPI.Get_library_version()),
            "best_kernels": best_kernels(), **host.describe_blas(),
            "clock_resolution": clock.resolution(), "clock_offset_error": clock.offset_error}
    return comm.allgather(mine)


def exchange() -> str:
    """Move device buffers by the calls of `mm3d.transport.device.DeviceTransport`; "" when all
    arrived, else what is wrong.

    These are all-gather(v), all-to-all(v), broadcast and messages between two ranks.  No reduction
    is among them: mm3d sums on the device.
    """
    import cupy
    # The device's context has to exist when MPI starts, and on this rank's own GPU.
    count = cupy.cuda.runtime.getDeviceCount()
    cupy.cuda.Device(launcher.local_rank() % count).use()
    cupy.zeros(1)
    from mpi4py import MPI
    comm = MPI.COMM_WORLD
    size, rank = comm.size, comm.rank
    mine, source = cupy.full(WORDS, rank + 1, dtype="float32"), (rank - 1) % size
    gathered, dealt = (cupy.zeros(size * WORDS, dtype="float32") for _ in range(2))
    sent, passed = cupy.full(WORDS, size, dtype="float32"), cupy.zeros(WORDS, dtype="float32")
    if rank:
        sent = cupy.zeros(WORDS, dtype="float32")
    cupy.cuda.Device().synchronize()
    lengths = [WORDS] * size
    blocks = lengths, [WORDS * of for of in range(size)]
    comm.Allgatherv(mine, [gathered, blocks])
    # Every rank sends the one block that it has, to each.
    comm.Alltoallv([mine, (lengths, [0] * size)], [dealt, blocks])
    comm.Bcast(sent, 0)
    requests = [comm.Irecv(passed, source), comm.Isend(mine, (rank + 1) % size)]
    MPI.Request.Waitall(requests)
    ranks = np.repeat(np.arange(1, size + 1), WORDS)
    wrong = [name for name, got, expected in (
        ("an all-gather", gathered, ranks), ("an all-to-all", dealt, ranks),
        ("a broadcast", sent, size), ("a message", passed, source + 1))
        if not (cupy.asnumpy(got) == expected).all()]
    problems = [text for text in comm.allgather(", ".join(wrong)) if text]
    return f"{problems[0]} arrived wrong on {len(problems)} ranks" if problems else ""


def main(what: str) -> None:
    """Print what was found, from rank 0 of the world."""
    found = census() if what == "census" else exchange()
    from mpi4py import MPI
    if MPI.COMM_WORLD.rank == 0:
        # One write: several worlds may share the output.
        sys.stdout.write(f"{MARK}{json.dumps(found)}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(*sys.argv[1:])
