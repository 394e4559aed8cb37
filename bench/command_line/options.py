"""Define the options that several verbs share, and the types of options.

Numbers are within bounds, none infinite or NaN.
"""

import argparse
import math
import re
from fractions import Fraction
from typing import Any, Callable, Iterable, Mapping

from bench.errors import UsageError, in_options
from mm3d.model.recomputation import parse_policy
from mm3d.names import find_name

MOST_NUMBER = 10 ** 9    # of any number given: a larger one would take too much memory, or years
MOST_RANKS = 2 ** 20    # each has a number in lists
MOST_SECONDS = 3.2e7    # a year
DECIMAL = re.compile(r"\d{1,20}(\.\d{0,20})?(e-?\d\d?)?|\.\d{1,20}|\d{1,20}/\d{1,20}",
                     re.IGNORECASE)
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


def whole(least: int, most: int = MOST_NUMBER) -> Callable[[str], int]:
    """Return the type of an option that is a whole number from `least` to `most`."""
    def read(text: str) -> int:
        try:
            found = int(text)
        except ValueError:
            found = least - 1
        if found < least:
            raise refused(text, f"a whole number of at least {least}")
        if found > most:
            raise refused(text, f"a whole number of at most {most}")
        return found
    return read


ranks = whole(1, MOST_RANKS)    # of a job


def number(least: float = 0, above: bool = False,
           most: float = MOST_NUMBER) -> Callable[[str], float]:
    """Return the type of an option that is a number from `least`, or `above` it, to `most`."""
    def read(text: str) -> float:
        try:
            found = float(text)
        except ValueError:
            found = math.nan
        if not (found > least if above else found >= least):    # nor nan
            raise refused(text, f"a number greater than {least:g}" if above
                          else f"a number of at least {least:g}")
        if found > most:
            raise refused(text, f"a number of at most {most:g}")
        return found
    return read


def fraction(text: str) -> Fraction:
    """Read a number of at least 0, such as 1.3 or 4/3, exactly."""
    try:    # a long exponent would take all memory
        found = Fraction(text) if DECIMAL.fullmatch(text) else Fraction(-1)
    except ZeroDivisionError:
        found = Fraction(-1)
    if found < 0:
        raise refused(text, "a number of at least 0", "such as 1.3")
    if found > MOST_NUMBER or 0 < found < Fraction(1, MOST_NUMBER):
        raise refused(text, f"0, or a number from {1 / MOST_NUMBER:g} to {MOST_NUMBER:g}")
    return found


def fractions(text: str) -> tuple[Fraction, ...]:
    """Read a number of at least 0 for each of F, B and W of a pipeline."""
    words = text.split(",")
    if len(words) != 3:
        raise refused(text, "numbers F,B,W")
    return tuple(map(fraction, words))


def refused(text: str, remedy: str, example: str = "") -> argparse.ArgumentTypeError:
    """Return the error of a value, a long one cut short, with the `remedy` that would do."""
    shown = text if len(text) <= 40 else f"{text[:30]}..."
    return argparse.ArgumentTypeError(", ".join(filter(None, [f"{shown!r}: {remedy} would do",
                                                              example])))


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
