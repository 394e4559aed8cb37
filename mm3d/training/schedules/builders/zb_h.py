"""ZB-H1 and ZB-H2: 1F1B with the gradients of the weights put off."""

from mm3d.training.schedules.builders.names import builder
from mm3d.training.schedules.schedule import Action, Schedule, loop


@builder("zb-h1")
def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-H1 (arXiv 2401.10241, section 2.2), with the memory of 1F1B.

    As 1F1B; on rank r the W's are r micro-batches behind the B's.
    """
    return Schedule(loop(ranks), tuple(_row(microbatches, ranks - 1 - rank, rank)
                                       for rank in range(ranks)))


@builder("zb-h2")
def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-H2 (arXiv 2401.10241, section 2.2), without a bubble where F, B, W are equal.

    It begins with twice as many forwards as ZB-H1, and W's are twice as far behind.
    """
    return Schedule(loop(ranks), tuple(_row(microbatches, 2 * (ranks - 1 - rank), 2 * rank)
                                       for rank in range(ranks)))


def _row(microbatches: int, first: int, behind: int) -> tuple[Action, ...]:
    """Return a row: `first` forwards, then F, B and W in turns, W `behind` micro-batches late."""
    row = [Action("F", 0, micro) for micro in range(min(first, microbatches))]
    for micro in range(microbatches + behind):
        if first + micro < microbatches:
            row.append(Action("F", 0, first + micro))
        if micro < microbatches:
            row.append(Action("B", 0, micro))
        if micro >= behind:
            row.append(Action("W", 0, micro - behind))
    return tuple(row)
