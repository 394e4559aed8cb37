"""Interleaved 1F1B: several chunks of layers on each rank."""

from mm3d.training.schedules.builders.names import builder, forwards_then_pairs
from mm3d.training.schedules.schedule import Schedule, loop


@builder("interleaved")
def interleaved(ranks: int, microbatches: int, chunks: int = 2) -> Schedule:
    """Build the interleaved 1F1B schedule (arXiv 2104.04473, section 2.2).

    Micro-batches go through the chunks in groups.  The groups have as many as there are ranks
    where that divides the micro-batches.  Otherwise they are as equal as can be, none is smaller
    than the number of ranks unless all micro-batches together are, and the larger come first.
    """
    count = max(1, microbatches // ranks)
    size, longer = divmod(microbatches, count)
    bounds = [group * size + min(group, longer) for group in range(count + 1)]
    groups = [range(*pair) for pair in zip(bounds, bounds[1:])]
    forwards = [(chunk, micro) for group in groups for chunk in range(chunks) for micro in group]
    backwards = [(chunks - 1 - chunk, micro) for chunk, micro in forwards]
    warm_up = (chunks - 1) * len(groups[0])
    return Schedule(loop(ranks, chunks), tuple(
        forwards_then_pairs(forwards, backwards,
                            min(2 * (ranks - 1 - rank) + warm_up, len(forwards)))
        for rank in range(ranks)))
