"""Measure one row: build its model, verify a step, repeat it, and trace it."""

import sys
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any, Callable, Iterator, NamedTuple

import numpy as np
from mpi4py import MPI

import mm3d
from bench.cases.case import Case
from bench.checks import against_serial, layer_residuals
from bench.errors import Failed
from bench.experiments.products import operands
from bench.experiments.rows.record import configuration, expected_words, published
from bench.experiments.rows.settings import Settings, arranged
from bench.instruments import (chrome_trace, host, peak_memory, placement, step_tracing,
                               timing)
from bench.instruments.peaks import StepMemory
from bench.records import run_file
from bench.records.measurements import Check, Group
from mm3d.grid.axis import COLLECTIVES
from mm3d.tracing.events import PHASES


class Measured(NamedTuple):
    """A row that was measured.

    Attributes
    ----------
    record : Run or None
        On rank 0; None on the others.
    trace : dict or None
        The last traced step of all ranks as `bench.instruments.chrome_trace.make_trace`, where it
        was asked for; on rank 0, None on the others.
    """

    record: run_file.Run | None
    trace: dict[str, Any] | None = None


def measure(one: Case, settings: Settings, peaks: Group | None, world,
            trace: bool = False) -> Measured:
    """Verify and measure one case.

    Parameters
    ----------
    one : Case
        The case, of as many ranks as `world` has.
    settings : Settings
        How it is measured.
    peaks : Group or None
        The machine's rates, on rank 0, which are recorded; see
        `bench.instruments.peaks.measure_peaks`.
    world : mpi4py.MPI.Intracomm
        All ranks; each must call this.
    trace : bool
        Whether to return a trace, if `settings` has steps to trace.

    Raises
    ------
    Failed
        On every rank, when the sizes do not fit the scheme, the result differs from the serial
        scheme's, or the job is to stop before the first repetition that counts.
    LeftOut
        On every rank, before anything is computed, when `settings` say that memory is lacking.
    """
    if world.bcast(world.rank == 0 and settings.stop()):
        raise Failed("not begun, as it was told to stop")
    shape, order = possible(lambda: arranged(one, settings, world))
    settings.fits(one, shape.sizes, world)
    comm = placement.reorder_ranks(world, shape, order)
    with freeing(comm.Free):
        scheme = possible(lambda: mm3d.scheme(one.row.scheme, comm, shape.sizes,
                                              settings.backend,
                                              **one.variant.options(one.row.scheme)))
        with freeing(scheme.grid.free):
            return measured(one, scheme, order, settings, peaks, trace)


def possible(make: Callable[[], Any]) -> Any:
    """What `make` gives; its ValueError, which is the same on every rank, as Failed."""
    try:
        return make()
    except ValueError as error:
        raise Failed(str(error)) from error


@contextmanager
def freeing(free: Callable[[], None]) -> Iterator[None]:
    """Call `free` on all ranks at the end, also when all have failed.

    Not after another exception: one rank may be alone with it, and would wait for the others.
    """
    try:
        yield
    except Failed:
        free()
        raise
    free()


def measured(one: Case, scheme, order: str, settings: Settings, peaks: Group | None,
             trace: bool) -> Measured:
    """Measure one case on the grid of `scheme`; see `measure`."""
    resident, comm = peak_memory.Resident(), scheme.grid.comm
    model = possible(lambda: against_serial.build(scheme, one.sizes, settings.seed,
                                                  one.variant.dtype,
                                                  one.variant.causal, settings.recompute))
    x, dy = model.random("input"), model.random("output gradient")
    memory = StepMemory(model, resident)
    with settings.watched(scheme.grid, model):
        y, dx, traffic = counted_step(model, x, dy, memory.between)
    groups = {"machine": peaks, "memory": memory.group(one.sizes, comm, one.variant)}
    checks = verified(one, scheme, model, y, dx, settings)
    del y, dx
    if one.verified != one.sizes:
        checks += looked_at(model, x, dy, settings)
    step = timing.Step(lambda: model.forward(x)[1], lambda saved: model.backward(dy, saved),
                       comm, scheme.grid.backend.synchronize, model.zero_gradients)
    # The step that was counted and verified has been the first to warm up.
    with settings.watched(scheme.grid, model):
        found = timing.measure(step, settings.warmup - 1, settings.limits, settings.stop)
    if comm.bcast(found is not None and not len(found.samples["forward"])):
        raise Failed("stopped before the first repetition that counts")
    spans = []
    if not comm.bcast(comm.rank == 0 and settings.stop()):
        spans, groups["parts"] = step_tracing.trace_steps(step, model, settings.traced)
    everyone = comm.gather(traffic)
    nodes = placement.placement_outcome(comm, scheme.grid.shape, order)
    document = (chrome_trace.gather_trace(spans, scheme.grid, step.clock, one.title)
                if trace else None)
    if found is None:
        return Measured(None)
    return Measured(run_file.Run(
        configuration(one, scheme, settings) | asdict(nodes) | {
            "transport": operands.transport(scheme.grid)},
        host.describe_host(scheme.grid.backend.name, comm.size, MPI.Get_library_version(),
                           host.command_line(sys.argv[1:])),
        found.samples, dict(zip((*run_file.COUNTS, "moved"), np.stack(everyone, axis=2))),
        expected_words(scheme.name, scheme.grid.shape, one.sizes, one.variant.keep,
                       settings.recompute), checks,
        published(one.row),
        late=found.late, ended_by=found.ended_by,
        clock={"resolution": found.clock_resolution, "offset_error": found.clock_offset_error},
        groups={name: group for name, group in groups.items() if group is not None},
        directions=run_file.directions_of(scheme.grid.shape)), document)


def verified(one: Case, scheme, model, y, dx, settings: Settings) -> list[Check]:
    """The checks, all passed, of a step of `model` that gave `y` and `dx`.

    Of a smaller model's, where the preset has no serial model of the measured size; the measured
    one is then `looked_at`.

    Raises
    ------
    Failed
        When a check does not pass.
    """
    checked = model
    if one.verified != one.sizes:
        checked = against_serial.build(scheme, one.verified, settings.seed, one.variant.dtype,
                                       one.variant.causal, settings.recompute)
        y, dx, _ = counted_step(checked, checked.random("input"),
                                checked.random("output gradient"))
    checks = against_serial.compare(checked, y, dx, one.verified, settings.seed,
                                    one.variant.rounding,
                                    causal=one.variant.causal)
    problem = against_serial.failure(checks)
    if problem:
        raise Failed(problem)
    return checks


def looked_at(model, x, dy, settings: Settings) -> list[Check]:
    """The residuals, all passed, of one step of the model that is measured.

    Raises
    ------
    Failed
        When one does not pass; the same on every rank.
    """
    checks = layer_residuals.step(model, x, dy, settings.seed)
    problem = layer_residuals.failure(checks)
    if problem:
        raise Failed(problem)
    return checks


def counted_step(model, x, dy, between: Callable[[Any], None] = lambda saved: None) -> tuple:
    """One step from cleared gradients: output, input gradient, and this rank's traffic.

    The traffic is float64, which holds such numbers exactly, (counts and "moved", phases,
    directions, collectives) in `bench.records.run_file`'s orders.  `between` is handed what
    forward saved for backward.
    """
    grid, names = model.grid, (*run_file.COUNTS, "moved")
    directions = run_file.directions_of(grid.shape)
    found = np.zeros((len(names), len(PHASES), len(directions), len(COLLECTIVES)))

    def note(phase: int) -> None:
        for (axis, collective), traffic in grid.traffic().items():
            place = directions.index(axis), COLLECTIVES.index(collective)
            found[(slice(None), phase, *place)] = [getattr(traffic, name) for name in names]
        grid.reset_traffic()

    model.zero_gradients()
    grid.reset_traffic()
    y, saved = model.forward(x)
    note(0)
    between(saved)
    dx = model.backward(dy, saved)
    note(1)
    return y, dx, found
