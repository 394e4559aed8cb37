"""Keep track of the regions of shared memory, in use and idle.

The list is the same on all ranks, since all make the same calls in the same order.  So regions
are taken, and given back to the system, without messages.
"""

import mmap
from typing import Iterable

from mm3d.arrays.pool import IdleMemory, size_class

MemoryPlace = tuple[mmap.mmap, int]


class Regions:
    """Take and drop regions of the segments of memory that so many `ranks` share.

    New ones are made in `segment`, whose first free byte is `start`.
    """

    def __init__(self, ranks: int, segment: mmap.mmap, start: int) -> None:
        self.ranks, self.idle, self.in_use = ranks, IdleMemory(), 0
        self._sizes: list[int] = []
        self._users: list[int] = []                 # number of ranks that still use each
        self._hollow: dict[int, list[int]] = {}     # regions given back to the system, by size
        self.places: list[MemoryPlace] = []         # segment and first byte of each
        self.emptied: list[int] = []    # given back to the system, free from the next barrier on
        self.trial: list[tuple] = []    # taken on trial, and how to undo each
        self.add(segment, start)

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, segment: mmap.mmap, start: int = 0) -> None:
        """Make new regions in another segment."""
        self._segment, self._used = segment, start

    def take(self, length: int, trial: bool = False) -> int | None:
        """Take a region of at least `length` bytes; None if the segment has no room for a new one.

        With `trial`, `settle` keeps the region or undoes taking it.
        """
        size = size_class(length)
        found, hollow = self.idle.get(size), self._hollow.get(size)
        if found is not None:
            region, undo = found[1], (self.idle.undo_get, size, found)
        elif hollow:
            region = hollow.pop()
            undo = (hollow.append, region)
        elif self._used + size <= len(self._segment):
            region, undo = self._new(size), (self._forget,)
        else:
            return None
        self._users[region] = self.ranks
        self.in_use += size
        if trial:
            self.trial.append((region, *undo))
        return region

    def settle(self, keep: bool) -> None:
        """Keep the regions taken on trial, or undo their taking."""
        while self.trial:
            region, undo, *arguments = self.trial.pop()
            if not keep:
                self.in_use -= self._sizes[region]
                self._users[region] = 0
                undo(*arguments)

    def _new(self, size: int) -> int:
        self.places.append((self._segment, self._used))
        self._sizes.append(size)
        self._users.append(0)
        self._used += size
        return len(self._sizes) - 1

    def _forget(self) -> None:
        """Undo the latest `_new`."""
        self._used -= self._sizes.pop()
        self.places.pop()
        self._users.pop()

    def drop(self, given_back: Iterable[int]) -> None:
        """Count that a rank has given regions back; one is idle when all ranks have."""
        for region in given_back:
            self._users[region] -= 1
            if not self._users[region]:
                self.idle.put(self._sizes[region], region)
                self.in_use -= self._sizes[region]

    def take_surplus(self) -> list[tuple[mmap.mmap, int, int]]:
        """Return segment, start and size of idle regions that go back to the system at a barrier.

        One rank does it while others may be ahead, so they are taken again after the next one.
        """
        found = self.idle.take_surplus()
        for region in self.emptied:
            self._hollow.setdefault(self._sizes[region], []).append(region)
        self.emptied = found
        return [(*self.places[region], self._sizes[region]) for region in self.emptied]
