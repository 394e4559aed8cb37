"""GPipe: all forwards, then all backwards."""

from mm3d.training.schedules.builders.names import builder, forwards_then_pairs
from mm3d.training.schedules.schedule import Schedule, loop


@builder("gpipe")
def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Build GPipe's schedule (arXiv 1811.06965).

    Backwards go in the order of the micro-batches, as in all other schedules, so that gradients
    are accumulated in the same order.
    """
    units = [(0, micro) for micro in range(microbatches)]
    return Schedule(loop(ranks), (forwards_then_pairs(units, units, microbatches),) * ranks)
