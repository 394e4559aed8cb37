"""What CuPy brings along, for `fakecupy`: cuBLAS, the compiler, and the modules to import."""
import ctypes
import hashlib
import os
import subprocess
import tempfile
import types
from pathlib import Path

import numpy as np

from fakecupy import FakeCupy, at, kernel, ndarray

HERE = Path(__file__).parent / "standin"


def gemms_ex(handle, turn_a, turn_b, m, n, k, alpha, a, a_type, step_a, next_a, b, b_type, step_b,
             next_b, beta, c, c_type, step_c, next_c, count, sums, algorithm) -> None:
    """C = A B of matrices stored by columns, as cuBLAS computes it, on the computing stream."""
    wide = {"CUBLAS_COMPUTE_64F": np.float64}.get(sums, np.float32)
    scalars = [np.ctypeslib.as_array((np.ctypeslib.as_ctypes_type(wide) * 1).from_address(p))[0]
               for p in (alpha, beta)]
    assert scalars == [1, 0]

    def matrices(pointer, kind, rows, columns, step, following):
        assert step >= rows
        flat = at(pointer, kind, following * (count - 1) + step * (columns - 1) + rows, True)
        return np.lib.stride_tricks.as_strided(
            flat, (count, rows, columns),
            (following * flat.itemsize, flat.itemsize, step * flat.itemsize))

    A = matrices(a, a_type, *((k, m) if turn_a else (m, k)), step_a, next_a)
    B = matrices(b, b_type, *((n, k) if turn_b else (k, n)), step_b, next_b)
    A, B = A.swapaxes(1, 2) if turn_a else A, B.swapaxes(1, 2) if turn_b else B
    C = matrices(c, c_type, m, n, step_c, next_c)

    def work() -> None:
        C[...] = A.astype(wide) @ B.astype(wide)
    kernel(work)


class RawModule:
    """CUDA C++ compiled for this processor: every block's threads take turns (see host.h)."""

    def __init__(self, code: str, options: tuple[str, ...], name_expressions: list[str]) -> None:
        self.index = {name: n for n, name in enumerate(name_expressions)}
        launchers = "".join(f'extern "C" void launch{n}(Dim g, Dim b, void **a) '
                            f"{{ run({name}, g, b, a); }}\n"
                            for name, n in self.index.items())
        source = f'#include "{HERE}/host.h"\n{code}\n{launchers}'
        name = hashlib.sha256((source + (HERE / "host.h").read_text()).encode()).hexdigest()[:16]
        library = Path(tempfile.gettempdir()) / f"mm3d-kernels-{os.getuid()}-{name}.so"
        if not library.exists():
            made = library.with_suffix(f".{os.getpid()}")
            subprocess.run(["g++", "-std=c++17", "-O0", "-w", "-shared", "-fPIC", "-x", "c++", "-",
                            "-o", str(made)], input=source, text=True, check=True)
            os.replace(made, library)
        self.library = ctypes.CDLL(str(library))

    def get_function(self, name: str):
        function = getattr(self.library, f"launch{self.index[name]}")

        def launch(grid, block, arguments) -> None:
            values = [np.array(a.data.ptr and a.shell.ctypes.data, np.uint64)
                      if isinstance(a, ndarray) else np.asarray(a) for a in arguments]
            for a in arguments:
                assert a.flags.c_contiguous if isinstance(a, ndarray) else hasattr(a, "dtype")
            pointers = (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values))

            def work(values=values) -> None:    # which the pointers point to
                function(_Dim(*(*grid, 1, 1)[:3]), _Dim(*(*block, 1, 1)[:3]), pointers)
                for a in arguments:
                    if isinstance(a, ndarray):
                        a.memory.write()
            kernel(work)
        return launch


class _Dim(ctypes.Structure):
    _fields_ = [(c, ctypes.c_uint) for c in "xyz"]


def modules(gpus: int = 1) -> dict[str, types.ModuleType]:
    """What to put into `sys.modules`."""
    cublas = types.ModuleType("cublas")
    cublas.__getattr__ = lambda name: name    # constants stand for themselves
    cublas.setPointerMode = lambda handle, mode: None
    cublas.gemmStridedBatchedEx = gemms_ex
    libs = types.ModuleType("cupy_backends.cuda.libs")
    libs.cublas = cublas
    cupy = FakeCupy(gpus)
    cupy.RawModule = RawModule
    return {"cupy": cupy, "cupy_backends.cuda.libs": libs,
            "cupy_backends.cuda": types.ModuleType("cupy_backends.cuda"),
            "cupy_backends": types.ModuleType("cupy_backends"),
            "cupy_backends.cuda.libs.cublas": cublas}
