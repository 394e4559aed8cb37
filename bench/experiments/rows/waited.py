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
from bench.experiments.rows.settings import Settings
from bench.instruments.clock import Clock
from bench.instruments.timing import time_phases
from bench.instruments.waited_work import WorkClock, waited_work
from bench.records.model_run import make_group
from bench.records.measurements import Group
from mm3d.tracing import dry_run
from mm3d.tracing.events import PHASES

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

    One step is counted first, after links and waits are slowed where `settings` say so.  `order`
    has the directions of the grid from the one that varies slowest over the nodes to the fastest.

    Raises Failed on every rank, when the words that the step moves, or the seconds that it waits,
    are not those of a dry run of the rank, or the rate of links cannot be changed.
    """
    work, comm, dilation = settings.waits(one), scheme.grid.comm, settings.dilation
    groups, factor = {}, None
    grid, stack = scheme.grid, row_stack(one.variant, one.sizes, settings.recompute)
    trace = dry_run.extrapolate_step(
        scheme.name, grid.size, grid.shape.sizes, grid.rank, block=work.block,
        options=one.variant.options(scheme.name), **stack.fields())
    with waited_work([grid], work.seconds, work.block) as backend:
        model = mm3d.Transformer(
            scheme, row_stack(one.variant, one.sizes, settings.recompute, settings.seed))
        x, dy = model.random("input"), model.random("output gradient")
        with settings.watched(grid, model):
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
            model.zero_gradients()
            take_counts(grid, backend.trace)
            _, saved = model.forward(x)
            forward = take_counts(grid, backend.trace)
            model.backward(dy, saved)
            found = forward, take_counts(grid, backend.trace)
        check_with_dry_run(comm, {
            phase: (one.moved, trace.traffic[phase], one.work, seconds)
            for phase, one, seconds in zip(PHASES, found, modelled)})
        everyone = comm.gather([(seconds, one.work, one.slept, one.overlapped)
                                for seconds, one in zip(modelled, found)])
        if everyone is not None:    # as (kinds of seconds, phases, ranks)
            columns = np.array(everyone).transpose(2, 1, 0)
            groups["waits"] = make_group("model.waits", {"s": dict(zip(
                ("modelled", "counted", "slept", "overlapped"), columns))})
        yield TimedModel(model, x, dy, groups, factor)


@dataclass(frozen=True)
class Counted:
    """What this rank did in a step, or in a phase of it.

    Attributes
    ----------
    moved : dict
        Its traffic, by direction and collective.
    work, slept, overlapped : float
        Seconds of its work; of them slept, and passed while the host worked.
    """

    moved: dict[tuple[str, str], Any]
    work: float = 0.0
    slept: float = 0.0
    overlapped: float = 0.0


def take_counts(owner: Any, clock: WorkClock | None = None) -> Counted:
    """Return what was counted of a grid, or a GPT, since this was last called; it begins anew."""
    waits: tuple[float, ...] = ()
    if clock:
        clock.settle()
        waits = clock.counted, clock.slept, clock.overlapped
        clock.reset()
    moved = {key: one for key, one in owner.traffic().items() if one.calls}
    owner.reset_traffic()
    return Counted(moved, *waits)


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
