"""Run under a CUDA-aware MPI: the device transport on memory that no host instruction may touch.

Every collective, even and uneven, then one training step of a model of each scheme, and of some
whose communication goes on meanwhile, beside the serial one.  The last line says what travelled
between processes as the driver saw it.
"""
import ctypes
import math
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import fakecupy  # noqa: E402
import fakelibs  # noqa: E402

driver = ctypes.CDLL("libcuda.so.1", ctypes.RTLD_GLOBAL)
driver.standin_memory.restype = ctypes.c_void_p
driver.standin_copied_between_processes.restype = ctypes.c_long
fakecupy.Memory.driver = driver
sys.modules |= fakelibs.modules()
os.environ |= {"MM3D_BACKEND": "cupy", "MM3D_TRANSPORT": "device"}

import mm3d  # noqa: E402  (makes the context, then starts MPI)
from mm3d import selftest  # noqa: E402
from mm3d.arrays import backend  # noqa: E402
from mm3d.transport import on_devices  # noqa: E402
from models import SIZES, SOME, Parallelism, data, differences, serial, train  # noqa: E402
from mpi4py import MPI  # noqa: E402


OVERLAPS = [Parallelism("3d", grid, {"overlap": True})
            for grid in ((2, 2, 1), (1, 2, 2), (2, 2, 2))]


def main() -> list[str]:
    comm = MPI.COMM_WORLD
    backend.get("cupy").kernels = None    # they have tests of their own, and take long here
    wrong = ([] if on_devices.claims_cuda_support() else
             ["the MPI does not say that it reads device memory"])
    grid = mm3d.Grid(comm, x=comm.size)
    assert grid.x.transport.name == "device"
    wrong += selftest.failed_collectives(grid, (1, 700, 30000), ("float32", "float16"))
    grid.free()
    overlaps = [one for one in OVERLAPS if math.prod(one.grid) == comm.size]
    for parallelism in (*SOME[comm.size], *overlaps):
        with parallelism.on(comm, "cupy") as scheme:
            model = mm3d.Transformer(scheme, **SIZES["uneven"], dtype="float64", causal=True)
            results = train(model, *data(**SIZES["uneven"]))
            found = differences(model, results, serial("uneven", True), 1e-12, 1e-11)
            wrong += [f"{parallelism.name} {parallelism.grid} {parallelism.options}: {text}"
                      for text in found]
    return sorted({text for one in comm.allgather(wrong) for text in one})


failed = main()
between = MPI.COMM_WORLD.reduce(driver.standin_copied_between_processes())
if MPI.COMM_WORLD.rank == 0:
    print(*failed, f"bytes between processes: {between}", sep="\n", flush=True)
sys.exit(min(1, len(failed)))
