"""DualPipeV: forwards and backwards that overlap, two chunks a rank in the shape of a V."""

from mm3d.training.schedules.builders.counted import CountedRow
from mm3d.training.schedules.builders.names import builder
from mm3d.training.schedules.schedule import Action, Schedule, vee


@builder("dualpipe-v")
def dualpipe_v(ranks: int, microbatches: int) -> Schedule:
    """Build DualPipeV, for at least 2 p micro-batches (DeepSeek-AI's DualPipe, cut in half).

    A forward of one chunk is joined with a backward of the other, so that the communication
    inside the layers of one can be hidden behind the products of the other.
    """
    if microbatches < 2 * ranks:
        raise ValueError(f"dualpipe-v of {ranks} ranks and {microbatches} micro-batches: at least "
                         f"{2 * ranks} micro-batches are needed")
    return Schedule(vee(ranks), tuple(_row(ranks, rank, microbatches) for rank in range(ranks)))


def _row(ranks: int, rank: int, microbatches: int) -> tuple[Action, ...]:
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
