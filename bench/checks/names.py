"""Tell residuals of layers from comparisons with the serial scheme, by their names."""

from bench.records.measurements import Check

PREFIX = "residual of "    # begins the names of checks by `bench.checks.layer_residuals`


def split_checks(checks: list[Check]) -> tuple[list[Check], list[Check]]:
    """Return the comparisons with the serial scheme, and the residuals."""
    residuals = [check for check in checks if check.quantity.startswith(PREFIX)]
    return [check for check in checks if check not in residuals], residuals
