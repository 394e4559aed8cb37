"""Make Python's numbers of a caller's scalars, before they meet arrays.

A scalar of NumPy has a type that arithmetic keeps: a float32 array times a ``np.float64`` is
computed in float64, and times a Python float in float32.  So the bits of a result would depend on
where a number came from, such as a learning rate before and after a checkpoint.
"""

import numbers
from dataclasses import fields
from decimal import Decimal
from typing import Any


def plain_number(value: Any) -> Any:
    """Return a number as Python's int or float, also those in a tuple; all else as it is.

    Numbers are those of NumPy and of other libraries, and their arrays without dimensions.
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


def keep_plain_numbers(record: Any) -> None:
    """Make Python's numbers of those in the fields of a dataclass, also of a frozen one."""
    for field in fields(record):
        object.__setattr__(record, field.name, plain_number(getattr(record, field.name)))


class PlainNumbers:
    """Keep each number that becomes an attribute as Python's, whoever sets it."""

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, plain_number(value))
