"""Write and read the index of a checkpoint, in which every array is a global one.

The arrays are virtual datasets over the blocks, with file names relative to the index, so the
folder can be moved and any program that reads HDF5 sees whole arrays.
"""

import io
import itertools
import json
import re
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Mapping

import h5py
import numpy as np

from mm3d.arrays.plain_numbers import plain_number
from mm3d.checkpoints.block_files import Block
from mm3d.checkpoints.folder import INDEX_FILE
from mm3d.checkpoints.together import describe_error

FORMAT, BEFORE = "mm3d checkpoint, version 2", "mm3d checkpoint, version 1"
# What follows the HDF5 file in version 2, which HDF5 does not read.
CHECKSUM = "\nCRC-32 of what is before: {:08x}\n"
CHECKSUM_LINE = re.compile(rb"\nCRC-32 of what is before: [0-9a-f]{8}\n\Z")
DROPOUT_STEP = "dropout_step"    # an attribute of the checkpoint and of models with dropout
GROUPS = ("optimizer", "model", "training")    # of attributes, named as the fields of `Index`
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
    """Describe what a checkpoint holds, without the elements."""

    arrays: dict[str, ArrayInfo]    # by path
    blocks: list[Block]
    # Attributes of the checkpoint: the step, and what the caller added.
    attributes: dict[str, Any]
    optimizer: dict[str, Any]    # name and numbers of the optimizer; empty without one
    # What defines the model, `Definition.function`; empty where it is not known.
    model: dict[str, Any]
    # `Definition.training`, and the options of the optimizer as "optimizer.NAME".
    training: dict[str, Any]

    def blocks_by_path(self) -> dict[str, list[Block]]:
        """Return the blocks of each array."""
        found: dict[str, list[Block]] = {name: [] for name in self.arrays}
        for block in self.blocks:
            found[block.path].append(block)
        return found


def index_bytes(index: Index, comment: str) -> bytes:
    """Return an index as the contents of a file, with a checksum of all of it."""
    contents = io.BytesIO()
    with h5py.File(contents, "w", libver="latest", track_order=True) as file:
        file.attrs.update(index.attributes | {"format": FORMAT, "comment": comment})
        for name in GROUPS:
            if found := getattr(index, name):
                file.create_group(name, track_order=True).attrs.update(found)
        by_path = index.blocks_by_path()
        for info in index.arrays.values():
            _create_global_array(file, info, by_path[info.path])
        text = json.dumps({"arrays": [asdict(info) for info in index.arrays.values()],
                           "blocks": [asdict(block) for block in index.blocks]},
                          separators=(",", ":")).encode()
        table = file.create_dataset("blocks", data=np.frombuffer(text, np.uint8))
        table.attrs["content"] = "JSON: where the blocks lie, and CRC-32 of their pieces of rows"
    data = contents.getvalue()
    return data + CHECKSUM.format(zlib.crc32(data)).encode()


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

    Raises OSError when it is missing or damaged, or no index of a checkpoint.
    """
    try:
        data = (folder / INDEX_FILE).read_bytes()
    except FileNotFoundError:
        raise FileNotFoundError(f"{INDEX_FILE} is missing") from None
    found = CHECKSUM_LINE.search(data)
    if found and found[0] != CHECKSUM.format(zlib.crc32(data[:found.start()])).encode():
        raise OSError(f"{INDEX_FILE} is damaged: its checksum differs")
    try:
        index, version, checksum = _parse_index(data)
    except Exception as error:    # of any kind, as the bytes may be any without a checksum
        raise OSError(f"{INDEX_FILE} is damaged: {describe_error(error)}") from error
    if version not in (FORMAT, BEFORE):
        raise OSError(f"{INDEX_FILE} is not of the format {FORMAT!r}, but {version!r}")
    if not (found if version == FORMAT else checksum):
        raise OSError(f"{INDEX_FILE} is damaged: its checksum is missing or differs")
    return index


def _parse_index(data: bytes) -> tuple[Index, Any, bool]:
    """Return an index, its version, and whether the blocks' table has a right checksum."""
    with h5py.File(io.BytesIO(data)) as file:
        attributes = _plain(file.attrs)
        version = attributes.pop("format", None)
        attributes.pop("comment", None)
        groups = {name: _plain(file[name].attrs) if name in file else {} for name in GROUPS}
        text = file["blocks"][()].tobytes()
        checksum = file["blocks"].attrs.get("crc32") == zlib.crc32(text)
    table = json.loads(text)
    arrays = [ArrayInfo(**_tuples(info)) for info in table["arrays"]]
    blocks = [Block(**_tuples(block)) for block in table["blocks"]]
    index = Index({info.path: info for info in arrays}, blocks, attributes, **groups)
    return index, version, checksum


def storable_attributes(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return attributes as numbers and texts of Python, which an index gives back as they are.

    Raises ValueError for the first one that it would not give back.
    """
    plain = {name: _plain_value(value) for name, value in attributes.items()}
    if _come_back(plain):
        return plain
    bad = next(name for name, value in plain.items() if not _come_back({name: value}))
    shown = bad if bad.isidentifier() else repr(bad)
    raise ValueError(f"{shown}={attributes[bad]!r}: a text that UTF-8 has, without NUL, or a "
                     f"number of at most 64 bits would do, and a name that is such a text")


def _plain_value(value: Any) -> Any:
    """Return a number or text as Python's where that is the same; all else as it is."""
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, str):
        return str.__str__(value)    # of a subclass too
    plain = plain_number(value)
    longer = isinstance(value, np.longdouble) and plain != value and value == value
    return value if longer else plain


def _come_back(values: dict[str, Any]) -> bool:
    """Return whether values are numbers and texts of Python that an index gives back."""
    if not {*map(type, values.values())} <= {bool, int, float, str}:
        return False
    contents = io.BytesIO()
    try:
        with h5py.File(contents, "w", libver="latest", track_order=True) as file:
            file.attrs.update(values)
        with h5py.File(contents) as file:
            found = _plain(file.attrs)
    except Exception:    # whatever HDF5 says of what it cannot store
        return False
    return repr(sorted(found.items())) == repr(sorted(values.items()))    # also of NaN


def _tuples(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the same with tuples for lists."""
    return {name: tuple(v) if isinstance(v, list) else v for name, v in values.items()}


def _plain(attributes: Mapping[str, Any]) -> dict[str, Any]:
    """Return HDF5 attributes as numbers and texts of Python."""
    return {name: value.item() if hasattr(value, "item") else value
            for name, value in attributes.items()}
