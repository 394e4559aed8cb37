"""What CuPy brings along, for `fakecupy`: cuBLAS, the compiler, and the modules to import."""
import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path

import numpy as np

import fakecupy
from fakecupy import (FakeCupy, Graph, Stream, at, kernel, ml_dtypes, ndarray,
                      seen_by_kernels)

HERE = Path(__file__).parent / "standin"


KINDS = {0: np.float32, 1: np.float64, 2: np.float16, 14: getattr(ml_dtypes, "bfloat16", None)}
CONSTANTS = dict(CUBLAS_COMPUTE_32F=68, CUBLAS_COMPUTE_64F=70, CUBLAS_COMPUTE_32F_FAST_TF32=77,
                 CUBLAS_GEMM_DEFAULT=-1)
INTERNAL_ERROR = 14


class Handle:
    """What cuBLAS remembers: a stream, and memory to work in."""

    every: dict[int, "Handle"] = {}

    def __init__(self) -> None:
        self.stream, self.workspace, self.mode = 0, None, 0
        self.every[len(self.every) + 1] = self

    def set_stream(self, stream: int) -> None:
        self.stream, self.workspace = stream, None    # as cublasSetStream does


def compiled(source: str, *more: str) -> ctypes.CDLL:
    """A library made of this text once, by g++ with these options."""
    text = " ".join(more) + source
    name = hashlib.sha256(text.encode()).hexdigest()[:16]
    library = Path(tempfile.gettempdir()) / f"mm3d-standin-{os.getuid()}-{name}.so"
    if not library.exists():
        made = library.with_suffix(f".{os.getpid()}")
        subprocess.run(["g++", *more, "-O0", "-w", "-shared", "-fPIC", "-", "-o", str(made)],
                       input=source, text=True, check=True)
        os.replace(made, library)
    return ctypes.CDLL(str(library))


@ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.POINTER(ctypes.c_longlong))
def answer(name: bytes, arguments) -> int:
    """What libcublas does when it is called; nothing of it minds a capture."""
    try:
        handle = Handle.every[arguments[0]]
        if name == b"stream":
            handle.set_stream(arguments[1])
        elif name == b"mode":
            handle.mode = arguments[1]
        elif name == b"workspace":
            assert arguments[1] % 256 == 0 or fakecupy.Memory.driver is None
            handle.workspace = at(arguments[1], np.uint8, arguments[2])
        else:
            assert Stream.every[handle.stream] is Stream.computing
            assert handle.workspace is not None, "a product would allocate"
            assert handle.mode == 16, "a part of a sum would be rounded to the result's type"
            gemms_ex(*arguments[1:23])
    except Exception:
        traceback.print_exc()
        return INTERNAL_ERROR
    return 0


def gemms_ex(turn_a, turn_b, m, n, k, alpha, a, a_type, step_a, next_a, b, b_type, step_b, next_b,
             beta, c, c_type, step_c, next_c, count, sums, algorithm) -> None:
    """C = A B + beta C of matrices stored by columns, as cuBLAS computes it, on the computing
    stream."""
    wide = np.float64 if sums == CONSTANTS["CUBLAS_COMPUTE_64F"] else np.float32
    one, add = [np.ctypeslib.as_array((np.ctypeslib.as_ctypes_type(wide) * 1).from_address(p))[0]
                for p in (alpha, beta)]
    assert one == 1 and add in (0, 1) and algorithm == CONSTANTS["CUBLAS_GEMM_DEFAULT"]

    def matrices(pointer, kind, rows, columns, step, following):
        assert step >= rows
        flat = at(pointer, KINDS[kind], following * (count - 1) + step * (columns - 1) + rows,
                  True)
        return np.lib.stride_tricks.as_strided(
            flat, (count, rows, columns),
            (following * flat.itemsize, flat.itemsize, step * flat.itemsize))

    A = matrices(a, a_type, *((k, m) if turn_a else (m, k)), step_a, next_a)
    B = matrices(b, b_type, *((n, k) if turn_b else (k, n)), step_b, next_b)
    A, B = A.swapaxes(1, 2) if turn_a else A, B.swapaxes(1, 2) if turn_b else B
    C = matrices(c, c_type, m, n, step_c, next_c)

    def work() -> None:
        product = A.astype(wide) @ B.astype(wide)
        C[...] = product + C if add else product
    kernel(work)


def binding() -> types.ModuleType:
    """CuPy's binding of cuBLAS, whose calls set the stream first, and so refuse in a capture."""
    library = compiled((HERE / "cublas.c").read_text(), "-x", "c")
    library.standin_answer(answer)
    module = types.ModuleType("cublas")
    module.__file__ = library._name

    def create() -> int:
        Handle()
        return len(Handle.every)

    def setStream(handle: int, stream: int) -> None:
        if Graph.captured is not None:
            raise NotImplementedError("cuBLAS calls while a stream is captured")
        Handle.every[handle].set_stream(stream)

    def gemmStridedBatchedEx(handle: int, *arguments) -> None:
        setStream(handle, Stream.computing.ptr)
        gemms_ex(*arguments)

    module.__dict__.update(CONSTANTS, create=create, setStream=setStream,
                           gemmStridedBatchedEx=gemmStridedBatchedEx)
    return module


TOLD_STRIDES = ("copy_rows", "softmax_forward", "softmax_recompute")    # of logarithms


class RawModule:
    """CUDA C++ compiled for this processor: every block's threads take turns (see host.h)."""

    launched: list[str] = []    # the kernels of a test, in order

    def __init__(self, code: str, options: tuple[str, ...], name_expressions: list[str]) -> None:
        self.index = {name: n for n, name in enumerate(name_expressions)}
        launchers = "".join(f'extern "C" void launch{n}(Dim g, Dim b, void **a) '
                            f"{{ run({name}, g, b, a); }}\n"
                            for name, n in self.index.items())
        # What the source includes is part of what it is known by.
        header = (HERE / "host.h").read_text()
        self.library = compiled(f"{header}\n{code}\n{launchers}", "-std=c++17", "-x", "c++")

    def get_function(self, name: str):
        function = getattr(self.library, f"launch{self.index[name]}")

        def launch(grid, block, arguments) -> None:
            self.launched.append(name.partition("<")[0])
            # A kernel that is given a table of addresses follows them, too.
            tables = [seen_by_kernels(a.shell) if getattr(a, "dtype", 0) == np.uint64 else None
                      for a in arguments]
            values = [np.array(a.data.ptr and (a.shell if table is None else table).ctypes.data,
                               np.uint64)
                      if isinstance(a, ndarray) else np.asarray(a)
                      for a, table in zip(arguments, tables)]
            for a in arguments:    # only these kernels are told strides
                assert (a.flags.c_contiguous or name.partition("<")[0] in TOLD_STRIDES
                        if isinstance(a, ndarray) else hasattr(a, "dtype") or type(a) is int)
            pointers = (ctypes.c_void_p * len(values))(*(v.ctypes.data for v in values))

            def work(values=values, tables=tables) -> None:    # which the pointers point to
                function(_Dim(*(*grid, 1, 1)[:3]), _Dim(*(*block, 1, 1)[:3]), pointers)
                for a in arguments:
                    if isinstance(a, ndarray):
                        a.memory.write()
            kernel(work)
        return types.SimpleNamespace(kernel=launch)


class _Dim(ctypes.Structure):
    _fields_ = [(c, ctypes.c_uint) for c in "xyz"]


def modules(gpus: int = 1) -> dict[str, types.ModuleType]:
    """What to put into `sys.modules`."""
    cublas, nvrtc = binding(), types.ModuleType("nvrtc")
    nvrtc.getVersion = lambda: (13, 0)
    libs = types.ModuleType("cupy_backends.cuda.libs")
    libs.cublas, libs.nvrtc = cublas, nvrtc
    cupy = FakeCupy(gpus)
    cupy.RawModule = RawModule
    return {"cupy": cupy, "cupy_backends.cuda.libs": libs,
            "cupy_backends.cuda": types.ModuleType("cupy_backends.cuda"),
            "cupy_backends": types.ModuleType("cupy_backends"),
            "cupy_backends.cuda.libs.cublas": cublas, "cupy_backends.cuda.libs.nvrtc": nvrtc}


def replace_cupy(monkeypatch, gpus: int = 1) -> None:
    """Have the stand-in imported as CuPy for one test."""
    RawModule.launched.clear()
    for name, module in modules(gpus).items():
        monkeypatch.setitem(sys.modules, name, module)
