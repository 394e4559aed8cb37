"""List the arrays of a checkpoint; write and read files of their blocks, with checksums.

A file is HDF5 with contiguous datasets.  A piece is some rows of a block, as many as have about
`PIECE_BYTES`: what is read and compared with its checksum at a time.
"""

import errno
import math
import os
import tempfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Iterator

import h5py
import numpy as np

from mm3d.arrays.backend import Array, DTYPES, host_dtype

PIECE_BYTES = 1 << 18
OPTIMIZER_PREFIX = "optimizer."    # before the names of an optimizer's options


@dataclass(frozen=True)
class StoredArray:
    """Describe a global array, and this rank's block of it."""

    path: str    # its place in the index: "parameters/NAME", or "optimizer/MOMENT/NAME"
    # Global shape as the model stores it, and as `Transformer.state` returns it.
    shape: tuple[int, ...]
    public_shape: tuple[int, ...]
    place: tuple[slice, ...]    # this rank's block of it
    counted: bool    # whether this rank writes the block
    array: Array    # the block, which reading changes
    backend: Any    # copies it to the host and back

    @property
    def dtype(self) -> np.dtype:
        """Return the type of its elements in a file."""
        return host_dtype(self.array)


def stored_arrays(model: Any, optimizer: Any = None) -> list[StoredArray]:
    """Return this rank's arrays of a model and of the moments of its optimizer.

    Raises ValueError for a type that HDF5 does not have, and for the optimizer of another model.
    """
    moments = optimizer.state if optimizer is not None else {}
    if optimizer is not None and [*optimizer.model.trained] != [*model.trained]:
        raise ValueError(f"this {type(optimizer).__name__} changes the parameters of another "
                         f"model: an optimizer of the model itself would do")
    found = []
    for index, t in enumerate(model.trained):
        arrays = {f"parameters/{t.name}": t.master} | {
            f"optimizer/{moment}/{t.name}": arrays[index] for moment, arrays in moments.items()}
        place = t.layout.slices(t.grid, t.shape)
        for path, array in arrays.items():
            if str(host_dtype(array)) not in DTYPES:
                raise ValueError(f"a checkpoint cannot hold {t.name!r} in {host_dtype(array)}: "
                                 f"create the model with master='float32'")
            found.append(StoredArray(path, tuple(t.shape), tuple(t.public_shape), place,
                                     t.counted, array, t.grid.backend))
    return found


def known_facts(model: Any, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the facts that define a model, and those of its training alone; both may be empty."""
    definition = getattr(model, "definition", None)
    function, training = (definition.function, definition.training) if definition else ({}, {})
    options = {} if optimizer is None else optimizer.options()
    return function, training | {OPTIMIZER_PREFIX + name: value for name, value in options.items()}


@dataclass(frozen=True)
class Block:
    """Describe where a block of a global array lies."""

    path: str    # the array's place in the index, and the block's in its file
    # First indices and lengths of the block in the array as stored.
    start: tuple[int, ...]
    shape: tuple[int, ...]
    # The file, and the first byte of the data in it.
    file: str
    offset: int
    checksums: tuple[int, ...]    # CRC-32 of each piece


def rows_of_piece(shape: tuple[int, ...], itemsize: int) -> int:
    """Return how many rows of a block are a piece."""
    return max(1, PIECE_BYTES // max(1, math.prod(shape[1:]) * itemsize))


def write_blocks(path: Path, arrays: list[StoredArray]) -> list[Block]:
    """Write this rank's blocks to a new file, and wait until they are on the disk.

    HDF5 lays out the file without the data in memory: on a full disk it ends in a segmentation
    fault.
    """
    blocks = []
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        with _open_sparse() as layout:
            offsets = _lay_out(layout, arrays)
            os.ftruncate(descriptor, os.fstat(layout.fileno()).st_size)
            for offset, piece in _written_pieces(layout.fileno()):
                write_all(descriptor, piece, offset)
        for stored, offset in zip(arrays, offsets):
            host = stored.backend.host_copy(stored.array)
            start = tuple(s.start for s in stored.place)
            blocks.append(Block(stored.path, start, host.shape, path.name, offset,
                                _write_pieces(descriptor, offset, host)))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    return blocks


def _open_sparse() -> BinaryIO:
    """Open a file without a name, whose pages take memory when they are written."""
    try:
        return open(os.memfd_create("layout"), "w+b")
    except (AttributeError, OSError):    # not of this system, or not allowed
        return tempfile.TemporaryFile()


def _lay_out(layout: BinaryIO, arrays: list[StoredArray]) -> list[int]:
    """Lay out a contiguous dataset for each array in a file; return the offsets of their data."""
    offsets = []
    with h5py.File(layout, "w", libver="latest") as file:
        for stored in arrays:
            group, _, name = stored.path.rpartition("/")
            kind = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
            kind.set_layout(h5py.h5d.CONTIGUOUS)
            kind.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
            kind.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
            space = h5py.h5s.create_simple(tuple(stored.array.shape))
            dataset = h5py.h5d.create(file.require_group(group).id, name.encode(),
                                      h5py.h5t.py_create(stored.dtype), space, kind)
            offsets.append(dataset.get_offset())
    layout.flush()
    return offsets


def _written_pieces(descriptor: int) -> Iterator[tuple[int, bytes]]:
    """Iterate over the parts of a sparse file that were written: offset and bytes of each."""
    end = 0
    while True:
        try:
            start = os.lseek(descriptor, end, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:    # nothing more was written
                return
            if error.errno != errno.EINVAL:
                raise
            for start in range(0, os.fstat(descriptor).st_size, PIECE_BYTES):    # knows no holes
                yield start, os.pread(descriptor, PIECE_BYTES, start)
            return
        end = os.lseek(descriptor, start, os.SEEK_HOLE)
        yield start, os.pread(descriptor, end - start, start)


def _write_pieces(descriptor: int, offset: int, host: np.ndarray) -> tuple[int, ...]:
    """Write a block piece by piece; return the checksums."""
    rows, checksums = rows_of_piece(host.shape, host.itemsize), []
    for row in range(0, len(host), rows):
        piece = memoryview(host[row:row + rows]).cast("B")
        checksums.append(zlib.crc32(piece))
        write_all(descriptor, piece, offset)
        offset += len(piece)
    return tuple(checksums)


def write_all(descriptor: int, data: bytes | memoryview, offset: int) -> None:
    """Write all of `data` at `offset`, which may take several system calls."""
    left = memoryview(data).cast("B")
    while left:
        written = os.pwrite(descriptor, left, offset)
        left, offset = left[written:], offset + written


def read_part(folder: Path, block: Block, place: tuple[slice, ...], out: np.ndarray) -> int:
    """Copy the part of a stored block that lies in `place` to `out`, this rank's block there.

    Pieces are read whole, and compared with their checksums.  Returns the number of elements
    copied; raises OSError when the file is missing, too short, or a checksum differs.
    """
    stops = [a + n for a, n in zip(block.start, block.shape)]
    low = [max(s.start, a) for s, a in zip(place, block.start)]
    high = [min(s.stop, b) for s, b in zip(place, stops)]
    if any(a >= b for a, b in zip(low, high)):
        return 0
    target = tuple(slice(a - s.start, b - s.start) for a, b, s in zip(low, high, place))
    inside = [slice(a - c, b - c) for a, b, c in zip(low, high, block.start)]
    row_bytes = math.prod(block.shape[1:]) * out.itemsize
    rows = rows_of_piece(block.shape, out.itemsize)
    buffer = np.empty((min(rows, block.shape[0]), *block.shape[1:]), out.dtype)
    descriptor = os.open(folder / block.file, os.O_RDONLY)
    try:
        for number in range(inside[0].start // rows, -(-inside[0].stop // rows)):
            first = number * rows
            piece = buffer[:min(rows, block.shape[0] - first)]
            _read_piece(descriptor, block, number, block.offset + first * row_bytes, piece)
            begin, end = max(first, inside[0].start), min(first + len(piece), inside[0].stop)
            begin_out = target[0].start + begin - inside[0].start
            out[(slice(begin_out, begin_out + end - begin), *target[1:])] = piece[
                (slice(begin - first, end - first), *inside[1:])]
    finally:
        os.close(descriptor)
    return math.prod(b - a for a, b in zip(low, high))


def _read_piece(descriptor: int, block: Block, number: int, offset: int,
                piece: np.ndarray) -> None:
    """Read a piece of a block, and compare it with its checksum."""
    left = memoryview(piece).cast("B")
    while left:
        count = os.preadv(descriptor, [left], offset)
        if not count:
            raise OSError(f"{block.file} is too short")
        left, offset = left[count:], offset + count
    if zlib.crc32(memoryview(piece).cast("B")) != block.checksums[number]:
        raise OSError(f"{block.file} is damaged: a checksum of {block.path} differs")
