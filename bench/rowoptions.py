"""The command line of ``run``, and the options that ``reproduce`` shares with it."""

import argparse

from bench import options, variants
from bench.cases import HEADINGS, PAPER, TITLES, load


def rows() -> argparse.ArgumentParser:
    """The options that ``run`` and ``reproduce`` share, as a parent of their parsers."""
    parser = argparse.ArgumentParser(add_help=False)
    _add_selection(parser)
    _add_steps(parser)
    _add_arrays(parser)
    options.add_stall(parser)
    return parser


def _add_selection(parser: argparse.ArgumentParser) -> None:
    presets = "; ".join(f"{name}: {preset.about}" for name, preset in load().presets.items())
    parser.add_argument("--table", default="all", metavar="NAMES",
                        help=f"{', '.join(HEADINGS)}, some with commas between, or all (default)")
    parser.add_argument("--scheme", default="all", metavar="NAMES",
                        help=f"{', '.join(TITLES)}, some with commas between, or all that the "
                             f"paper has: {', '.join(PAPER)} (default)")
    parser.add_argument("--preset", default="laptop", choices=load().presets,
                        help=f"the sizes (default laptop). {presets}")
    parser.add_argument("--equal-tokens", action="store_true", help=(
        "measure 3-D rows also with the batch of each other scheme's row on as many ranks, and "
        "these with that of 3-D, so that speed-ups at equal batches can be read"))
    parser.add_argument("--out", metavar="DIR",
                        help="where the .h5 files go (default results/<machine>)")


def _add_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--warmup", type=int, metavar="N",
                        help="steps before the first that is timed, with the one that is verified "
                             "(default: the preset's)")
    parser.add_argument("--repetitions", type=int, metavar="N",
                        help="the least number of steps that are timed (default: the preset's)")
    parser.add_argument("--max-repetitions", type=int, metavar="N",
                        help="the greatest (default: the preset's)")
    parser.add_argument("--max-seconds", type=float, metavar="S",
                        help="no step beyond the least number begins when so many seconds have "
                             "passed (default: the preset's)")
    parser.add_argument("--width", type=float, default=0.05, metavar="FRACTION",
                        help="enough steps are timed when the 95 %% confidence intervals of both "
                             "medians are no wider than this part of them (default 0.05)")
    parser.add_argument("--traced", type=int, metavar="N",
                        help="steps after those that count, traced to tell where the time goes "
                             "(default: the preset's; 0 for none)")
    parser.add_argument("--order", type=int, metavar="SEED",
                        help="of the order in which rows are measured (default: drawn; recorded)")


def _add_arrays(parser: argparse.ArgumentParser) -> None:
    variants.add_options(parser)
    parser.add_argument("--backend", metavar="NAME",
                        help="the array library (default MM3D_BACKEND, or numpy)")
    parser.add_argument("--seed", type=options.whole(0), default=0, metavar="N",
                        help="of parameters and input (default 0)")
    parser.add_argument("--recompute", type=options.recompute, default="none", metavar="POLICY",
                        help=f"{options.RECOMPUTE} (default none)")


def add_run(verbs, parent: argparse.ArgumentParser) -> None:
    """Add ``run``, with the options of `parent` and its own."""
    parser = verbs.add_parser("run", parents=[parent], help=(
        "under mpirun: measure the selected rows that have as many ranks as the job"))
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
