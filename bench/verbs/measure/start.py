"""Measure the cost of many ranks: starting them, making their grid, a tiny step, memory."""

import argparse
from statistics import median

from bench.command_line import options
from bench.document import Column, Notes, Part, Table
from bench.experiments.startup import CALLS, FailedJob, ROUNDS, STAGES, check_cubes, measure_start
from mm3d import launcher
from mm3d.console import complain


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure start``."""
    parser.add_argument("--ranks", type=options.numbers, default=[8, 27, 64], metavar="N,...",
                        help="numbers of ranks, which must be cubes (default 8,27,64)")


def run(arguments: argparse.Namespace) -> int:
    """Start jobs of each number of ranks and print the tables; return the exit status."""
    check_cubes(arguments.ranks)
    try:
        found = [(ranks, [measure_start(ranks) for _ in range(ROUNDS)])
                 for ranks in arguments.ranks]
    except FailedJob as error:
        complain(f"failed: {error}")
        return 1
    arguments.show(start_tables(found))
    return 0


def start_tables(found: list[tuple[int, list[tuple[dict, dict]]]]) -> list[Part]:
    """Make the tables of all numbers of ranks, each with its rounds of both sides."""
    rows, held, samples = [], [], []
    for ranks, rounds in found:
        plain, own = zip(*rounds)
        before, after = ([one[STAGES[0]] for one in side] for side in (plain, own))
        rows.append([ranks, own[0]["transport"], f"{median(before):#.3g}",
                     *(f"{median(one[name] for one in own):#.3g}" for name in STAGES),
                     f"{median(b / a for a, b in zip(before, after)):.2f}",
                     f"{1e6 * median(one['call'] for one in own):.0f}"])
        for program, side in (("NumPy, mpi4py", plain), ("mm3d", own)):
            held += [[ranks, program, stage, *(
                f"{median(one['memory'][stage][kind] for one in side) / 1e6:.1f}"
                for kind in (0, 1))] for stage in side[0]["memory"]]
        samples += [f"{ranks} ranks, all ranks run, s, {name}: "
                    + " ".join(f"{seconds:.3g}" for seconds in side)
                    for name, side in (("mpi4py", before), ("mm3d", after))]
    columns = [Column("ranks"), Column("transport"), Column("mpi4py alone", "all run (s)"),
               *(Column(name, "(s)") for name in STAGES), Column("all ranks run", "/ mpi4py"),
               Column("a small gather", "(us of CPU)")]
    memory = [Column("ranks"), Column("program", align="<"), Column("after", align="<"),
              Column("resident", "(MB)"), Column("private", "(MB)")]
    return [Table(f"Many ranks on {launcher.cores()} cores", columns, rows),
            Table("Memory of rank 0", memory, held),
            Notes("About these figures:", [
                f"medians of {ROUNDS} rounds; in each a program that imports NumPy and "
                "mpi4py and meets, then one of mm3d, by the same launcher; / mpi4py: the median "
                "of the ratios of a round",
                "a step is forward and backward of one tiny layer; the gather is the "
                f"mean of {CALLS} along x, all that a rank's processor spends on it",
                "private: pages that no other process maps, of files and shared memory, too",
                *samples])]
