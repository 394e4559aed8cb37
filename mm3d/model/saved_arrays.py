"""Find the arrays in what forward saves for backward, and count their bytes."""

import math
from typing import Any, Iterator

from mm3d.arrays.backend import Array, host_dtype


def saved_arrays(saved: Any) -> Iterator[Array]:
    """Iterate over all arrays in saved data, each as often as it is there."""
    if isinstance(saved, (tuple, list)):
        for item in saved:
            yield from saved_arrays(item)
    elif hasattr(saved, "array"):
        yield saved.array
    elif hasattr(saved, "arrays"):
        yield from saved.arrays
    elif hasattr(saved, "operands"):
        yield from saved_arrays(saved.operands)
    elif saved is not None and not isinstance(saved, int):    # the place of masks
        yield saved


def saved_bytes(saved: Any) -> int:
    """Count the bytes of the arrays in saved data, each array once."""
    arrays = {id(a): a for a in saved_arrays(saved)}
    return sum(math.prod(a.shape) * host_dtype(a).itemsize for a in arrays.values())
