"""Read the sizes of a model and of a grid from options."""

import argparse
from typing import Any

from bench.cases.paper import load_tables
from bench.command_line.config_options import read
from bench.command_line.options import grid_sizes
from bench.errors import UsageError, as_usage_error
from mm3d import ModelSizes
from mm3d.model.stack import Stack


def model_sizes(arguments: argparse.Namespace) -> ModelSizes:
    """Return the sizes of a Transformer; by default the tables' heads, or heads of 128 features.

    Raises UsageError when the heads do not divide the features.
    """
    hidden, heads = arguments.hidden, arguments.heads
    if heads is None:
        heads = load_tables().settings.heads.get(hidden) or max(1, hidden // 128)
    if hidden % heads:
        near = heads * max(1, round(hidden / heads))
        raise UsageError(f"--hidden {hidden}: must be a multiple of --heads {heads}, such as "
                         f"{near}, or --heads another number")
    return read(ModelSizes, arguments, heads=heads)


def divide_among_replicas(arguments: argparse.Namespace) -> None:
    """Divide the job's ``--ranks`` and ``--batch`` by its replicas.

    Those of ``--data`` divide both, those of ``--context`` the ranks alone.

    Raises UsageError when the replicas do not divide them.
    """
    data, context = arguments.data or 1, arguments.context or 1
    for name, parts in (("ranks", data * context), ("batch", data)):
        value = getattr(arguments, name) or 0
        if value % parts:
            by = f" x --context {context}" * (parts > data)
            raise UsageError(f"--data {data}{by} does not divide --{name} {value}, which is that "
                             f"of all replicas: a multiple would do")
        setattr(arguments, name, value // parts or None)


def read_grid(text: str | None, scheme: str, ranks: int, machine: str, stack: Stack,
              trace_of: Any = None) -> tuple[int, ...] | None:
    """Read sizes such as ``16x4x1``; ``auto`` is the planner's choice, None the default grid.

    Parameters
    ----------
    scheme, ranks
        The parallelism and the number of ranks that ``auto`` plans for.
    machine : str
        The machine that it plans for; see `bench.prediction.machine_model.load_machine`.
    trace_of : callable, optional
        Traces a rank of a plan, see `bench.prediction.planner.rank_plans`.

    Raises UsageError when `text` is neither, the scheme has no grid of that many ranks, or there
    is no such machine or no rate of it for `dtype`.
    """
    if text is None:
        return None
    if text == "auto":
        from bench.prediction import machine_model, planner
        with as_usage_error():
            known = machine_model.load_machine(machine, stack.dtype)
            return planner.best_grid(scheme, ranks, known, stack, trace_of).sizes
    try:
        return grid_sizes(text)
    except argparse.ArgumentTypeError as error:
        raise UsageError(f"--grid {error}, or auto") from error
