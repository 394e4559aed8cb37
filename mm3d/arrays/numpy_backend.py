"""Provide NumPy's arrays: their memory is reused, and their kernels work in blocks."""

import numpy as np

from mm3d.arrays.backend import Backend
from mm3d.arrays.numpy_kernels import Kernels
from mm3d.arrays.pool import Pool


class NumpyBackend(Backend):
    """Make NumPy arrays in memory from a `Pool`."""

    def __init__(self) -> None:
        self.pool = Pool()
        if self.xp is np:
            self.kernels = Kernels(self)
