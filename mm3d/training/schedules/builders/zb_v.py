"""ZB-V: no bubble with the memory of 1F1B, two chunks a rank in the shape of a V."""

from mm3d.training.schedules.builders.counted import CountedRow
from mm3d.training.schedules.builders.names import builder
from mm3d.training.schedules.schedule import Schedule, vee


@builder("zb-v")
def zb_v(ranks: int, microbatches: int) -> Schedule:
    """Build ZB-V (arXiv 2401.10241, section 6), without a bubble where F, B, W are equal.

    It is that of at least 2 p - 1 micro-batches; with fewer, those beyond are left out.
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
