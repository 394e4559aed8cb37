"""Read files of tensors by the package safetensors, whole, with errors in one line."""

from pathlib import Path

import numpy as np

from bench.errors import UsageError
from mm3d.arrays import backend as backends
from mm3d.pretrained.files import list_tensors, safetensors

TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
         "I32": "int32", "I16": "int16", "U8": "uint8", "BOOL": "bool"}


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a file, of their own types.

    Raises UsageError when it is no such file, cut short, or has two tensors of a name or an
    unknown type; or the package is missing.
    """
    try:
        for one in list_tensors(path):
            if one.dtype not in TYPES:
                raise UsageError(f"{path}: tensor {one.name!r} is in {one.dtype}, which nothing "
                                 f"here has: {', '.join(TYPES)} would do")
            number_type(TYPES[one.dtype])
        return safetensors().numpy.load_file(path)
    except ImportError as error:
        raise UsageError(str(error)) from error
    except OSError as error:
        raise UsageError(f"{error}; a whole file of safetensors, with each name once, would do"
                         ) from error


def number_type(name: str) -> np.dtype:
    """Return a type of NumPy, or bfloat16 of ml_dtypes; UsageError where that is missing."""
    if name != "bfloat16":
        return np.dtype(name)
    if not backends.get("numpy").more_dtypes:    # which registers the type with NumPy
        raise UsageError("bfloat16 needs the package ml_dtypes: pip install ml_dtypes would do")
    return np.dtype("bfloat16")
