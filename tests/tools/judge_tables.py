"""Print the tables of results/judge: ``python tests/tools/judge_tables.py [DTYPE]``.

On one rank they are of faults that are planted and judged in steps of a type, by default float32;
under ``mpirun``, of the differences that right steps have, by scheme, type and number of ranks.
"""

import sys
from dataclasses import replace
from typing import Any

import numpy as np
from mpi4py import MPI

from bench.document import Column, Rows, Table
from bench.experiments.dump.computation import Way, compute_alone, compute_step
from bench.experiments.dump.envelopes import Distance, measure_reference, rounding
from bench.experiments.dump.places import LOSS
from bench.experiments.dump.tensor_files import number_type
from bench.reports.formats import format_text
from mm3d.console import say
from mm3d.schemes import REGISTERED
from planted import judge_faults, make_shop
from planted_faults import FAULTS
from reference import fits
from reported_faults import REPORTED

# Types of computation and of weights.
TYPES = (("float64", None), ("float32", None), ("bfloat16", "float32"), ("bfloat16", None))
KINDS = ("activation", LOSS, "gradient")


def table_of_differences(comm: Any) -> Table:
    """Compute a step on all schemes that the ranks fit; every rank must call it.

    The table has the largest differences to float64 on one rank, relative to each tensor's size,
    and how many envelopes they are.
    """
    rows: Rows = []
    for dtype, master in TYPES:
        shop = make_shop("plain", dtype, comm)
        start = replace(shop.start, model=replace(shop.start.model, master=master))
        exact = compute_alone(start)
        spread = measure_reference(start, comm).spread
        for scheme in (name for name in REGISTERED if fits(name, comm.size)):
            found = compute_step(start, Way(dtype, master, 1, 99, scheme), comm)
            worst, over = dict.fromkeys(KINDS, 0.0), 0.0
            for place, a in found.items():
                if place.kind in KINDS:
                    gap = Distance.between(a, exact[place])
                    size = float(np.sqrt((exact[place] ** 2).sum()))
                    worst[place.kind] = max(worst[place.kind], gap.whole / size)
                    over = max(over, gap.over(spread[place].plus(
                        rounding(exact[place], number_type(dtype)))))
            rows.append([comm.size, scheme, dtype + f", {master} weights" * bool(master),
                         *(f"{worst[kind]:.1e}" for kind in KINDS), f"{over:.2f}"])
    columns = [Column("ranks"), Column("scheme"), Column("type"), Column("activations"),
               Column("loss"), Column("gradients"), Column("envelopes")]
    return Table("Differences of right steps to float64, relative to each tensor's size", columns,
                 rows)


def plant_all(comm: Any, dtype: str) -> Table:
    """Plant all faults; return the table of what was found."""
    found = list(judge_faults(FAULTS + REPORTED, dtype, comm))
    rows: Rows = [[one.fault.what, str(one.verdict.first.place) if one.verdict.first else "none",
                   f"{one.verdict.first.ratio:.1e}" if one.verdict.first else "-",
                   one.cause.partition(":")[0], one.right_in, one.fault.report] for one in found]
    columns = [Column("fault", align="<"), Column("first tensor outside", align="left"),
               Column("envelopes"), Column("cause that was named", align="<"),
               Column("right", align="<"), Column("report", align="<")]
    return Table(f"{len(found)} faults planted in steps in {dtype}, "
                 f"{sum(one.right_in != 'neither' for one in found)} found at their tensor",
                 columns, rows)


if __name__ == "__main__":
    comm = MPI.COMM_WORLD
    table = (plant_all(comm, *sys.argv[1:2] or ["float32"]) if comm.size == 1 else
             table_of_differences(comm))
    if comm.rank == 0:
        say(format_text([table]))
