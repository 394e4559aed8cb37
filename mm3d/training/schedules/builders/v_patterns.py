"""V-Half and V-Min: one pattern for every micro-batch, with 1/2 and 1/3 of the memory of 1F1B."""

from collections import deque
from typing import Callable

from mm3d.training.schedules.builders.names import builder
from mm3d.training.schedules.schedule import Action, Schedule, vee

PERIOD = 6    # F, B and W of two chunks, with a slot each
Slots = tuple[int, int, int, int]    # of F0, F1, B1, B0 of the first micro-batch


@builder("v-half")
def v_half(ranks: int, microbatches: int) -> Schedule:
    """Build V-Half (arXiv 2405.15362): half of 1F1B's activations.

    With F = B = W and many micro-batches its bubble is about 7/12 of that of 1F1B.
    """
    late = 0 if ranks % 2 else 3
    return _repeated(ranks, microbatches, lambda rank: (
        2 * rank, 3 * ranks - rank - 2, 3 * ranks + late + 2 * rank - 1,
        6 * ranks + late - rank - 2))


@builder("v-min")
def v_min(ranks: int, microbatches: int) -> Schedule:
    """Build V-Min (arXiv 2405.15362): a third of 1F1B's activations.

    With F = B = W and many micro-batches its bubble is about 2/3 of that of 1F1B.
    """
    late = 0 if ranks % 3 else 2
    return _repeated(ranks, microbatches, lambda rank: (
        rank, 2 * ranks - rank - 1, 2 * ranks + late + rank, 4 * ranks + late - rank - 1))


def _repeated(ranks: int, microbatches: int, slots: Callable[[int], Slots]) -> Schedule:
    """Build a schedule in which each micro-batch follows the one before by a period."""
    return Schedule(vee(ranks), tuple(_row(slots(rank), microbatches) for rank in range(ranks)))


def _row(slots: Slots, microbatches: int) -> tuple[Action, ...]:
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
