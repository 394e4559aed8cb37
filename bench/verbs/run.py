"""Measure the selected rows that have as many ranks as the job, under mpirun."""

import argparse

from bench import run as rows
from bench.verbs import row_options

GROUP = "Measure the paper's tables"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``run``."""
    row_options.add_rows(parser)
    for name in ("layers", "hidden", "heads", "batch", "seq"):
        parser.add_argument(f"--{name}", type=int, metavar="N", help="instead of the preset's")
    parser.add_argument("--rows", metavar="NAMES", help=(
        "instead of --table and --scheme: both of each row, such as weak:3d,strong:1d; "
        "weak:3d:1d is the row of 3d with the batch of 1d"))
    parser.add_argument("--grid", metavar="XxYxZ", help=(
        "sizes of the grid's directions, or auto for the planner's choice"))
    parser.add_argument("--machine", metavar="NAME", help=(
        "the machine that the planner of --grid auto plans for (default cpu)"))
    parser.add_argument("--inside", default="auto", metavar="AXIS", help=(
        "the direction of the grid that stays inside a node, where ranks fill nodes one after "
        "the other (default auto: the one that moves the most words)"))
    parser.add_argument("--trace", metavar="FILE", help=(
        "write the last traced step of each row for chrome://tracing and ui.perfetto.dev; with "
        "several rows each has its name in the file's"))
    parser.add_argument("--stop-file", metavar="FILE", help=(
        "when this file exists, end the row with the repetitions that there are, and begin no "
        "other: what a job does that nears its time limit"))


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write every row; the exit status."""
    return rows.run(arguments, comm)
