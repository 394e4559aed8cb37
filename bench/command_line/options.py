"""Define the options that several verbs share, and the types of options."""

import argparse
from pathlib import Path
from typing import Callable, Iterable

from bench.agreement import agree
from bench.cluster.spec import Cluster
from bench.command_line.number_types import (MOST, MOST_RANKS, MOST_SECONDS, SEEDS, number,
                                             refused, whole)
from bench.errors import UsageError, in_options
from bench.instruments import host
from bench.instruments.available_memory import total_memory
from bench.instruments.stall import unwatched
from bench.instruments.timing import Limits
from bench.reports import formats
from mm3d import launcher
from mm3d.arrays import backend as backends
from mm3d.arrays.backend import Backend
from mm3d.console import complain, say
from mm3d.model.recomputation import parse_policy

RECOMPUTE = ("recompute in backward, to save memory: none; selective, all but products with "
             "weights; full, each layer from its input; uniform:N, every N layers from the first "
             "one's input; full+selective or uniform:N+selective")
COUNTS = {3: "three", 4: "four"}


def add_stall(parser: argparse.ArgumentParser) -> None:
    """Add ``--stall`` to a verb of several ranks; see `bench.instruments.stall`."""
    parser.add_argument("--stall", type=whole(1), metavar="SECONDS", help=(
        "end the job when a rank has not reported for this time, and print the layer and the "
        "collective of each rank; in timed steps also when all ranks wait in collectives "
        "(default: never)"))
    parser.set_defaults(watched=unwatched)    # until the watchdog of the job is there


def add_cluster(parser: argparse.ArgumentParser) -> None:
    """Add ``--cluster``, by which a verb is run in an emulated cluster; see `bench.cluster`."""
    parser.add_argument("--cluster", type=cluster, metavar="NxR:LINK[,LATENCY]", help=(
        "run in an emulated cluster of N nodes with R ranks each on this machine, whose links "
        "have a rate and a latency, such as 16x4:200Mbit or 4x2:1Gbit,1ms; starts mpirun itself"))


def add_out(parser: argparse.ArgumentParser) -> None:
    """Add ``--out``, the folder of results."""
    parser.add_argument("--out", metavar="DIR", default=host.default_out(),
                        help="write the .h5 files into this folder (default results/<machine>)")


def add_backend(parser: argparse.ArgumentParser) -> None:
    """Add ``--backend``."""
    parser.add_argument("--backend", metavar="NAME",
                        help="array library: numpy or cupy (default MM3D_BACKEND, or numpy)")


def add_repetitions(parser: argparse.ArgumentParser, repetitions: int, seconds: float) -> None:
    """Add the options of a microbenchmark: its repetitions, the seed and ``--stall``."""
    parser.add_argument("--repetitions", type=whole(1), default=repetitions, metavar="N",
                        help=f"repeat at least this often (default {repetitions})")
    parser.add_argument("--max-repetitions", type=whole(1), metavar="N",
                        help="repeat at most this often (default 30, or --repetitions if greater)")
    parser.add_argument("--max-seconds", default=seconds,
                        type=number(above=True, most=MOST_SECONDS), metavar="SECONDS",
                        help=f"begin no repetition beyond --repetitions after this time in a "
                             f"measurement (default {seconds:g})")
    parser.add_argument("--width", type=number(above=True), default=0.05, metavar="FRACTION",
                        help="repeat until the 95 %% confidence interval is no wider than this "
                             "fraction of the median (default 0.05)")
    parser.add_argument("--seed", type=whole(0, SEEDS), default=0, metavar="N",
                        help="seed of the numbers in arrays and of the order of measurements "
                             "(default 0)")
    add_stall(parser)


def add_measurement(parser: argparse.ArgumentParser, repetitions: int, seconds: float) -> None:
    """Add the options of a microbenchmark that writes a file."""
    add_out(parser)
    add_backend(parser)
    add_repetitions(parser, repetitions, seconds)


def limits_of(arguments: argparse.Namespace) -> Limits:
    """Return when to stop repeating, as the options of `add_repetitions` say.

    Raises
    ------
    UsageError
        When the limits are not valid.
    """
    most = arguments.max_repetitions
    try:
        return Limits(arguments.repetitions,
                      max(30, arguments.repetitions) if most is None else most,
                      arguments.max_seconds, arguments.width)
    except ValueError as error:
        raise UsageError(str(error)) from error


def one_rank_backend(verb: str, backend: str | None, comm) -> Backend:
    """Return the array library of a verb that measures one rank.

    Raises
    ------
    UsageError
        When there are more ranks, or no such library.
    """
    if comm.size > 1:
        raise UsageError(f"{verb} measures one rank: start it without mpirun")
    try:
        return backends.get(backend)
    except ValueError as error:
        raise UsageError(str(error)) from error


def check_memory(needed: int, backend: str | None, comm) -> None:
    """Check before any work that arrays of `needed` bytes, over all ranks, fit the nodes' memory.

    Raises
    ------
    UsageError
        On every rank, when those on a node exceed all of its memory, or there is no `backend`.
    """
    try:
        on_host = backends.get(backend).host_buffers
    except ValueError as error:
        raise UsageError(str(error)) from error
    here, room = needed * launcher.local_ranks() // comm.size, total_memory()
    agree(f"these sizes need {here} bytes on a node or more, which has {room}: smaller sizes "
          f"would do" if on_host and room and here > room else None, comm)


def check_model_memory(layers: int, hidden: int, tokens: int, backend: str | None, comm) -> None:
    """Check before any work that a model fits the memory of the nodes; see `check_memory`.

    Counted are values and gradients of the matrices and the input, in 16 bits.
    """
    check_memory(2 * hidden * (24 * layers * hidden + tokens), backend, comm)


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


def add_format(parser: argparse.ArgumentParser) -> None:
    """Add ``--format`` of tables."""
    parser.add_argument("--format", default="text", choices=formats.FORMATS, help=(
        "format of the tables (default text); csv is one table of all, with all digits"))


def draw_pictures(draws: Iterable[Callable[[], Path]], form: str = "text") -> int:
    """Draw pictures and print the path of each, or why it is not drawn; 1 if one is not, else 0.

    Parameters
    ----------
    draws : iterable of callables
        Each draws a picture and returns its path, or raises `LeftOut`.
    form : str
        The format of the document that was printed; lines stand apart from one that another
        program may read.
    """
    from bench.reports.figures.style import LeftOut
    status = 0
    for draw in draws:
        try:
            line = str(draw())
        except LeftOut as why:
            line, status = f"not drawn: {why}", 1
        (say if form == "text" else complain)(line)
    return status


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


def cluster(text: str) -> Cluster:
    """Read ``16x4:200Mbit``."""
    try:
        return Cluster.parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


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
