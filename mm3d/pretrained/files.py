"""Find the tensors of a folder of safetensors files, and check them before anything is read."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mm3d.arrays import backend as backends
from mm3d.hugging_face.names import canonical

INDEX, ONE = "model.safetensors.index.json", "model.safetensors"
TYPES = ("F64", "F32", "F16")    # of elements, as files call them
MORE = "BF16"                    # with the package ml_dtypes


def safetensors() -> Any:
    """Return the library; ImportError saying how to get it."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError("the package safetensors is not installed: pip install "
                          "'mm3d[pretrained]' would do") from error
    return safetensors


@dataclass(frozen=True)
class Tensor:
    """State the file, name, shape and type of a tensor; the type is as the file calls it."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: str


def find_tensors(folder: Path, kind: str) -> dict[str, Tensor]:
    """Return all tensors of a folder of the family `kind` by their full names, without buffers.

    The folder has ``model.safetensors``, or several files and ``model.safetensors.index.json``.
    Raises OSError when a file is missing or damaged; ValueError when a tensor is there twice, or
    not where the index says, or of an unknown type.
    """
    places = _places(folder)
    found: dict[str, Tensor] = {}
    for file in dict.fromkeys(places.values()):
        for one in list_tensors(file):
            full = canonical(kind, one.name)
            if full is None:
                continue
            if full in found:
                raise ValueError(f"{folder}: tensor {full!r} is there twice: as "
                                 f"{found[full].name!r} in {found[full].file.name} and as "
                                 f"{one.name!r} in {file.name}")
            found[full] = one
    # Asking for them makes NumPy know them.
    known = TYPES + (MORE,) * bool(backends.get("numpy").more_dtypes)
    for one in found.values():
        if one.name in places and places[one.name] != one.file:
            raise ValueError(f"{folder}: tensor {one.name!r} is in {one.file.name}, and not in "
                             f"{places[one.name].name} as the index says")
        if one.dtype not in known:
            remedy = "pip install ml_dtypes" if one.dtype == MORE else f"{', '.join(known)}"
            raise ValueError(f"{folder}: tensor {one.name!r} is in {one.dtype}, which nothing "
                             f"here has: {remedy} would do")
    known = {None, *found}
    lost = [name for name in places if name and canonical(kind, name) not in known]
    if lost:
        raise ValueError(f"{folder}: tensor {lost[0]!r} is in the index, and not in "
                         f"{places[lost[0]].name}")
    return found


def _places(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor that an index names; of "" where there is one file alone."""
    if (folder / INDEX).exists():
        try:
            every = json.loads((folder / INDEX).read_bytes())["weight_map"]
            files = {name: folder / file for name, file in every.items()}
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(f"{folder / INDEX} is no index of safetensors files") from error
        lost = sorted({file.name for file in files.values() if not file.is_file()})
        if lost:
            raise FileNotFoundError(f"{folder}: {len(lost)} of {len({*files.values()})} files "
                                    f"that the index names are not there: {', '.join(lost)}")
        return files
    if (folder / ONE).is_file():
        return {"": folder / ONE}
    raise FileNotFoundError(f"{folder} has no {ONE} and no {INDEX}: a folder of a model of "
                            f"Hugging Face would do, in safetensors")


def list_tensors(file: Path) -> list[Tensor]:
    """Return the tensors that the header of a file names; OSError for a damaged one."""
    library = safetensors()
    try:
        with library.safe_open(file, "np") as opened:
            parts = [(name, opened.get_slice(name)) for name in opened.keys()]
            return [Tensor(file, name, tuple(part.get_shape()), part.get_dtype())
                    for name, part in parts]
    except library.SafetensorError as error:
        raise OSError(f"{file} cannot be read: {error}") from error


def check_tensors(folder: Path, found: Mapping[str, Tensor],
                  wanted: Mapping[str, tuple[int, ...]], longer: Mapping[str, int]) -> None:
    """Check the tensors that were found in a folder against the shapes that a model wants.

    Those of `longer`, as of positions, may have more rows, at most as many as it says.  Raises
    ValueError, naming the first, when some are missing, too many, or of another shape.
    """
    for what, names in (("missing", [*(wanted.keys() - found.keys())]),
                        ("not of this model", [*(found.keys() - wanted.keys())])):
        if names:
            more = f" and {len(names) - 1} more" if len(names) > 1 else ""
            raise ValueError(f"{folder}: tensor {min(names)!r}{more}: {what}")
    for name, shape in wanted.items():
        there = found[name].shape
        rows = longer.get(name, 0)
        if there != shape and not (
                there and there[1:] == shape[1:] and shape[0] <= there[0] <= rows):
            raise ValueError(f"{folder}: tensor {name!r} has the shape {there}, not {shape}")
