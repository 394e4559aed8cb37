"""Build schedules of two chunks a rank in the shape of a V: ZB-V, DualPipeV, V-Half and V-Min."""

from collections import Counter, deque
from typing import Callable

from mm3d.training.schedules.schedule import Action, Schedule, builder, vee

PERIOD = 6    # F, B and W of two chunks, with a slot each
Slots = tuple[int, int, int, int]    # of F0, F1, B1, B0 of the first micro-batch


class CountedRow:
    """Collect the actions of a rank, but those of micro-batches beyond the first ones."""

    def __init__(self, microbatches: int) -> None:
        self.microbatches = microbatches
        self._next: Counter[tuple[str, int]] = Counter()
        self._without_weights: list[tuple[int, int]] = []    # chunk and micro-batch, oldest first
        self._row: list[Action] = []

    def repeat(self, times: int, pattern: str) -> None:
        """Append a pattern, such as ``"F0 B1 W1"``, `times` times.

        Each word is a kind and a chunk; the micro-batch is the next one of F, or of B and BW, in
        that chunk.  W with a chunk belongs to the oldest B of the chunk that has no W yet, W alone
        to the oldest of all chunks.  ``&`` in front of a word joins it with the one before.
        """
        for word in pattern.split() * times:
            kind, chunk = word.strip("&").rstrip("0123456789"), word.lstrip("&FBW")
            if kind == "W":
                self._append_weights(chunk)
            else:
                self._append(kind, int(chunk), word.startswith("&"))

    def actions(self) -> tuple[Action, ...]:
        """Return the row."""
        return tuple(self._row)

    def _append(self, kind: str, chunk: int, joined: bool) -> None:
        micro = self._next[kind[0], chunk]
        self._next[kind[0], chunk] += 1
        if micro < self.microbatches:
            self._row.append(Action(kind, chunk, micro, joined))
            if kind == "B":
                self._without_weights.append((chunk, micro))

    def _append_weights(self, chunk: str) -> None:
        for unit in self._without_weights:
            if chunk in ("", str(unit[0])):
                self._without_weights.remove(unit)
                self._row.append(Action("W", *unit))
                return


@builder("zb-v", chunks=2)
def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-V (arXiv 2401.10241, section 6), without a bubble where F, B, W are equal.

    It is built for at least 2 p - 1 micro-batches; with fewer, the rest of them are left out.
    """
    every = max(2 * ranks - 1, microbatches)
    rows = []
    for rank in range(ranks):
        row = CountedRow(microbatches)
        row.repeat(2 * (ranks - rank) - 1, "F0")
        row.repeat(rank, "F1 F0")
        row.repeat(ranks - rank, "F1 B1 W1")
        row.repeat(every - ranks, "F0 B0 W0 F1 B1 W1")
        row.repeat(rank, "B0 B1")
        row.repeat(ranks - rank, "B0 W0")
        row.repeat(rank, "W1")
        row.repeat(rank, "W0")
        rows.append(row.actions())
    return Schedule(vee(ranks), tuple(rows))


@builder("dualpipe-v", chunks=2)
def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Build DualPipeV, for at least 2 p micro-batches (DeepSeek-AI's DualPipe, cut in half).

    A forward of one chunk is joined with a backward of the other, so that the communication
    inside the layers of one can be hidden behind the products of the other.
    """
    if microbatches < 2 * ranks:
        raise ValueError(f"dualpipe-v of {ranks} ranks and {microbatches} micro-batches: at least "
                         f"{2 * ranks} micro-batches are needed")
    return Schedule(vee(ranks), tuple(_dualpipe_row(ranks, rank, microbatches)
                                      for rank in range(ranks)))


def _dualpipe_row(ranks: int, rank: int, microbatches: int) -> tuple[Action, ...]:
    row, below = CountedRow(microbatches), ranks - 1 - rank
    row.repeat(2 * below, "F0")
    row.repeat(rank + 1, "F0 F1")
    row.repeat(below, "B1 W F1")
    # The last rank has nothing to overlap the first backward of all with.
    row.repeat(1, "F0 &BW1 F1 &BW0" if below else "F0 BW1 F1 &BW0")
    row.repeat(microbatches - 2 * ranks + rank, "F0 &BW1 F1 &BW0")
    row.repeat(below, "BW1 F1 &BW0")
    # Of the next 2 (r + 1) backwards the first half is whole, the second without W.
    for place in range(2 * (rank + 1)):
        row.repeat(1, f"{'BW' if place <= rank else 'B'}{1 - place % 2}")
    row.repeat(below, "W B0")
    row.repeat(rank + 1, "W")
    return row.actions()


@builder("v-half", chunks=2)
def v_half(ranks: int, microbatches: int) -> Schedule:
    """Build V-Half (arXiv 2405.15362): half of 1F1B's activations.

    With F = B = W and many micro-batches its bubble is about 7/12 of 1F1B's.
    """
    late = 0 if ranks % 2 else 3
    return _repeated(ranks, microbatches, lambda rank: (
        2 * rank, 3 * ranks - rank - 2, 3 * ranks + late + 2 * rank - 1,
        6 * ranks + late - rank - 2))


@builder("v-min", chunks=2)
def v_min(ranks: int, microbatches: int) -> Schedule:
    """Build V-Min (arXiv 2405.15362): a third of 1F1B's activations.

    With F = B = W and many micro-batches its bubble is about 2/3 of 1F1B's.
    """
    late = 0 if ranks % 3 else 2
    return _repeated(ranks, microbatches, lambda rank: (
        rank, 2 * ranks - rank - 1, 2 * ranks + late + rank, 4 * ranks + late - rank - 1))


def _repeated(ranks: int, microbatches: int, slots: Callable[[int], Slots]) -> Schedule:
    """Build a schedule in which each micro-batch follows the one before by a period."""
    return Schedule(vee(ranks), tuple(_pattern_row(slots(rank), microbatches)
                                      for rank in range(ranks)))


def _pattern_row(slots: Slots, microbatches: int) -> tuple[Action, ...]:
    """Return a row: F and B in the slots of the pattern, each W in the first that is free."""
    kinds = (("F", 0), ("F", 1), ("B", 1), ("B", 0))
    taken = {slot + PERIOD * micro: Action(kind, chunk, micro)
             for (kind, chunk), slot in zip(kinds, slots) for micro in range(microbatches)}
    row: list[Action] = []
    weights: deque[Action] = deque()
    for slot in range(min(taken), max(taken) + 1):
        if slot in taken:
            row.append(taken[slot])
            if taken[slot].kind == "B":
                weights.append(taken[slot]._replace(kind="W"))
        elif weights:
            row.append(weights.popleft())
    return (*row, *weights)
