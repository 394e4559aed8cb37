"""Build schedules whose chunks go around the ranks: GPipe, 1F1B, interleaved, ZB-H1 and ZB-H2."""

from typing import Sequence

from mm3d.training.schedules.schedule import Action, Schedule, builder, loop

Unit = tuple[int, int]    # a chunk and a micro-batch


@builder("gpipe")
def gpipe(ranks: int, microbatches: int) -> Schedule:
    """Build GPipe's schedule (arXiv 1811.06965).

    Backwards go in the order of the micro-batches, as in all other schedules, so that gradients
    are accumulated in the same order.
    """
    units = [(0, micro) for micro in range(microbatches)]
    return Schedule(loop(ranks), (_forwards_then_pairs(units, units, microbatches),) * ranks)


@builder("1f1b")
def one_f_one_b(ranks: int, microbatches: int) -> Schedule:
    """Build the 1F1B schedule with a flush after each step (PipeDream-Flush, arXiv 2006.09503)."""
    units = [(0, micro) for micro in range(microbatches)]
    return Schedule(loop(ranks), tuple(
        _forwards_then_pairs(units, units, min(ranks - 1 - rank, microbatches))
        for rank in range(ranks)))


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
        _forwards_then_pairs(forwards, backwards,
                             min(2 * (ranks - 1 - rank) + warm_up, len(forwards)))
        for rank in range(ranks)))


def _forwards_then_pairs(forwards: Sequence[Unit], backwards: Sequence[Unit],
                         first: int) -> tuple[Action, ...]:
    """Return a row: `first` forwards, then forward and backward in turns, then backwards."""
    row = [Action("F", *unit) for unit in forwards[:first]]
    for unit, following in zip(backwards, [*forwards[first:], *[None] * first]):
        if following is not None:
            row.append(Action("F", *following))
        row.append(Action("BW", *unit))
    return tuple(row)


@builder("zb-h1")
def zb_h1(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-H1 (arXiv 2401.10241, section 2.2), with the memory of 1F1B.

    As 1F1B; on rank r the W's are r micro-batches behind the B's.
    """
    return Schedule(loop(ranks), tuple(_delayed_row(microbatches, ranks - 1 - rank, rank)
                                       for rank in range(ranks)))


@builder("zb-h2")
def zb_h2(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-H2 (arXiv 2401.10241, section 2.2), without a bubble where F, B, W are equal.

    It begins with twice as many forwards as ZB-H1, and W's are twice as far behind.
    """
    return Schedule(loop(ranks), tuple(_delayed_row(microbatches, 2 * (ranks - 1 - rank), 2 * rank)
                                       for rank in range(ranks)))


def _delayed_row(microbatches: int, first: int, behind: int) -> tuple[Action, ...]:
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
