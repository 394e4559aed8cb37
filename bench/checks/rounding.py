"""A NumPy backend that rounds where a device rounds."""

from contextlib import contextmanager
from typing import Any, Iterator

import numpy as np

from mm3d.arrays import backend as backends
from mm3d.arrays.backend import Array
from mm3d.arrays.numpy_backend import NumpyBackend


class RoundedBackend(NumpyBackend):
    """NumPy with products in TensorFloat-32, if `tf32`.

    Each result of an operation is rounded once to the type of the model, as in the kernels of a
    device; within an operation everything is float32.  It computes references alone and cannot be
    chosen by name.
    """

    def __init__(self, tf32: bool = False) -> None:
        self.xp, self.tf32 = RoundedNumpy(tf32), tf32
        super().__init__()

    def gemm(self, a: Array, b: Array, out: Array, progress: Any = None) -> Array:
        if a.dtype.itemsize == 2:
            return super().gemm(a, b, out)
        out[...] = self.xp.matmul(a, b)
        return out


class RoundedNumpy:
    """NumPy's functions, with products of float32 rounded as on a device."""

    def __init__(self, tf32: bool) -> None:
        self.tf32 = tf32

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """Compute A B."""
        if self.tf32 and a.dtype == np.float32:
            a, b = to_tf32(a), to_tf32(b)
        return np.matmul(a, b)


def to_tf32(a: np.ndarray) -> np.ndarray:
    """Round float32 to the 10 binary places of TensorFloat-32, halves away from zero."""
    bits = np.ascontiguousarray(a).view(np.uint32)
    return ((bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)).view(np.float32)


@contextmanager
def rounding_backend(tf32: bool = False) -> Iterator[RoundedBackend]:
    """Use a `RoundedBackend` for NumPy's arrays within the block."""
    plain, library = backends.get("numpy"), RoundedBackend(tf32)
    backends.get(library)
    try:
        yield library
    finally:
        backends.get(plain)
