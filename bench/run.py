"""The verb ``run``: measure the rows whose rank count is that of the job."""

import gc
import random
import sys
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, Callable, Iterator

import msgspec
import numpy as np
from mpi4py import MPI

import mm3d
from bench import (chrome, footprint, journal, machine, operands, placement, residuals, traced,
                   verify, yardsticks)
from bench.cases import Case, shuffled, step_counts, traced_steps
from bench.job import (Options, arranged, fitting, left_out, planned_for, selected, usable,
                       variant_of, verifiable)
from bench.journal import writable
from bench.output import say
from bench.provenance import command_line, configuration, expected_words, published
from bench.watch import unwatched
from mm3d import backend as backends
from mm3d import store, timing
from mm3d.record import Group
from mm3d.spans import Span


class Failed(Exception):
    """A row that could not be measured, for a reason that is the same on every rank."""


def run(arguments, comm) -> int:
    """Measure every selected row that has `comm.size` ranks; the exit status.

    Raises
    ------
    UsageError
        When no row has that many ranks, or an argument cannot be meant.
    StoreError
        When the results folder cannot be written.
    """
    rows = selected(arguments, comm.size)
    warmup, limits = step_counts(arguments)
    planned = planned_for(arguments, comm)
    usable(arguments.backend, comm)
    variant = variant_of(arguments, rows)
    cases = verifiable(fitting(rows, comm.size, arguments, variant))
    order = comm.bcast(random.SystemRandom().randrange(2 ** 31) if arguments.order is None
                       else arguments.order)
    out = writable(arguments.out, comm)
    options = Options(out=out, backend=arguments.backend,
                      seed=arguments.seed, warmup=warmup, limits=limits, order=order,
                      grid=arguments.grid, machine=planned, inside=arguments.inside,
                      stop_file=arguments.stop_file, traced=traced_steps(arguments),
                      trace=chrome.asked_for(arguments, comm), cases=len(cases),
                      watched=getattr(arguments, "watched", unwatched),
                      recompute=arguments.recompute)
    if comm.rank == 0:
        for line in left_out(arguments.rows, comm.size):
            say(line)
    rates = yardsticks.peaks(backends.get(options.backend), variant.dtype, comm)
    return max([report(one, options, rates, comm) for one in shuffled(cases, order)])


def report(one: Case, options: Options, rates: Group | None, comm) -> int:
    """Measure one case and say in a line of rank 0 what came of it; 0 when all was written.

    `rates` are the machine's, on rank 0; see `bench.yardsticks.peaks`.
    """
    # What the last row held goes back before this one asks for memory.
    gc.collect()
    backends.get(options.backend).trim()
    try:
        if comm.bcast(comm.rank == 0 and options.stop()):
            raise Failed("not begun, as it was told to stop")
        text, status = measure(one, options, rates, comm)
        line = f"done: {one.title}: {text}"
    except Failed as error:
        line, status = f"failed: {one.title}: {error}", 1
    if comm.rank == 0:
        journal.of(options.out).write("row", row=one.name, outcome=line.partition(":")[0],
                                      line=line)
        say(line)
    return status


def measure(one: Case, options: Options, rates: Group | None, world) -> tuple[str, int]:
    """Verify and measure one case and write its file; a summary of it, and 1 without its trace.

    Raises
    ------
    Failed
        When the sizes do not fit the scheme, the result differs from the serial scheme's, or
        the file cannot be written.
    """
    shape, order = possible(lambda: arranged(one, options, world))
    comm = placement.placed(world, shape, order)
    with freeing(comm.Free):
        scheme = possible(lambda: mm3d.scheme(one.row.scheme, comm, tuple(shape.values()),
                                              options.backend,
                                              **one.variant.options(one.row.scheme)))
        with freeing(scheme.grid.free):
            record, spans, clock = measured(one, scheme, order, options, rates)
            outcome = record and written(record, one, options.out)
            timing.wait_patiently(comm)    # while rank 0 writes
            succeeded, text = comm.bcast(outcome)
            if not succeeded:
                raise Failed(text)
            status = 0
            if options.trace:
                status = chrome.write(chrome.named(options.trace, one.name, options.cases), spans,
                                      scheme.grid, clock, one.title)
            return text, status


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


def measured(one: Case, scheme, order: str, options: Options,
             rates: Group | None) -> tuple[store.Run | None, list[Span], timing.Clock]:
    """What was measured, on rank 0; and this rank's spans of the last traced step, on a clock."""
    resident, comm = footprint.Resident(), scheme.grid.comm
    model = possible(lambda: verify.build(scheme, one.sizes, options.seed, one.variant.dtype,
                                          one.variant.causal, options.recompute))
    x, dy = model.random("input"), model.random("output gradient")
    memory = yardsticks.StepMemory(model, resident)
    with options.watched(scheme.grid, model):
        y, dx, traffic = counted_step(model, x, dy, memory.between)
    groups = {"machine": rates, "memory": memory.group(
        msgspec.structs.asdict(one.sizes), comm, one.variant)}
    checks = verified(one, scheme, model, y, dx, options)
    del y, dx
    if one.verified != one.sizes:
        checks += looked_at(model, x, dy, options)
    step = timing.Step(lambda: model.forward(x)[1], lambda saved: model.backward(dy, saved),
                       comm, scheme.grid.backend.synchronize, model.zero_gradients)
    # The step that was counted and verified has been the first to warm up.
    with options.watched(scheme.grid, model):
        found = timing.measure(step, options.warmup - 1, options.limits, options.stop)
    spans = []
    if not comm.bcast(comm.rank == 0 and options.stop()):
        spans, groups["parts"] = traced.traced(step, model, options.traced)
    everyone = comm.gather(traffic)
    nodes = placement.found(comm, scheme.grid.shape, order)
    record = None
    if found is not None:
        clock = {"resolution": found.clock_resolution, "offset_error": found.clock_offset_error}
        record = store.Run(
            configuration(one, scheme, options) | asdict(nodes) | {
                "transport": operands.transport(scheme.grid)},
            machine.describe(scheme.grid.backend.name, comm.size, MPI.Get_library_version(),
                             command_line(sys.argv[1:])),
            found.samples, dict(zip((*store.COUNTS, "moved"), np.stack(everyone, axis=2))),
            expected_words(scheme.name, scheme.grid.shape, one.sizes, one.variant.keep,
                           options.recompute), checks,
            published(one.row),
            late=found.late, ended_by=found.ended_by, clock=clock,
            groups={name: group for name, group in groups.items() if group is not None},
            directions=store.directions_of(scheme.grid.shape))
    return record, spans, step.clock


def written(record: store.Run, one: Case, out: Path) -> tuple[bool, str]:
    """Write `record`: whether it was, and a summary or what went wrong."""
    if not len(record.samples["forward"]):
        return False, "stopped before the first repetition that counts"
    if journal.taken_over(out):
        return False, f"another reproduce has taken over {out.name}"
    try:
        path = store.write(record, out, one.name)
    except store.StoreError as error:
        return False, str(error)
    forward, backward = (timing.typical(record.samples[phase]) for phase in store.PHASES)
    serial, own = residuals.apart(record.checks)
    error = max(check.error for check in serial)
    model = "a smaller model differs" if own else "differs"
    step = (f"residuals up to {max(check.error / check.tolerance for check in own):.1g} of their "
            f"tolerance, " if own else "")
    return True, (f"forward {forward:.3g} s, backward {backward:.3g} s, {model} from serial by "
                  f"{error:.1g}, {step}{path.name}")


def verified(one: Case, scheme, model, y, dx, options: Options) -> list[store.Check]:
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
        checked = verify.build(scheme, one.verified, options.seed, one.variant.dtype,
                               one.variant.causal, options.recompute)
        y, dx, _ = counted_step(checked, checked.random("input"),
                                checked.random("output gradient"))
    checks = verify.compare(checked, y, dx, one.verified, options.seed, one.variant.rounding,
                            causal=one.variant.causal)
    problem = verify.failure(checks)
    if problem:
        raise Failed(problem)
    return checks


def looked_at(model, x, dy, options: Options) -> list[store.Check]:
    """The residuals, all passed, of one step of the model that is measured.

    Raises
    ------
    Failed
        When one does not pass; the same on every rank.
    """
    checks = residuals.step(model, x, dy, options.seed)
    problem = residuals.failure(checks)
    if problem:
        raise Failed(problem)
    return checks


def counted_step(model, x, dy, between: Callable[[Any], None] = lambda saved: None) -> tuple:
    """One step from cleared gradients: output, input gradient, and this rank's traffic.

    The traffic is float64, which holds such numbers exactly, (counts and "moved", phases,
    directions, collectives) in `mm3d.store`'s orders.  `between` is handed what forward saved
    for backward.
    """
    grid, names = model.grid, (*store.COUNTS, "moved")
    directions = store.directions_of(grid.shape)
    found = np.zeros((len(names), len(store.PHASES), len(directions), len(store.COLLECTIVES)))

    def note(phase: int) -> None:
        for (axis, collective), traffic in grid.traffic().items():
            place = directions.index(axis), store.COLLECTIVES.index(collective)
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
