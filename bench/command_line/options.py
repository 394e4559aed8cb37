"""Define the options that several verbs share, and the types of options."""

import argparse
import math
from typing import Any, Callable, Iterable, Mapping

from bench.command_line.number_types import MOST_NUMBER, refused
from bench.errors import UsageError, in_options
from mm3d.model.recomputation import parse_policy
from mm3d.names import find_name

COUNTS = {3: "three", 4: "four"}


def add(parser: argparse.ArgumentParser, *names: str,
        known: Mapping[str, Mapping[str, Any]] | None = None) -> None:
    """Add options that are `known`, by default those of `SHARED`, in this order."""
    for name in names:
        parser.add_argument(f"--{name.replace('_', '-')}", **(known or SHARED)[name])


def add_torch(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--torch``, the interpreter that has PyTorch; `what` is its purpose."""
    parser.add_argument("--torch", metavar="PYTHON", help=(
        f"an interpreter that has PyTorch, by which {what} (default: nothing is)"))


def add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the files and folders that a verb reads."""
    parser.add_argument("sources", metavar="FILE", nargs="+",
                        help="file of one run, merged file, or folder of such files")


def add_format(parser: argparse.ArgumentParser, formats: Iterable[str]) -> None:
    """Add ``--format`` of tables, one of `bench.reports.formats.FORMATS`."""
    parser.add_argument("--format", default="text", choices=formats, help=(
        "format of the tables (default text); csv is one table of all, with all digits"))


def written(name: str, value: Any) -> str:
    """Return an option with its value as it is written on a command line."""
    return f"--{name.replace('_', '-')}" + ("" if value is True else f" {as_given(value)}")


def as_given(value: Any) -> str:
    """Return the value of an option as it is written on a command line."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    if isinstance(value, list):
        return ",".join(map(as_given, value))
    return "none" if value == math.inf else str(value)


def without_effect(name: str, value: Any, remedy: str) -> UsageError:
    """Return the error of an option that would do nothing without the `remedy`."""
    return UsageError(f"{written(name, value)} would do nothing here: {remedy} would do, or leave "
                      f"it out")


def given_of(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """Return those of some options that were given, and their values; 0 counts as given."""
    found = {name: getattr(arguments, name, None) for name in names}
    return {name: value for name, value in found.items()
            if value is not None and value is not False}


def refuse(arguments: argparse.Namespace, names: Iterable[str], remedy: str) -> None:
    """Raise UsageError if one of these options was given, as it was written."""
    for name, value in given_of(arguments, names).items():
        raise UsageError(f"{written(name, value)}: {remedy}")


def recompute_policy(text: str) -> str:
    """Return the policy of `mm3d.model.recomputation` that `text` names."""
    try:
        parse_policy(text.lower())
    except ValueError as error:
        raise argparse.ArgumentTypeError(in_options(str(error), {"recompute"})) from error
    return text.lower()


def name_of(find: Callable[[], str]) -> str:
    """Return what `find` returns; turn its error into one of the option."""
    try:
        return find()
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def schedule(text: str) -> str:
    """Return the name of the schedule that `text` stands for, such as ``interleaved:3``."""
    from mm3d.training.schedules.builders import full_name
    return name_of(lambda: full_name(text))


def schedules(text: str) -> list[str]:
    """Return the names of schedules with commas between."""
    return [*map(schedule, text.split(","))]


def numbers(text: str) -> list[int]:
    """Read ``256,512``."""
    try:
        return _positive(text, ",")
    except ValueError:
        raise refused(text, f"whole numbers from 1 to {MOST_NUMBER} with commas between",
                      "such as 256,512") from None


def grid_sizes(text: str) -> tuple[int, ...]:
    """Read ``2x2x2``."""
    try:
        return tuple(_positive(text, "x"))
    except ValueError:
        raise refused(text, f"sizes from 1 to {MOST_NUMBER} with x between",
                      "such as 2x2x2") from None


def grids_of_stages(text: str) -> tuple[int, ...] | list[tuple[int, ...]]:
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
        return [name_of(lambda: find_name(name, known, "name")) for name in text.split(",")]
    return chosen


def _positive(text: str, separator: str) -> list[int]:
    found = [int(word) for word in text.lower().split(separator)]
    if not 1 <= min(found) <= max(found) <= MOST_NUMBER:
        raise ValueError
    return found


# Options that are the same in all verbs that have them, with the arguments of ``add_argument``.
SHARED: dict[str, dict[str, Any]] = {
    "machine": {"default": "longhorn", "metavar": "NAME", "help": (
        "predict for this machine: a supplied one or a .toml file (default longhorn)")},
    "hide_sums": {"action": "store_true", "help": (
        "with a whole training: assume that sums over replicas go on behind backward, and gathers "
        "behind forward, as far as these take longer (default: a step waits for both)")},
    "pictures": {"metavar": "DIR", "help": "also draw the figures into this folder"}}
