"""Keep a file in memory, without the parts that are never written."""

import io
from typing import Any

PAGE = 4096


class SparseFile(io.RawIOBase):
    """Hold a file of any size by the pages that are written; bytes between them are zero.

    HDF5 lays out files in it, without their data: on a full disk HDF5 itself ends in a
    segmentation fault.

    Attributes
    ----------
    size : int
        Bytes of the whole file.
    """

    def __init__(self) -> None:
        self._pages: dict[int, bytearray] = {}
        self._place = self.size = 0

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._place = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._place,
                                io.SEEK_END: self.size}[whence]
        return self._place

    def tell(self) -> int:
        return self._place

    def truncate(self, size: int | None = None) -> int:
        self.size = self._place if size is None else size
        return self.size

    def readinto(self, buffer: Any) -> int:
        left = memoryview(buffer).cast("B")[:max(0, self.size - self._place)]
        count = len(left)
        while left:
            number, start = divmod(self._place, PAGE)
            part = self._pages.get(number, bytes(PAGE))[start:start + len(left)]
            left[:len(part)] = part
            left, self._place = left[len(part):], self._place + len(part)
        return count

    def write(self, data: Any) -> int:
        left = memoryview(data).cast("B")
        count = len(left)
        while left:
            number, start = divmod(self._place, PAGE)
            page = self._pages.setdefault(number, bytearray(PAGE))
            part = left[:PAGE - start]
            page[start:start + len(part)] = part
            left, self._place = left[len(part):], self._place + len(part)
        self.size = max(self.size, self._place)
        return count

    def pieces(self) -> list[tuple[int, bytes]]:
        """Return the pages that were written, as the offset of each and its bytes."""
        return [(number * PAGE, bytes(page[:self.size - number * PAGE]))
                for number, page in sorted(self._pages.items()) if number * PAGE < self.size]
