"""Time a row whose ranks wait for the modelled seconds of their work instead of computing."""

from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Iterator

import numpy as np

import mm3d
from bench.agreement import agree, make_on_rank_0
from bench.cases.case import Case, row_stack
from bench.errors import Failed
from bench.experiments.rows.dilation import dilation_groups, slow_down
from bench.experiments.rows.settings import ModelledWork, Settings
from bench.instruments.clock import Clock
from bench.instruments.timing import time_phases
from bench.instruments.waited_work import WorkClock, waited_work
from bench.records.model_run import make_group
from bench.records.measurements import Group
from mm3d.tracing import dry_run
from mm3d.tracing.events import PHASES
from mm3d.tracing.trace import Trace

ROUNDING = 1e-9    # the relative rounding error of a sum of seconds


@dataclass(frozen=True)
class TimedModel:
    """A model whose steps are timed.

    Attributes
    ----------
    x, dy : Array
        This rank's blocks of the input and of the output's gradient.
    groups : dict of str to Group
        Groups of a run, on rank 0, where the model waits for its work.
    factor : float or None
        How many times slower links and waits are, where they are slowed.
    """

    model: mm3d.Transformer
    x: Any
    dy: Any
    groups: dict[str, Group] = field(default_factory=dict)
    factor: float | None = None


@contextmanager
def waiting_model(one: Case, scheme, settings: Settings,
                  order: str) -> Iterator[TimedModel]:
    """Build the model of a case, whose ranks wait for their work within the block.

    One step is counted first, after links and waits are slowed where `settings` say so.

    Parameters
    ----------
    settings : Settings
        How it is measured, with `Settings.waits`.
    order : str
        The directions of the grid from the one that varies slowest over the nodes to the fastest.

    Raises
    ------
    Failed
        On every rank, when the words that the step moves, or the seconds that it waits, are not
        those of a dry run of the rank, or the rate of links cannot be changed.
    """
    work, comm, dilation = settings.waits(one), scheme.grid.comm, settings.dilation
    groups, factor = {}, None
    trace = trace_row(one, scheme, settings, work)
    with waited_work([scheme.grid], work.seconds, work.block) as backend:
        model = mm3d.Transformer(
            scheme, row_stack(one.variant, one.sizes, settings.recompute, settings.seed))
        x, dy = model.random("input"), model.random("output gradient")
        with settings.watched(scheme.grid, model):
            if dilation:
                predicted = make_on_rank_0(lambda: dilation.predict(
                    one, model.grid.shape, order, dilation.link), comm) or ({}, {})
                step = partial(time_phases, model, x, dy, Clock(comm))
                factor, samples = slow_down(comm, backend.trace, dilation, step,
                                            sum(map(sum, predicted[0].values())))
                if comm.rank == 0:
                    groups = dilation_groups(samples, predicted)
            modelled = [backend.trace.pace * trace.work(work.seconds, phase)
                        for phase in PHASES]
            counted, passed, moved = count_phases(model, x, dy, backend.trace)
        check_with_dry_run(comm, {
            phase: (found, trace.traffic[phase], *seconds)
            for phase, found, *seconds in zip(PHASES, moved, counted, modelled)})
        yield TimedModel(model, x, dy, groups | waits_group(comm, modelled, counted, passed),
                         factor)


def trace_row(one: Case, scheme, settings: Settings, work: ModelledWork) -> Trace:
    """Run the step of this rank dry."""
    grid, stack = scheme.grid, row_stack(one.variant, one.sizes, settings.recompute)
    return dry_run.extrapolate_step(
        scheme.name, grid.size, grid.shape.sizes, grid.rank, block=work.block,
        options=one.variant.options(scheme.name), **stack.fields())


def count_phases(model: mm3d.Transformer, x: Any, dy: Any, clock: WorkClock) -> tuple[
        list[float], list[tuple[float, float]], list[dict]]:
    """Do a step; return by phase the seconds counted, (slept, overlapped), and the traffic."""
    counted, passed, moved = [], [], []

    def note() -> None:
        clock.settle()
        counted.append(clock.counted)
        passed.append((clock.slept, clock.overlapped))
        moved.append(model.grid.traffic())
        clock.reset()
        model.grid.reset_traffic()

    model.zero_gradients()
    clock.reset()
    model.grid.reset_traffic()
    _, saved = model.forward(x)
    note()
    model.backward(dy, saved)
    note()
    return counted, passed, moved


def check_with_dry_run(comm: Any, parts: dict[str, tuple[dict, dict, float, float]]) -> None:
    """Raise Failed, on every rank, where a step is not as the dry run of a rank says.

    `parts` are, by name, its traffic and that of the dry run, and the seconds waited and modelled.
    """
    problem = ""
    for name, (moved, expected, waited, modelled) in parts.items():
        if moved != expected:
            problem = f"{name} moves other words than its dry run"
        elif not abs(waited - modelled) <= ROUNDING * modelled:
            problem = (f"{name} waits {waited:g} s for its work, which takes {modelled:g} s by "
                       f"the model")
    agree(problem, comm, Failed)


def waits_group(comm, modelled: list[float], counted: list[float],
                passed: list[tuple[float, float]]) -> dict[str, Group]:
    """Return the group ``waits`` of a run by its name, on rank 0; none on the other ranks."""
    everyone = comm.gather((modelled, counted, *zip(*passed)))
    if everyone is None:
        return {}
    columns = np.array(everyone).transpose(1, 2, 0)    # kinds of seconds, phases, ranks
    names = ("modelled", "counted", "slept", "overlapped")
    return {"waits": make_group("model.waits", {"s": dict(zip(names, columns))})}
