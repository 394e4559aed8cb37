"""Measure schemes on one emulated cluster at several rates of its links."""

import random
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Callable, Iterator, Sequence

import numpy as np

import mm3d
from bench.cases.case import Case
from bench.cases.row_stack import row_stack
from bench.experiments.rows.dilation import (KINDS, Dilation, Predicted, set_links,
                                             time_phases)
from bench.experiments.rows.row import (fail_on_value_error, free_at_end, run_counted_step,
                                        verify_step)
from bench.experiments.rows.settings import Settings, choose_grid
from bench.experiments.rows.waited import TimedModel, waiting_model
from bench.instruments import placement, sampling
from bench.instruments.clock import Clock
from bench.records.measurements import Check, Measurements, Setting, Variable
from mm3d.arrays import backend as backends
from mm3d.grid.shape import GridShape
from mm3d.tracing.events import PHASES

KIND = "sweep"


@dataclass(frozen=True)
class SweepPlan:
    """A scheme on a grid with a batch, to measure in a sweep.

    Attributes
    ----------
    case : Case
        The row of its scheme, and its sizes.
    grid : tuple of int, optional
        Sizes of the grid's directions; the scheme's own by default.
    inside : str
        The direction that stays inside a node, or "auto"; see
        `bench.instruments.placement.direction_order`.
    """

    case: Case
    grid: tuple[int, ...] | None = None
    inside: str = "auto"


@dataclass(frozen=True)
class ReadyPlan:
    """A verified plan whose ranks wait for their work.

    Attributes
    ----------
    plan : SweepPlan
        The plan.
    grid : GridShape
        Its grid.
    order : str
        The directions from the one that varies slowest over the nodes to the fastest.
    timed : TimedModel
        Its model.
    checks : list of Check
        The comparison of its results with the serial scheme's.
    """

    plan: SweepPlan
    grid: GridShape
    order: str
    timed: TimedModel
    checks: list[Check]

    @property
    def label(self) -> str:
        """Scheme, grid, placement, batch and any overlap: ``3d 4x4x4 xyz 384 overlap=4``."""
        one = self.plan.case
        return (f"{one.row.scheme} {self.grid.compact} {self.order} {one.sizes.batch}"
                + f" overlap={one.variant.overlap}" * bool(one.variant.overlap))


def measure_sweep(plans: Sequence[SweepPlan], links: Sequence[float | None], rounds: int,
                  settings: Settings, dilation: Dilation, world,
                  say: Callable[[str], None]) -> Measurements | None:
    """Verify all plans, and time a step of each at every rate of the links, in rounds.

    A round takes the rates in random order, and at each rate the plans in random order.  It also
    times each plan without links and waits, which is the software.

    Parameters
    ----------
    plans : sequence of SweepPlan
        Plans of one table, of as many ranks as `world` has.
    links : sequence of float or None
        Rates in bit/s; None for links without a limit.
    rounds : int
        Number of rounds.
    settings : Settings
        How ranks wait for their work.
    dilation : Dilation
        Predicts plans, and sets the rate of all links; nothing else is slowed.
    world : mpi4py.MPI.Intracomm
        All ranks; each must call this.
    say : callable
        Prints a line of progress; called on rank 0.

    Returns
    -------
    Measurements or None
        On rank 0; None on the others.

    Raises
    ------
    Failed
        On every rank, when the sizes do not fit a scheme, or a result is wrong.
    """
    draw = random.Random(settings.order)
    found = np.full((len(plans), len(links) + 1, len(PHASES), rounds), np.nan)
    set_links(None, world, dilation.change)    # untimed work need not wait for links
    with ExitStack() as stack:
        ready = [stack.enter_context(prepare_plan(plan, settings, world)) for plan in plans]
        predicted = [[dilation.predict(one.plan.case, one.grid, one.order, link)
                      for link in links] for one in ready if world.rank == 0]
        clocks = [Clock(one.timed.model.grid.comm) for one in ready]
        for turn in range(rounds):
            for at in draw.sample(range(len(links) + 1), len(links) + 1):
                waits = at < len(links)
                set_links(links[at] if waits else None, world, dilation.change)
                for which in draw.sample(range(len(ready)), len(ready)):
                    timed = ready[which].timed
                    timed.model.grid.backend.trace.pace = float(waits)
                    with settings.watched(timed.model.grid, timed.model):
                        found[which, at, :, turn] = time_phases(timed.model, timed.x, timed.dy,
                                                                clocks[which])
            if world.rank == 0:
                say(f"{plans[0].case.row.table}: round {turn + 1} of {rounds}")
        set_links(dilation.link, world, dilation.change)
        environment = sampling.measured_environment(backends.get(settings.backend).name, world)
        return (None if world.rank else
                sweep_record(ready, links, found, predicted, settings, environment))


@contextmanager
def prepare_plan(plan: SweepPlan, settings: Settings, world) -> Iterator[ReadyPlan]:
    """Build and verify a plan; within the block its ranks wait for their work.

    Raises
    ------
    Failed
        On every rank, when the sizes do not fit the scheme, or its result is wrong.
    """
    one = plan.case
    settings = replace(settings, inside=plan.inside,
                       grid=(lambda _: plan.grid) if plan.grid else None)
    shape, order = fail_on_value_error(lambda: choose_grid(one, settings, world))
    comm = placement.reorder_ranks(world, shape, order)
    with free_at_end(comm.Free):
        scheme = fail_on_value_error(lambda: mm3d.scheme(
            one.row.scheme, comm, shape.sizes, settings.backend,
            **one.variant.options(one.row.scheme)))
        with free_at_end(scheme.grid.free):
            model = mm3d.Transformer(
                scheme, row_stack(one.variant, one.sizes, settings.recompute, settings.seed))
            y, dx, _ = run_counted_step(model, model.random("input"),
                                        model.random("output gradient"))
            checks = verify_step(one, scheme, model, y, dx, settings)
            del model, y, dx
            with waiting_model(one, scheme, settings, order) as timed:
                yield ReadyPlan(plan, shape, order, timed, checks)


def sweep_record(ready: Sequence[ReadyPlan], links: Sequence[float | None], found: np.ndarray,
                 predicted: Sequence[Sequence[Predicted]], settings: Settings,
                 environment: dict[str, Setting]) -> Measurements:
    """Make the record of a sweep, on rank 0."""
    seconds = [[[one[phase] for phase in PHASES] for one in plan] for plan in predicted]
    first = ready[0].plan.case
    sizes = {name: value for name, value in first.sizes.items() if name != "batch"}
    waited = settings.waits(first).settings if settings.waits else {}
    modelled = [one.timed.waits.variables["modelled"].values.max(axis=1) for one in ready]
    return Measurements(
        KIND, {"table": first.row.table, "preset": first.preset, **sizes,
               "mlp_factor": first.sizes.mlp_factor, **asdict(first.variant), **waited,
               "recompute": settings.recompute, "seed": settings.seed, "order": settings.order},
        environment,
        {"plan": [one.label for one in ready], "phase": PHASES,
         "link": [np.inf if link is None else float(link) for link in links], "kind": KINDS,
         "repetition": range(found.shape[-1])},
        {"samples": Variable(found[:, :-1], "s", ("plan", "link", "phase", "repetition")),
         "software": Variable(found[:, -1], "s", ("plan", "phase", "repetition")),
         "predicted": Variable(np.array(seconds), "s", ("plan", "link", "phase", "kind")),
         "work": Variable(np.array(modelled), "s", ("plan", "phase"))},
        [replace(check, quantity=f"{one.label}: {check.quantity}")
         for one in ready for check in one.checks])
