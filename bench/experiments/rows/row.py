"""Measure one row: build its model, verify a step, repeat it, and trace it."""

import sys
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from typing import Any, Callable, Iterator

import numpy as np
from mpi4py import MPI

import mm3d
from bench.cases.case import Case, row_stack
from bench.cases.paper import Row
from bench.checks import against_serial, layer_residuals
from bench.cluster.spec import Cluster
from bench.checks.passed import require_passed
from bench.errors import Failed
from bench.experiments.rows.dilation import note_dilation, run_free, set_links
from bench.experiments.rows.settings import Settings, choose_grid
from bench.experiments.rows.waited import TimedModel, waiting_model
from bench.instruments import chrome_trace, host, peak_memory, placement, step_tracing, timing
from bench.instruments.peaks import StepMemory
from bench.instruments.spans import Span
from bench.instruments.wire import count_wire
from bench.records import model_run
from bench.records.model_run import (make_group, make_record, traffic_group,
                                     transport_names)
from bench.records.kinds.model import expected_words
from bench.records.measurements import Check, Group, Setting, grid_settings
from mm3d.grid.axis import COLLECTIVES
from mm3d.model.architecture import INNER_FACTOR
from mm3d.tracing.events import PHASES

COUNTS = (*model_run.TRAFFIC_COUNTS, "moved")


def measure_case(one: Case, settings: Settings, peaks: Group | None, world,
                 trace: bool) -> tuple[model_run.Run | None, dict[str, Any] | None]:
    """Verify and measure one case, of as many ranks as `world` has; each must call this.

    Parameters
    ----------
    peaks : Group or None
        The machine's rates, on rank 0, which are recorded; see
        `bench.instruments.peaks.measure_peaks`.
    trace : bool
        Whether to return a trace, if `settings` has steps to trace.

    Returns
    -------
    Run or None, dict or None
        The record; and, where it was asked for, the last traced step of all ranks as
        `bench.instruments.chrome_trace.make_trace`.  None on all ranks but the first.

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
    shape, order = fail_on_value_error(lambda: choose_grid(one, settings, world))
    settings.fits(one, shape.sizes, world)
    if settings.dilation:
        set_links(None, world, settings.dilation.change)    # untimed work need not wait
    comm = placement.reorder_ranks(world, shape, order)
    with free_at_end(comm.Free):
        scheme = fail_on_value_error(lambda: mm3d.scheme(
            one.row.scheme, comm, shape.sizes, settings.backend,
            **one.variant.options(one.row.scheme)))
        with free_at_end(scheme.grid.free):
            return _measure_on_grid(one, scheme, order, settings, peaks, trace)


def fail_on_value_error(make: Callable[[], Any]) -> Any:
    """Return what `make` returns; raise its ValueError, the same on every rank, as Failed."""
    try:
        return make()
    except ValueError as error:
        raise Failed(str(error)) from error


@contextmanager
def free_at_end(free: Callable[[], None]) -> Iterator[None]:
    """Call `free` on all ranks at the end of the block, also when all ranks raise Failed.

    After any other exception it is not called: one rank alone may have raised it, and would wait
    for the others.
    """
    try:
        yield
    except Failed:
        free()
        raise
    free()


def _measure_on_grid(one: Case, scheme, order: str, settings: Settings, peaks: Group | None,
                     trace: bool) -> tuple[model_run.Run | None, dict[str, Any] | None]:
    """Verify, time and trace one case on the grid of `scheme`; see `measure_case`."""
    resident, comm = peak_memory.Resident(), scheme.grid.comm
    model = fail_on_value_error(lambda: mm3d.Transformer(
        scheme, row_stack(one.variant, one.sizes, settings.recompute, settings.seed)))
    x, dy = model.random("input"), model.random("output gradient")
    memory = StepMemory(model, resident)
    with settings.watched(scheme.grid, model):
        y, dx, traffic = run_counted_step(model, x, dy, memory.note_saved)
    groups = {"machine": peaks, "memory": memory.group(comm)}
    checks = _verify_row(one, scheme, model, y, dx, settings)
    del y, dx
    if one.verified != one.sizes:
        checks += require_passed(layer_residuals.check_step(model, x, dy, settings.seed),
                                 "the measured model's own step is wrong: ", Failed)
    with (waiting_model(one, scheme, settings, order) if settings.waits
          else nullcontext(TimedModel(model, x, dy))) as timed:
        del model, x, dy
        groups |= timed.groups
        step, times, spans, groups["parts"] = _time_and_trace(timed, settings)
        if settings.dilation:    # bytes are counted, not timed
            run_free(comm, timed.model.grid.backend.trace, settings.dilation)
        groups["wire"] = _wire_of_step(step, timed.model, settings)
    everyone = comm.gather(traffic)
    nodes = placement.placement_outcome(comm, scheme.grid.shape, order)
    document = (chrome_trace.gather_trace(spans, scheme.grid, step.clock, one.title)
                if trace else None)
    if times is None:
        return None, None
    waits = settings.waits(one).settings if settings.waits else {}
    configuration = _row_configuration(one, scheme, settings) | asdict(nodes) | waits
    groups |= {
        "traffic": traffic_group(
            dict(zip(COUNTS, np.stack(everyone, axis=2))),
            expected_words(scheme.name, scheme.grid.shape, one.sizes, one.variant,
                           settings.recompute), model_run.directions_of(scheme.grid.shape)),
        "clock": make_group("model.clock", {"s": {"resolution": times.clock_resolution,
                                                  "offset_error": times.clock_offset_error}}),
        "published": published_row(one.row)}
    record = make_record(
        "model",
        configuration | {"transport": transport_names(scheme.grid), "ended_by": times.ended_by},
        host.describe_host(scheme.grid.backend.name, comm.size, MPI.Get_library_version(),
                           host.command_line(sys.argv[1:])),
        {"s": times.samples | {f"{phase}_late": late for phase, late in times.late.items()}},
        checks)
    record.groups.update({name: group for name, group in groups.items() if group})
    if timed.factor:
        note_dilation(record, timed.factor, settings.dilation)
    return record, document


def _row_configuration(one: Case, scheme, settings: Settings) -> dict[str, Setting]:
    """Return all settings that determine a run of the case on the grid of `scheme`."""
    shape, variant = scheme.grid.shape, asdict(one.variant)
    verified_sizes = {f"verified_{name}": value for name, value in one.verified.items()}
    return {"table": one.row.table, "scheme": one.row.scheme, "preset": one.preset,
            **grid_settings(shape), "mlp_factor": INNER_FACTOR,
            "seed": settings.seed, **variant, "recompute": settings.recompute,
            "warmup": settings.warmup, "order": settings.order, **asdict(settings.limits),
            "overridden": " ".join([*one.overridden, *["grid"] * (settings.grid is not None)]),
            "verified_measured_model": one.verified == one.sizes,
            "verified_by": "serial model" if one.verified == one.sizes else "residuals",
            **({"equal_tokens": one.row.like} if one.row.like else {}),
            **one.sizes, **verified_sizes}


def published_row(row: Row) -> Group:
    """Return the row as the paper prints it, by the names that files use."""
    return make_group("model.published", {
        "1": {"gpus": row.gpus, "batch": row.batch, "hidden": row.hidden},
        "s": {"forward_time": row.forward, "backward_time": row.backward,
              "average_step_time": row.average, "recomputed_step_time": row.recomputed}})


def _time_and_trace(timed: TimedModel, settings: Settings) -> tuple[
        timing.Step, timing.TimedSteps | None, list[Span], Group | None]:
    """Repeat the step of a model until the limits are reached, and then trace it.

    Returns the step, its times on rank 0, None on the others, and what
    `bench.instruments.step_tracing.trace_steps` does.  Raises Failed on every rank, when no
    repetition counts, as the job is to stop.
    """
    model, comm = timed.model, timed.model.grid.comm
    step = timing.Step(lambda: model.forward(timed.x)[1],
                       lambda saved: model.backward(timed.dy, saved),
                       comm, model.grid.backend.synchronize, model.zero_gradients)
    # The step that was counted and verified was the first warm-up step.
    with settings.watched(model.grid, model):
        times = timing.measure(step, settings.warmup - 1, settings.limits, settings.stop)
    if comm.bcast(times is not None and not len(times.samples["forward"])):
        raise Failed("stopped before the first repetition that counts")
    if comm.bcast(comm.rank == 0 and settings.stop()):
        return step, times, [], None
    return step, times, *step_tracing.trace_steps(step, model, settings.traced)


def _wire_of_step(step: timing.Step, model, settings: Settings) -> Group | None:
    """Return a run's group ``wire`` on rank 0; None elsewhere, without a cluster, or at a stop."""
    comm = model.grid.comm
    if Cluster.from_environment() is None or comm.bcast(comm.rank == 0 and settings.stop()):
        return None
    with settings.watched(model.grid, model):
        return count_wire(step, model.grid)


def _verify_row(one: Case, scheme, model, y, dx, settings: Settings) -> list[Check]:
    """Compare a step of `model`, which gave `y` and `dx`, with the serial scheme's.

    Where the preset has no serial model of the measured size, a smaller model is compared; the
    measured one is then left to `bench.checks.layer_residuals`.

    Raises Failed when a check does not pass.
    """
    checked = model
    if one.verified != one.sizes:
        checked = mm3d.Transformer(
            scheme, row_stack(one.variant, one.verified, settings.recompute, settings.seed))
        y, dx, _ = run_counted_step(checked, checked.random("input"),
                                    checked.random("output gradient"))
    return require_passed(against_serial.compare_with_serial(checked, y, dx, one.variant.rounding),
                          "differs from the serial scheme: ", Failed)


def run_counted_step(model, x, dy,
                     between: Callable[[Any], None] = lambda saved: None) -> tuple:
    """Run one step from cleared gradients and count its traffic.

    `x` and `dy` are this rank's blocks of the input and of the output's gradient; `between` is
    given what forward saved for backward.

    Returns this rank's blocks of the output and of the input's gradient, and its traffic,
    (`COUNTS`, phases, directions, collectives) in the orders of a file, as float64, which holds
    such numbers exactly.
    """
    grid = model.grid
    directions = model_run.directions_of(grid.shape)
    counted = np.zeros((len(COUNTS), len(PHASES), len(directions), len(COLLECTIVES)))

    def note(phase: int) -> None:
        for (axis, collective), traffic in grid.traffic().items():
            place = directions.index(axis), COLLECTIVES.index(collective)
            counted[(slice(None), phase, *place)] = [getattr(traffic, name) for name in COUNTS]
        grid.reset_traffic()

    model.zero_gradients()
    grid.reset_traffic()
    y, saved = model.forward(x)
    note(0)
    between(saved)
    dx = model.backward(dy, saved)
    note(1)
    return y, dx, counted
