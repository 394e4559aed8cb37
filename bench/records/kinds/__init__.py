"""What follows from the samples of each kind of record: a file each, found by its name.

``NAME.py`` in this folder is the kind NAME ("gpu" those that begin so) and needs to be named
nowhere else. Its ``derive`` gets a record and returns the variables that follow from its raw ones;
``check_texts``, if there is one, checks texts that readers take apart.
"""

import importlib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from bench.statistics import median_interval

BOUND = ("bound",)    # the last dimension of medians and their intervals
BOUNDS = ("median", "low", "high", "confidence")
NAMES = {path.stem for path in Path(__file__).parent.glob("*.py")} - {"__init__"}


def derive(record: Any) -> dict[str, Any]:
    """Return the variables that follow from those that a record was measured with.

    Raises
    ------
    KeyError, ValueError, TypeError, AttributeError, IndexError, ArithmeticError
        When what was measured is not what ``kinds.toml`` says of its kind.
    """
    if (module := module_of(record.kind)) is None:
        return {}
    with np.errstate(all="ignore"):    # what is no number is found where the record is checked
        return module.derive(record)


def module_of(kind: str) -> ModuleType | None:
    """Return the file of a kind; None without one."""
    name = "gpu" if kind.startswith("gpu-") else kind.replace("-", "_")
    return importlib.import_module(f"{__name__}.{name}") if name in NAMES else None


def medians(samples: np.ndarray) -> np.ndarray:
    """Compute medians and intervals along the last dimension, (..., bound), without NaN samples.

    NaN where there are no samples.
    """
    lines = [line[~np.isnan(line)] for line in samples.reshape(-1, samples.shape[-1])]
    found = [median_interval(line) if len(line) else [np.nan] * len(BOUNDS) for line in lines]
    return np.reshape(found, (*samples.shape[:-1], len(BOUNDS)))
