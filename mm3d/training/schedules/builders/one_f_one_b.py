"""1F1B: one forward and one backward in turns, as soon as there is a backward."""

from mm3d.training.schedules.builders.names import builder, forwards_then_pairs
from mm3d.training.schedules.schedule import Schedule, loop


@builder("1f1b")
def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Build the 1F1B schedule with a flush after each step (PipeDream-Flush, arXiv 2006.09503)."""
    units = [(0, micro) for micro in range(microbatches)]
    return Schedule(loop(ranks), tuple(
        forwards_then_pairs(units, units, min(ranks - 1 - rank, microbatches))
        for rank in range(ranks)))
