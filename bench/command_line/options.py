"""Define the options that several verbs share, and the types of options."""

import argparse
from typing import Callable, Iterable

from bench.command_line.number_types import MOST, MOST_RANKS, refused, whole
from bench.errors import in_options
from mm3d.model.recomputation import parse_policy

RECOMPUTE = ("recompute in backward, to save memory: none; selective, all but products with "
             "weights; full, each layer from its input; uniform:N, every N layers from the first "
             "one's input; full+selective or uniform:N+selective")
COUNTS = {3: "three", 4: "four"}


def add_shape(parser: argparse.ArgumentParser) -> None:
    """Add ``--shape``, the sizes of matrix products."""
    parser.add_argument("--shape", type=shape, action="append", required=True, metavar="M,N,K",
                        help="measure C = A B, where C is M x K and the sums have N terms; N "
                             "alone for cubes; may be repeated")


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add ``--dtype`` of a microbenchmark."""
    parser.add_argument("--dtype", default="float32", choices=("float32", "float64"),
                        help="dtype of all arrays (default float32)")


def add_grid(parser: argparse.ArgumentParser) -> None:
    """Add ``--grid``, the sizes of a grid's directions."""
    parser.add_argument("--grid", type=grid_sizes, metavar="XxYxZ",
                        help="sizes of the grid's directions, such as 2x2x2 (default: a cube; a "
                             "square for 2d, a line for 1d)")


def add_machine_file(parser: argparse.ArgumentParser, content: str) -> None:
    """Add ``--machine`` and ``--base``, by which `content` is put into a machine file."""
    parser.add_argument("--machine", metavar="FILE", help=(
        f"also put {content} into this machine file, a .toml file for --machine of plan, predict "
        f"and check; it is made if there is none"))
    parser.add_argument("--base", metavar="NAME", help=(
        "copy everything else in a new machine file from this machine (default cpu)"))


def add_machine(parser: argparse.ArgumentParser) -> None:
    """Add ``--machine``, the machine for which seconds are predicted."""
    parser.add_argument("--machine", default="longhorn", metavar="NAME",
                        help="predict for this machine: a supplied one or a .toml file (default "
                             "longhorn)")


def add_model(parser: argparse.ArgumentParser) -> None:
    """Add the options for the number of ranks and the sizes of the model that is predicted."""
    parser.add_argument("--ranks", type=whole(1, MOST_RANKS), required=True, metavar="P",
                        help="number of ranks")
    parser.add_argument("--hidden", type=whole(1), required=True, metavar="N",
                        help="features of a token")
    for name, default, about in (("layers", 24, "Transformer layers"),
                                 ("batch", 384, "sequences in a batch"),
                                 ("seq", 512, "tokens in a sequence")):
        parser.add_argument(f"--{name}", type=whole(1), default=default, metavar="N",
                            help=f"{about} (default {default})")
    parser.add_argument("--heads", type=whole(1), metavar="N",
                        help="attention heads (default: those of the paper's row of this "
                             "--hidden, or heads of 128 features)")
    parser.add_argument("--dtype", default="float32", choices=("float16", "float32", "float64"),
                        help="dtype of all arrays (default float32)")


def add_recompute(parser: argparse.ArgumentParser) -> None:
    """Add ``--recompute``, the policy of recomputation."""
    parser.add_argument("--recompute", type=recompute, default="none", metavar="POLICY",
                        help=f"{RECOMPUTE} (default none)")


def add_overlap(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--overlap``, the panels of rows that travel during products; `what` is its purpose."""
    parser.add_argument("--overlap", nargs="?", type=int, const=1, default=0, metavar="PANELS",
                        choices=(1, 2, 4, 8), help=(
                            f"{what}; with a number, 2, 4 or 8, activations too, in so many "
                            f"panels of rows"))


def add_folder(parser: argparse.ArgumentParser) -> None:
    """Add the folder of results that a verb reads."""
    parser.add_argument("folder", metavar="DIR", help="folder with the .h5 files")


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the files and folders that a verb reads."""
    parser.add_argument("sources", metavar="FILE", nargs="+",
                        help="file of one run, merged file, or folder of such files")


def add_format(parser: argparse.ArgumentParser, formats: Iterable[str]) -> None:
    """Add ``--format`` of tables, one of `bench.reports.formats.FORMATS`."""
    parser.add_argument("--format", default="text", choices=formats, help=(
        "format of the tables (default text); csv is one table of all, with all digits"))


def add_pictures(parser: argparse.ArgumentParser) -> None:
    """Add ``--pictures``, the folder of figures."""
    parser.add_argument("--pictures", metavar="DIR",
                        help="also draw the figures into this folder")


def recompute(text: str) -> str:
    """Check that `text` is a policy of `mm3d.model.recomputation`."""
    try:
        parse_policy(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(in_options(str(error), {"recompute"})) from error
    return text


def numbers(text: str) -> list[int]:
    """Read ``256,512``."""
    try:
        return _positive(text, ",")
    except ValueError:
        raise refused(text, f"whole numbers from 1 to {MOST} with commas between",
                      "such as 256,512") from None


def grid_sizes(text: str) -> tuple[int, ...]:
    """Read ``2x2x2``."""
    try:
        return tuple(_positive(text, "x"))
    except ValueError:
        raise refused(text, f"sizes from 1 to {MOST} with x between", "such as 2x2x2") from None


def stage_grids(text: str) -> tuple[int, ...] | list[tuple[int, ...]]:
    """Read ``2x1x1``, or one for each stage: ``2x1x1,1x2x1``."""
    found = [*map(grid_sizes, text.split(","))]
    return found if len(found) > 1 else found[0]


def shape(text: str) -> tuple[int, ...]:
    """Read M, N and K of ``M,N,K``, or of one number for all."""
    return sizes("M,N,K")(text if "," in text else ",".join([text] * 3))


def sizes(names: str) -> Callable[[str], tuple[int, ...]]:
    """Return the type of an option that has a whole number of at least 1 for each of `names`."""
    count = len(names.split(","))

    def several(text: str) -> tuple[int, ...]:
        found = numbers(text)
        if len(found) != count:
            raise argparse.ArgumentTypeError(f"{text!r}: {COUNTS[count]} sizes {names} would do"
                                             + ", or one" * (count == 3))
        return tuple(found)
    return several


def some_of(*known: str) -> Callable[[str], list[str]]:
    """Return the type of an option that is one or more of the names `known`."""
    def chosen(text: str) -> list[str]:
        found = text.split(",")
        for name in found:
            if name not in known:
                raise argparse.ArgumentTypeError(f"{name!r} is unknown: choose of "
                                                 f"{', '.join(known)}")
        return found
    return chosen


def _positive(text: str, separator: str) -> list[int]:
    found = [int(word) for word in text.lower().split(separator)]
    if not 1 <= min(found) <= max(found) <= MOST:
        raise ValueError
    return found
