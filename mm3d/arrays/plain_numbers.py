"""Convert a caller's scalars to Python numbers, before they meet arrays.

A scalar of NumPy has a type that arithmetic keeps: a float32 array times a ``np.float64`` is
computed in float64, and times a Python float in float32.  So the bits of a result would depend on
where a number came from, such as a learning rate before and after a checkpoint.
"""

import numbers
from dataclasses import field, fields
from decimal import Decimal
from typing import Any, Callable


GREATEST = 2 ** 63 - 1    # of the whole numbers that a file can hold


def plain_number(value: Any) -> Any:
    """Convert a number, or those in a tuple, to Python's int or float; return all else as it is.

    Numbers include scalars of NumPy and other libraries, and arrays without dimensions.
    """
    if type(value) in (float, int, bool, str) or value is None:
        return value
    if type(value) is tuple:
        return tuple(map(plain_number, value))
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, (numbers.Real, Decimal)):
        return float(value)
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        item = value.item()
        return value if isinstance(item, bool) or not isinstance(item, numbers.Real) else item
    return value


def is_number(value: Any) -> bool:
    """Return whether the value is a real number, and not a truth value."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_whole(value: Any, least: int = 1) -> bool:
    """Return whether the value is a whole number of at least `least`, and not a truth value."""
    whole = type(value) is int or type(value) is not bool and isinstance(value, numbers.Integral)
    return whole and least <= value <= GREATEST


def check_whole(name: str, value: Any, least: int = 1) -> int:
    """Return a whole number of at least `least` as Python's; ValueError for all else."""
    if not is_whole(plain_number(value), least):
        raise ValueError(f"{name}={value!r} should be a whole number of at least {least}")
    return int(value)


def check_range(name: str, value: Any, good: Callable[[Any], bool], wanted: str) -> None:
    """Raise ValueError with one line for a number that is out of range, or no number."""
    try:
        fits = good(value)
    except (TypeError, ValueError):    # also of an array
        fits = False
    if not fits:
        raise ValueError(f"{name}={value!r}: {wanted} would do")


def said(about: str, *default: Any, **more: Any) -> Any:
    """Define a field of a dataclass by what it is, and its default, if it has one.

    Options are made of it.  Of numbers, ``least`` and ``most`` are bounds, and those ``above`` 0
    alone will do; ``choices`` are all values.  A help ends in "(default VALUE)": ``nothing``
    stands there in place of the value, "" for no such words.  ``option`` is the option's name,
    where it is another; "" for none.  ``letter`` stands for its value, ``bare`` is the value where
    none is written.  An option that sets a field to False does the ``contrary``.
    """
    about = {"about": about, **more}
    return field(default=default[0], metadata=about) if default else field(metadata=about)


class PlainFields:
    """Convert the numbers in the fields of a dataclass, frozen or not, to Python's."""

    def __post_init__(self) -> None:
        for one in fields(self):
            object.__setattr__(self, one.name, plain_number(getattr(self, one.name)))

    def given(self) -> dict[str, Any]:
        """Return the fields that differ from their defaults."""
        return {one.name: value for one in fields(self)
                if (value := getattr(self, one.name)) != one.default}


def check_types(record: Any) -> None:
    """Raise ValueError for fields of a dataclass that are no truth value, or no whole number."""
    for one in fields(record):
        value = getattr(record, one.name)
        if one.type is bool and value not in (True, False):    # "no" would count as true
            raise ValueError(f"{one.name}={value!r}: True or False would do")
        if one.name in ("seed", "ignored") and not isinstance(value, numbers.Integral):
            raise ValueError(f"{one.name}={value!r} should be a whole number")


class PlainNumbers:
    """Convert each number that is set as an attribute to Python's."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, plain_number(value))
