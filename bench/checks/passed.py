"""Require that checks passed."""

import numpy as np

from bench.errors import WrongResult
from bench.records.measurements import Check


def require_passed(checks: list[Check], about: str = "",
                   error: type[Exception] = WrongResult) -> list[Check]:
    """Return the checks; raise `error`, for the worst that did not pass, if there is one."""
    if message := describe_failed(checks, about):
        raise error(message)
    return checks


def describe_failed(checks: list[Check], about: str = "") -> str:
    """Describe the worst check that did not pass, and count these; "" when all did."""
    failed = [check for check in checks if not check.passed]
    if not failed:
        return ""
    worst = max(failed, key=lambda check: np.nan_to_num(check.share, nan=np.inf))
    return (f"{about}{worst.quantity} is off by {worst.error:.2g}, tolerance "
            f"{worst.tolerance:.2g} ({len(failed)} of {len(checks)} checks fail)")
