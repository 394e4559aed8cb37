"""The option ``--grid``: sizes, or ``auto`` for the planner's choice."""

from bench.cases import UsageError


def grid(text: str | None, scheme: str, ranks: int, machine: str, dtype: str,
         sizes: dict[str, int], recompute: str = "none") -> tuple[int, ...] | None:
    """Read sizes as ``16x4x1``, or choose those of ``auto``; None for the scheme's default.

    Raises
    ------
    UsageError
        When `text` is neither, the scheme has no grid of so many ranks, or nothing is known of
        the machine or of its rate for `dtype`.
    """
    if text is None:
        return None
    if text == "auto":
        from bench import model, plan
        try:
            return plan.best_grid(scheme, ranks, model.load(machine, dtype), dtype, recompute,
                                  **sizes)
        except ValueError as error:
            raise UsageError(str(error)) from error
    try:
        return tuple(int(size) for size in text.split("x"))
    except ValueError as error:
        raise UsageError(f"--grid {text}: give sizes as in 16x4x1, or auto") from error
