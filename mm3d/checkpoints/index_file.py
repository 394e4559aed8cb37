"""Write and read the index of a checkpoint, in which every array is a global one.

The arrays are virtual datasets over the blocks, with file names relative to the index, so the
folder can be moved and any program that reads HDF5 sees whole arrays.
"""

import itertools
import json
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Mapping

import h5py
import numpy as np

from mm3d.checkpoints.block_files import Block

NAME, FORMAT = "index.h5", "mm3d checkpoint, version 1"
DROPOUT_STEP = "dropout_step"    # an attribute of the checkpoint and of models with dropout
RESERVED = ("step", "format", "comment", DROPOUT_STEP)    # attributes that are not the caller's


@dataclass(frozen=True)
class ArrayInfo:
    """Describe a global array: its place, shape as stored and in public, and type."""

    path: str
    shape: tuple[int, ...]
    public_shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class Index:
    """What a checkpoint holds, without the elements.

    Attributes
    ----------
    arrays : dict of str to ArrayInfo
        By path.
    blocks : list of Block
        All blocks of all arrays.
    attributes : dict
        Those of the whole: the step, and what the caller added.
    optimizer : dict
        Name and numbers of the optimizer; empty without one.
    """

    arrays: dict[str, ArrayInfo]
    blocks: list[Block]
    attributes: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)


def write_index(path: Path, index: Index, comment: str) -> None:
    """Write an index to a new file."""
    with h5py.File(path, "w", libver="latest", track_order=True) as file:
        file.attrs.update(index.attributes | {"format": FORMAT, "comment": comment})
        if index.optimizer:
            file.create_group("optimizer", track_order=True).attrs.update(index.optimizer)
        by_path: dict[str, list[Block]] = {name: [] for name in index.arrays}
        for block in index.blocks:
            by_path[block.path].append(block)
        for info in index.arrays.values():
            _create_global_array(file, info, by_path[info.path])
        text = json.dumps({"arrays": [asdict(info) for info in index.arrays.values()],
                           "blocks": [asdict(block) for block in index.blocks]},
                          separators=(",", ":")).encode()
        table = file.create_dataset("blocks", data=np.frombuffer(text, np.uint8))
        table.attrs["content"] = "JSON: where the blocks lie, and CRC-32 of their pieces of rows"
        table.attrs["crc32"] = zlib.crc32(text)


def _create_global_array(file: h5py.File, info: ArrayInfo, blocks: list[Block]) -> None:
    """Create a virtual dataset of the public shape over the blocks; NaN where one is missing."""
    layout = h5py.VirtualLayout(info.public_shape, info.dtype)
    lead = len(info.public_shape) - 1
    middle, last = info.shape[lead:-1], info.shape[-1]
    for block in blocks:
        source = h5py.VirtualSource(block.file, block.path, block.shape, info.dtype)
        rows = tuple(slice(a, a + n) for a, n in zip(block.start[:lead], block.shape[:lead]))
        # Dimensions that are one in public: a slice of the last one for each place in the others.
        for place in itertools.product(*map(range, block.shape[lead:-1])):
            at = [a + n for a, n in zip(block.start[lead:-1], place)]
            first = int(np.ravel_multi_index(at, middle)) * last if middle else 0
            first += block.start[-1]
            layout[(*rows, slice(first, first + block.shape[-1]))] = source[
                (*(slice(0, n) for n in block.shape[:lead]), *place, slice(0, block.shape[-1]))]
    file.create_virtual_dataset(info.path, layout, fillvalue=np.nan)


def read_index(folder: Path) -> Index:
    """Read the index of a checkpoint.

    Raises
    ------
    OSError
        When it is missing or damaged, or no index of a checkpoint.
    """
    try:
        with h5py.File(folder / NAME) as file:
            attributes = _plain(file.attrs)
            optimizer = _plain(file["optimizer"].attrs) if "optimizer" in file else {}
            text, checksum = file["blocks"][()].tobytes(), file["blocks"].attrs["crc32"]
    except FileNotFoundError:
        raise FileNotFoundError(f"{NAME} is missing") from None
    except (OSError, KeyError, RuntimeError) as error:
        raise OSError(f"{NAME} is damaged: {str(error).splitlines()[0]}") from None
    if attributes.pop("format", None) != FORMAT or zlib.crc32(text) != checksum:
        raise OSError(f"{NAME} is damaged, or not of the format {FORMAT!r}")
    attributes.pop("comment", None)
    table = json.loads(text)
    arrays = [ArrayInfo(**_tuples(info)) for info in table["arrays"]]
    return Index({info.path: info for info in arrays},
                 [Block(**_tuples(block)) for block in table["blocks"]], attributes, optimizer)


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same with tuples for lists."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return HDF5 attributes as numbers and texts of Python."""
    return {name: value.item() if hasattr(value, "item") else value
            for name, value in attributes.items()}
