"""Read and write files of tensors in the format safetensors with NumPy alone.

A file is the length of a header in 8 bytes, the header in JSON, and the bytes of all tensors.  The
judge needs no more than this, so it needs no package, and tests of it run everywhere.
"""

import json
from pathlib import Path
from typing import Any, Mapping

import numpy as np

from bench.errors import UsageError
from mm3d.arrays import backend as backends

TYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64",
         "I32": "int32", "I16": "int16", "U8": "uint8", "BOOL": "bool"}
LONGEST = 100_000_000    # bytes of a header, as the format says


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """Return all tensors of a file, of their own types, as parts of the mapped file.

    Raises
    ------
    UsageError
        When it is no such file, cut short, or has a name twice or an unknown type.
    OSError
        When it cannot be read.
    """
    size = path.stat().st_size
    start = 8 + int.from_bytes(path.open("rb").read(8), "little")
    if not 8 < start <= min(size, LONGEST + 8):
        raise UsageError(f"{path} is no file of safetensors: its header does not fit into it")
    with path.open("rb") as file:
        file.seek(8)
        try:
            header = json.loads(file.read(start - 8), object_pairs_hook=_distinct)
        except _Twice as error:
            raise UsageError(f"{path}: tensor {str(error)!r} is there twice, once would do"
                             ) from error
        except ValueError as error:
            raise UsageError(f"{path} is no file of safetensors: its header is no JSON"
                             ) from error
    data = np.memmap(path, np.uint8, "r") if size > start else np.empty(start, np.uint8)
    header.pop("__metadata__", None)
    return {name: _tensor(path, name, about, data[start:]) for name, about in header.items()}


class _Twice(ValueError):
    """A name that is twice in an object."""


def _distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON whose names are distinct."""
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise _Twice(name)
        found[name] = value
    return found


def _tensor(path: Path, name: str, about: Mapping[str, Any], data: np.ndarray) -> np.ndarray:
    """Return one tensor of a file's `data`."""
    kind = about["dtype"]
    if kind not in TYPES:
        raise UsageError(f"{path}: tensor {name!r} is in {kind}, which nothing here has: "
                         f"{', '.join(TYPES)} would do")
    first, last = about["data_offsets"]
    dtype = number_type(TYPES[kind])
    if last > len(data) or last - first != dtype.itemsize * int(np.prod(about["shape"])):
        raise UsageError(f"{path} is cut short or damaged at tensor {name!r}")
    return np.frombuffer(data[first:last].tobytes(), dtype).reshape(about["shape"])


def number_type(name: str) -> np.dtype:
    """Return a type of NumPy, or bfloat16 of ml_dtypes; UsageError where that is missing."""
    if name != "bfloat16":
        return np.dtype(name)
    if not backends.get("numpy").more_dtypes:    # which registers the type with NumPy
        raise UsageError("bfloat16 needs the package ml_dtypes: pip install ml_dtypes would do")
    return np.dtype("bfloat16")


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """Write tensors as a file that the package safetensors reads."""
    names = {name: kind for kind, name in TYPES.items()}
    header, start = {}, 0
    for name, a in tensors.items():
        header[name] = {"dtype": names[str(a.dtype)], "shape": list(a.shape),
                        "data_offsets": [start, start + a.nbytes]}
        start += a.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for a in tensors.values():
            file.write(np.ascontiguousarray(a).tobytes())
