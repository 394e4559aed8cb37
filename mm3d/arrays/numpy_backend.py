"""Provide NumPy's arrays: their memory is reused, and their kernels work in blocks."""

import contextlib
import fcntl
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from mm3d.arrays.backend import Backend, setting
from mm3d.arrays.numpy_kernels import Kernels
from mm3d.arrays.pool import Pool


class NumpyBackend(Backend):
    """Make NumPy arrays in memory from a `Pool`; use Numba, if it is installed, for kernels.

    `compiler` is name and version of what compiles kernels; "" for those of NumPy, also where the
    variable ``MM3D_KERNELS`` is "numpy".  Raises ValueError when that is anything else.
    """

    def __init__(self) -> None:
        self.pool = Pool()
        self.compiler = _find_compiler() if self.xp is np else ""
        self._is_plain = self.xp is np    # later it may be observed

    @cached_property
    def kernels(self) -> Any:
        """The kernels, compiled with the first use of one."""
        if not self.compiler:
            return Kernels(self) if self._is_plain else None
        import numba    # noqa: F401, by all processes at once; one of them compiles
        with open(Path(__file__).with_name("compiled.py"), "rb") as source:
            with contextlib.suppress(OSError):    # of file systems without locks
                fcntl.flock(source, fcntl.LOCK_EX)
            from mm3d.arrays.compiled import CompiledKernels
        return CompiledKernels(self)

    def describe_device(self) -> dict[str, str | int]:
        """Return what compiles elementwise kernels, for records; {} for those of NumPy."""
        return {"elementwise_version": self.compiler} if self.compiler else {}


def _find_compiler() -> str:
    """Return name and version of Numba, without importing it; "" if it is not to be used."""
    if setting("MM3D_KERNELS", ["numpy"]):
        return ""
    try:
        return f"numba {version('numba')}"
    except PackageNotFoundError:
        return ""
