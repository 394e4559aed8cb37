"""Options of the verbs that measure the rows of the paper's tables."""

import argparse

from bench import variants
from bench.cases import HEADINGS, PAPER, TITLES, load
from bench.verbs import options


def add_rows(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``run`` and ``reproduce`` share."""
    _add_selection(parser)
    _add_steps(parser)
    _add_arrays(parser)
    options.add_stall(parser)


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
    options.add_out(parser)


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
    options.add_backend(parser)
    parser.add_argument("--seed", type=options.whole(0), default=0, metavar="N",
                        help="of parameters and input (default 0)")
    options.add_recompute(parser)
