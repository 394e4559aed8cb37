"""The books of shared memory: which regions there are, and which of them nobody uses.

Every rank keeps them, and they are the same on all ranks, since all make the same calls in the
same order.  So a region is taken, and is given back to the system, without a word between them.
"""

import mmap

from mm3d.arrays.idle_memory import Idle, size_class

Place = tuple[mmap.mmap, int]


class Regions:
    """Regions of the segments of memory that ranks share.

    Parameters
    ----------
    ranks : int
        How many use each region that is taken.
    segment : mmap
        Where new ones are made.
    start : int
        The first byte of it that is free for them.
    """

    def __init__(self, ranks: int, segment: mmap.mmap, start: int) -> None:
        self.ranks, self.idle, self.in_use = ranks, Idle(), 0
        self._sizes: list[int] = []
        self._places: list[Place] = []              # the segment of each and where it begins
        self._users: list[int] = []                 # ranks that still use each
        self._hollow: dict[int, list[int]] = {}     # regions without memory, by size
        self._emptied: list[int] = []               # without memory from the next meeting on
        self._trial: list[tuple] = []               # what undoes each take on trial
        self.add(segment, start)

    def __len__(self) -> int:
        return len(self._sizes)

    def add(self, segment: mmap.mmap, start: int = 0) -> None:
        """Make new regions in another segment."""
        self._segment, self._used = segment, start

    def place(self, region: int) -> Place:
        """The segment of a region and where it begins."""
        return self._places[region]

    def take(self, length: int, trial: bool = False) -> int | None:
        """A region of at least `length` bytes; None where the segment has no room for a new one.

        On `trial` it is taken once `settle` says so.
        """
        size = size_class(length)
        found, hollow = self.idle.get(size), self._hollow.get(size)
        if found is not None:
            region, undo = found[1], (self.idle.restore, size, found)
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
            self._trial.append((region, *undo))
        return region

    def settle(self, keep: bool) -> None:
        """Keep what was taken on trial, or undo it as if it had never been."""
        while self._trial:
            region, undo, *arguments = self._trial.pop()
            if not keep:
                self.in_use -= self._sizes[region]
                self._users[region] = 0
                undo(*arguments)

    def _new(self, size: int) -> int:
        self._places.append((self._segment, self._used))
        self._sizes.append(size)
        self._users.append(0)
        self._used += size
        return len(self._sizes) - 1

    def _forget(self) -> None:
        """Undo the latest `_new`."""
        self._used -= self._sizes.pop()
        self._places.pop()
        self._users.pop()

    def drop(self, region: int) -> None:
        """A rank has given a region back; what all have is idle."""
        self._users[region] -= 1
        if not self._users[region]:
            self.idle.put(self._sizes[region], region)
            self.in_use -= self._sizes[region]

    def emptied(self) -> list[tuple[mmap.mmap, int, int]]:
        """At a meeting: where one rank is to take the memory away, and how many bytes.

        Others could be ahead of that rank, so these regions are taken again after the next
        meeting only.
        """
        found = self.idle.surplus()
        if not found and not self._emptied:
            return []
        for region in self._emptied:
            self._hollow.setdefault(self._sizes[region], []).append(region)
        self._emptied = found
        return [(*self._places[region], self._sizes[region]) for region in self._emptied]
