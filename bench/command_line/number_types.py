"""Define the types of options that are numbers: each within bounds, none infinite or NaN."""

import argparse
import math
import re
from fractions import Fraction
from typing import Callable

MOST_NUMBER = 10 ** 9    # of any number given: a larger one would take too much memory, or years
MOST_RANKS = 2 ** 20    # each has a number in lists
MOST_BYTES = 2 ** 40    # of an array
MOST_SECONDS = 3.2e7    # a year
DECIMAL = re.compile(r"\d{1,20}(\.\d{0,20})?(e-?\d\d?)?|\.\d{1,20}|\d{1,20}/\d{1,20}",
                     re.IGNORECASE)


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
