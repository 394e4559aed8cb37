"""Measure the time and the bubble of a pipeline, beside those by the clock."""

import time
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

import mm3d
from bench.checks.passed import require_passed
from bench.experiments.pipeline.reference import STEP_LETTERS, TorchPipeline, gather_actions
from bench.experiments.pipeline.subject import (ABOUT_WORK, ActionTimes, LayersSubject,
                                                PipelineCase)
from bench.experiments.pipeline.waiting import WaitingSubject
from bench.experiments.products.operands import observe_products
from bench.experiments.torch.equal_kernels import (SIDES, add_kernels, compare_kernels,
                                                   gpt_step_flops)
from bench.instruments.clock import Clock
from bench.instruments.peak_memory import Footprint
from bench.instruments.sampling import Sample, compare_in_turns, measured_environment, time_side
from bench.instruments.timing import Limits
from bench.records.model_run import make_record, transport_names
from bench.records.measurements import Check, Measurements, Setting, grid_settings
from mm3d import launcher
from mm3d.launcher import wait_patiently
from mm3d.grid.shape import GridShape
from mm3d.schemes.words import Words
from mm3d.tracing import dry_run
from mm3d.training.mesh import Mesh
from mm3d.training.schedules import format_schedule
from mm3d.training.schedules.messages import operations
from mm3d.training.schedules.schedule import Completion

ROUNDS = 40    # round trips to measure a hop


def measure_pipeline(mesh: Mesh, case: PipelineCase, limits: Limits,
                     torch: str | None = None) -> Measurements | None:
    """Measure a pipeline; verify it before the first repetition, and the last one again.

    Parameters
    ----------
    mesh : Mesh
        The ranks; each calls this.
    torch : str, optional
        An interpreter that has PyTorch, whose own pipeline is measured beside it, in turns.

    Returns
    -------
    Measurements or None
        A record of kind "pipeline": begin and end of each action by repetition and rank, seconds
        of a step, bubbles measured and by the clock, memory and words beside their closed forms;
        on rank 0, None on the others.

    Raises
    ------
    UsageError
        On all ranks, when the interpreter cannot execute the schedule.
    WrongResult
        On all ranks, when a gradient is wrong, or a result came from elsewhere.
    """
    comm, backend, stack = mesh.comm, mesh.scheme.grid.backend, case.stack
    asleep = case.work == "wait" or launcher.oversubscribed()
    footprint = Footprint(mesh.scheme.grid)
    clock = Clock(comm)
    actions = ActionTimes(clock, backend.synchronize)
    subject = (LayersSubject if case.waits is None else WaitingSubject)(mesh, case, actions,
                                                                        asleep)
    reference = kernels = None
    try:
        subject.step()
        memory = comm.gather(footprint.peaks())
        words = comm.gather(subject.hops.traffic.words)
        expected = comm.gather(expected_memory(mesh, case))
        subject.draw_ahead()
        reference = TorchPipeline(torch, mesh, case, subject) if torch else None
        checks = check_both(subject, reference)
        if reference:
            kernels = compare_kernels(observe_products(subject.step, mesh.scheme.grid),
                                      stack.dtype, backend, reference.processes, stack.seed)
        hops = measure_hop(subject, clock)
        own = partial(sample_step, subject, actions, clock)
        found, ended_by = compare_in_turns(
            dict(zip(SIDES, (own, *([reference.sample] if reference else [])))), limits,
            stack.seed, comm)
        checks += check_both(subject, reference, "after the last repetition, ")
        environs = measured_environment(backend.name, comm)
    finally:
        if reference:
            reference.processes.close()
        subject.hops.messages.free()
    if memory is None:
        return None
    counts = {"byte": {"memory": np.array(memory).T, "expected_memory": expected},
              "1": {"words": words, "expected_words": hop_words(mesh, case)}}
    settings = {**case_settings(mesh, case), "ended_by": ended_by, "asleep": asleep,
                "reference": reference.about if reference else "none",
                **({"reference_order": reference.order} if reference else {}), **asdict(limits)}
    record = make_record("pipeline", settings, environs, side_numbers(found, hops) | counts,
                         checks, stage=range(case.schedule.stage_count), step=STEP_LETTERS,
                         side=list(found))
    return add_kernels(record, kernels, gpt_step_flops(stack.batch * stack.seq, stack.layers,
                                                       stack.hidden, stack.seq))


def sample_step(subject: Any, actions: ActionTimes, clock: Clock) -> Sample:
    """Execute a step; see `gather_actions`."""
    mesh, processor = subject.mesh, 0.0

    def step() -> None:
        nonlocal processor
        begin = time.process_time()
        subject.step()
        processor = time.process_time() - begin

    actions.times.clear()
    time_side(step, mesh.comm, mesh.scheme.grid.backend.synchronize, clock)
    slept = np.full(len(STEP_LETTERS), np.nan) if subject.slept is None else subject.slept
    return gather_actions(mesh.comm, subject.case, np.array(actions.times), processor, slept)


def check_both(subject: Any, reference: TorchPipeline | None, when: str = "") -> list[Check]:
    """Return the checks of both sides; WrongResult, on all ranks, when one did not pass."""
    checks = require_passed(subject.check(), f"{when}differs from the model in one stage: ")
    if not reference:
        return checks
    return checks + require_passed(reference.check(), f"{when}differs from this pipeline: ")


def case_settings(mesh: Mesh, case: PipelineCase) -> dict[str, Setting]:
    """Return the settings of a record that say what was measured."""
    waits, stack = case.waits or (), case.stack
    stages = GridShape("st", (mesh.shape["s"], mesh.shape["t"]))
    return {"schedule": case.name, "microbatches": case.schedule.microbatches,
            "schedule_text": format_schedule(case.schedule),
            "work": case.work, "about_work": ABOUT_WORK[case.work],
            **{f"wait_{step}": float(wait) for step, wait in zip(STEP_LETTERS, waits)},
            "scheme": mesh.scheme.name, **grid_settings(stages),
            "stage_grids": "; ".join(map(str, mesh.grids)),
            **{f"option_{name}": value for name, value in mesh.options.items()},
            **case.sizes, "dtype": stack.dtype, "recompute": stack.recompute, "seed": stack.seed,
            "transport": transport_names(mesh.scheme.grid)}


def expected_memory(mesh: Mesh, case: PipelineCase) -> float:
    """Return this rank's peak bytes by a dry run; NaN without layers."""
    if case.waits is not None:
        return np.nan
    return dry_run.trace(lambda comm, backend: mm3d.Pipeline(
        Mesh(comm, mesh.shape["s"], mesh.scheme.name, mesh.grids, backend, **mesh.options),
        case.schedule, **case.stack.fields()),
        mesh.comm.size, mesh.comm.rank, mesh.scheme.grid.backend.block).pool_peak


def measure_hop(subject: Any, clock: Clock) -> np.ndarray:
    """Measure the seconds of a hop of one block between the first two stages, otherwise idle.

    Returns half of each round trip, on the slowest rank of the first stage; 0 for one stage.
    """
    mesh, hops = subject.mesh, subject.hops
    other = 1 - mesh.stage
    backend = mesh.scheme.grid.backend
    found = np.zeros(ROUNDS)
    wait_patiently(mesh.comm)
    if mesh.shape["s"] > 1 and mesh.stage < 2:
        shape = mesh.scheme.spaces(*hops.shape[:2])[0].local_shape(hops.shape[2])
        block = backend.asarray(np.zeros(shape, hops.dtype))
        for number in range(ROUNDS):
            start = clock.now()
            for stage in (0, 1):
                if mesh.stage == stage:
                    hops.send(Completion("F", 0, 0), block, other)
                else:
                    hops.complete(hops.begin_receive(Completion("F", 0, 0), other))
                hops.messages.release_sent()
            found[number] = (clock.now() - start) / 2
        hops.messages.finish()
    wait_patiently(mesh.comm)
    every = mesh.comm.allgather(found if mesh.stage == 0 else np.zeros(ROUNDS))
    return np.max(every, axis=0)


def side_numbers(found: dict[str, list[Sample]], hops: np.ndarray) -> dict[str, dict[str, Any]]:
    """Return the seconds of a record: of hops, and of one side or both."""
    times = [[one.times for one in samples] for samples in found.values()]
    seconds: dict[str, Any] = {"times": times[0], "hop_samples": hops}
    if len(found) > 1:
        seconds["reference_times"] = times[1]
        seconds["processor"], slept = (
            np.array([[[spent[part] for spent in one.result] for one in samples]
                      for samples in found.values()]) for part in (0, 1))
        if not np.isnan(slept).any():
            seconds["slept"] = slept
    return {"s": seconds}


def hop_words(mesh: Mesh, case: PipelineCase) -> int:
    """Return the words that all ranks send to other stages, by the closed form."""
    schedule, stack = case.schedule, case.stack
    rows = stack.batch // schedule.microbatches
    # Each rank of the receiving stage gets its block once.
    blocks = [Words(mesh.scheme.name, grid, rows, stack.seq, **mesh.options).outer.words(
        rows * stack.seq, stack.hidden) for grid in mesh.grids]
    return sum(blocks[one.other] for rank in range(schedule.ranks)
               for one in operations(schedule, rank) if one.kind == "send")
