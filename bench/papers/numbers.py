"""Judge a printed number by one that is computed from other printed numbers."""

import itertools
import re
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Callable, Mapping

FORM = re.compile(r"-?\d+(?:\.(\d+))?(?:e(\d{1,3}))?")
MOST_ROUNDED = 8    # inputs of a cell: each doubles what its interval takes
MEANINGS = {"=": "equal in all printed digits", "~": "within the rounding of the printed inputs",
            "t": "truncated, not rounded", "<": "more than a search finds",
            "!": "different from what the printed inputs give"}
ExactInterval = tuple[Fraction, Fraction]


@dataclass(frozen=True, eq=False)
class Rounded:
    """A number as it is printed, and what its last digit counts; two of one text are two.

    The unit is 0 where a formula is printed, and not its value.
    """

    text: str
    value: Fraction
    unit: Fraction

    @classmethod
    def read(cls, text: str) -> "Rounded | None":
        """Return the number of a text; of ``6e2`` one digit is known.  None if it is none."""
        found = FORM.fullmatch(text)
        return found and cls(text, Fraction(text),
                             Fraction(10) ** (int(found[2] or 0) - len(found[1] or "")))

    def is_near(self, low: Fraction, high: Fraction) -> bool:
        """Return whether a number of this interval is rounded to this one, halves away from 0."""
        least, most = self.value - self.unit / 2, self.value + self.unit / 2
        return least < high and low <= most if self.value < 0 else least <= high and low < most

    def truncates(self, number: Fraction) -> bool:
        """Return whether cutting off the digits of `number` leaves this one."""
        cut = abs(number) // self.unit * self.unit
        return (-cut if number < 0 else cut) == self.value


@dataclass(frozen=True)
class ComparedCell:
    """A printed number, if there is one, beside what follows from the printed inputs.

    `reach` is the least and the most that inputs give which are printed so; where the verdict does
    not need it, the computed number.  The verdict is one of `MEANINGS`, "-" without a printed
    number, and the expected one that of the file of the paper.
    """

    row: str
    printed: Rounded | None
    computed: Fraction
    reach: ExactInterval
    verdict: str
    expected: str

    @property
    def within(self) -> str:
        """Say what the printed inputs give."""
        low, high = map(self.show, self.reach)
        return low + f" to {high}" * (low != high)

    @property
    def off(self) -> str:
        """Say by how much the printed number differs."""
        return self.show(self.printed.value - self.computed, "+")

    @property
    def difference(self) -> str:
        """Say by how much the printed number is off, and what its inputs allow."""
        if not self.printed.unit:
            return (f"{self.printed.text} by the printed formula is off by {self.off}, from "
                    f"{self.within}")
        return (f"{self.printed.text} differs from its printed inputs by {self.off}: they give "
                f"{self.within}")

    def show(self, number: Fraction, sign: str = "") -> str:
        """Format a number with one digit more than is printed."""
        places = len(self.printed.text.partition("e")[0].partition(".")[2]) if self.printed else 3
        return f"{float(number):{sign}.{places + 1}f}"


def judge_number(printed: Rounded | None, computed: Fraction, reach: Callable[[], ExactInterval],
                 searched: bool = False) -> tuple[ExactInterval, str]:
    """Judge a printed number by the computed one; return the interval and a cell's verdict.

    `reach` returns the least and the most that the inputs can give, and is called only where that
    matters.  Where less is better, and was `searched` for, print may be more.
    """
    here = computed, computed
    if printed is None or printed.is_near(*here):
        return here, "=" if printed else "-"
    here = reach()
    if printed.is_near(*here):
        return here, "~"
    if printed.truncates(computed):
        return here, "t"
    return here, "<" if searched and computed < printed.value else "!"


def compute_reach(function: Callable[..., Any], inputs: Mapping[str, Any]) -> ExactInterval:
    """Return the least and the most that a formula gives for inputs that are printed so.

    These are at corners, since a formula rises with each rounded input, or falls with it.  More
    than `MOST_ROUNDED` of them are a ValueError.
    """
    rounded = {id(one): one for value in inputs.values()
               for one in (value if isinstance(value, list) else [value])
               if isinstance(one, Rounded)}
    if len(rounded) > MOST_ROUNDED:
        raise ValueError(f"{len(rounded)} inputs are rounded: {MOST_ROUNDED} at most would do")
    found = [compute(function, inputs, dict(zip(rounded, signs)))
             for signs in itertools.product((-1, 1), repeat=len(rounded))]
    return min(found), max(found)


def compute(function: Callable[..., Any], inputs: Mapping[str, Any],
            signs: Mapping[int, int] | None = None) -> Fraction:
    """Return the value of a formula for inputs as printed, or half a unit more or less by id."""
    def plain(value: Any) -> Any:
        if isinstance(value, list):
            return [plain(one) for one in value]
        if not isinstance(value, Rounded):
            return value
        return value.value + (signs or {}).get(id(value), 0) * value.unit / 2
    return Fraction(function(**{name: plain(value) for name, value in inputs.items()}))
