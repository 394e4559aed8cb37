"""Tell residuals of layers from comparisons with the serial scheme, by their names."""

from bench.records.measurements import Check

PREFIX = "residual of "    # begins what `bench.checks.layer_residuals` has checked


def split_checks(checks: list[Check]) -> tuple[list[Check], list[Check]]:
    """Return the comparisons with the serial scheme, and the residuals."""
    residuals = [check for check in checks if check.quantity.startswith(PREFIX)]
    return [check for check in checks if check not in residuals], residuals
