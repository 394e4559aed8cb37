"""Check host arrays that a caller passes, so that no value and no mask is lost."""

from typing import Any

import numpy as np


def masked_array(name: str, a: Any) -> np.ndarray:
    """Convert what a caller passes to an array, with a mask if anything in it is masked.

    Raises ValueError when its parts differ in shape, such as lists of different lengths.
    """
    if isinstance(getattr(a, "dtype", None), np.dtype) and hasattr(a, "shape"):
        return a
    try:
        found = np.ma.asarray(a)    # NumPy's own drops the masks of the arrays in a list
    except ValueError:
        raise ValueError(f"{name}: {type(a).__name__} of parts that make no array: parts of one "
                         f"shape would do") from None
    return found if np.ma.is_masked(found) else found.data


def check_unmasked(name: str, a: Any) -> None:
    """Raise ValueError for an array with masked elements, which have no value."""
    if np.ma.is_masked(a):
        raise ValueError(f"{name}: {np.ma.count_masked(a)} elements are masked and have no value: "
                         f"filled() with one would do")


def check_real(name: str, a: Any) -> tuple[int, ...]:
    """Check that an array has real numbers only; return its shape.

    Raises ValueError for complex numbers, texts, objects and masked elements, and for what is no
    array.
    """
    a = masked_array(name, a)
    check_unmasked(name, a)
    if not np.can_cast(a.dtype, np.float64, "same_kind") or a.dtype.kind in "mM":
        raise ValueError(f"{name}: {a.dtype} are no real numbers: an array of float32 or float64 "
                         f"would do")
    return tuple(a.shape)
