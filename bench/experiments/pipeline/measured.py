"""Measure the time and the bubble of a pipeline, beside those by the clock and PyTorch's own."""

import time
from dataclasses import asdict
from typing import Any, Callable

import numpy as np
from mpi4py import MPI

import mm3d
from bench.agreement import agree
from bench.checks import tolerances
from bench.checks.passed import require_passed
from bench.experiments.pipeline.subject import (ABOUT_WORK, ActionTimes, LayersSubject,
                                                PipelineCase, WaitingSubject, squared_error)
from bench.experiments.products.operands import observe_products
from bench.experiments.torch.child import SIDES, TorchProcesses, compare_kernels, gpt_step_flops
from bench.experiments.torch.pipeline import TORCH_SCHEDULES
from bench.instruments.clock import Clock
from bench.instruments.peak_memory import Footprint
from bench.instruments.sampling import Sample, compare_in_turns, measured_environment, time_side
from bench.instruments.timing import Limits
from bench.records.model_run import add_numbers, make_record, transport_names
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

STEP_LETTERS = ("F", "B", "W")
ROUNDS = 40    # round trips to measure a hop


def measure_pipeline(mesh: Mesh, case: PipelineCase, limits: Limits,
                     torch: str | None = None) -> Measurements | None:
    """Measure a pipeline; verify it before the first repetition, and the last one again.

    Every rank of the mesh calls this.  With `torch`, an interpreter that has PyTorch, its own
    pipeline is measured beside it, in turns.

    Returns
    -------
    Measurements or None
        A record of kind "pipeline", by repetition and rank; on rank 0, None on the others.

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
    reference, kernels = None, {}
    try:
        subject.step()
        memory = comm.gather(footprint.peaks())
        words = comm.gather(subject.hops.traffic.words)
        expected = comm.gather(_expected_memory(mesh, case))
        subject.draw_ahead()
        reference = TorchPipeline(torch, mesh, case, subject) if torch else None
        checks = _check_both(subject, reference)
        if reference:
            kernels = compare_kernels(observe_products(subject.step, mesh.scheme.grid),
                                      stack.dtype, backend, reference.processes, stack.seed,
                                      gpt_step_flops(stack.batch * stack.seq, stack.layers,
                                                     stack.hidden, stack.seq))
        hops = _measure_hop(subject, clock)

        def sample() -> Sample:
            actions.times.clear()
            taken = time_side(lambda: _spend(subject.step), comm, backend.synchronize, clock)
            return gather_actions(comm, case, np.array(actions.times), taken.result,
                                  subject.slept)
        found, ended_by = compare_in_turns(
            dict(zip(SIDES, (sample, *([reference.sample] if reference else [])))), limits,
            stack.seed, comm)
        checks += _check_both(subject, reference, "after the last repetition, ")
        environs = measured_environment(backend.name, comm)
    finally:
        if reference:
            reference.processes.close()
        subject.hops.messages.free()
    if memory is None:
        return None
    counts = {"byte": {"memory": np.array(memory).T, "expected_memory": expected},
              "1": {"words": words, "expected_words": _hop_words(mesh, case)}}
    settings = {**_case_settings(mesh, case), "ended_by": ended_by, "asleep": asleep,
                "reference": reference.processes.about if reference else "none",
                **({"reference_order": reference.order} if reference else {}), **asdict(limits)}
    record = make_record("pipeline", settings, environs, _side_numbers(found, hops) | counts,
                         checks, stage=range(case.schedule.stage_count), step=STEP_LETTERS,
                         side=list(found))
    return add_numbers(record, kernels)


def gather_actions(comm: Any, case: PipelineCase, times: np.ndarray, processor: float,
                   slept: np.ndarray) -> Sample:
    """Gather what all ranks measured into the sample of a step.

    Times, (ranks, actions, begin and end), count from the begin of the first action; NaN beyond
    the actions of a rank.  The result has of each rank the seconds of `processor` time, and the
    mean seconds `slept` that it waited for F, B and W; NaN with layers.
    """
    own = np.full((max(map(len, case.schedule.rows)), 2), np.nan)
    own[:len(times)] = times
    every = np.empty((comm.size, *own.shape))
    comm.Allgather(own, every)
    return Sample(every - np.nanmin(every), comm.allgather((processor, slept)))


def refuse_pipeline(mesh: Mesh, case: PipelineCase) -> None:
    """Raise UsageError, on all ranks alike, for cases that PyTorch's schedules cannot execute."""
    kind = case.name.partition(":")[0]
    problem = None
    if kind not in TORCH_SCHEDULES:
        problem = (f"PyTorch has no such schedule: {', '.join(TORCH_SCHEDULES)} would do")
    elif kind == "interleaved" and case.schedule.chunks == 1:
        problem = "PyTorch's has two chunks a rank or more: interleaved:2 would do"
    elif mesh.shape["t"] > 1:
        problem = (f"a stage of PyTorch's is one process: a grid of 1 rank would do, not of "
                   f"{mesh.shape['t']}")
    elif case.stack.recompute != "none":
        problem = f"--recompute {case.stack.recompute} is not PyTorch's: leave it out"
    elif mesh.scheme.grid.backend.name != "numpy":
        problem = "PyTorch computes on the host: --backend numpy would do"
    node = mesh.comm.Split_type(MPI.COMM_TYPE_SHARED)
    several = node.size != mesh.comm.size
    node.Free()
    if several and not problem:
        problem = "PyTorch's ranks are started on one node: as many ranks as it can hold would do"
    agree(problem and f"--torch, schedule {case.name}: {problem}", mesh.comm)


class TorchPipeline:
    """The same schedule and stages by PyTorch, beside each rank of a mesh, asleep between steps.

    It takes the parameters and inputs of a subject.  After `check`, `order` says how its order of
    actions compares with the schedule's.  Raises UsageError on all ranks, when the interpreter
    cannot execute it.
    """

    def __init__(self, python: str, mesh: Mesh, case: PipelineCase, subject: Any) -> None:
        self.mesh, self.case, self.subject, self.order = mesh, case, subject, ""
        sizes, waits, schedule = case.sizes, case.chunk_seconds, case.schedule
        self.processes = TorchProcesses(python, "pipeline:Stages", {
            "schedule": case.name, "stages": schedule.stages,
            "microbatches": schedule.microbatches,
            "shape": (sizes.batch // schedule.microbatches, sizes.seq, sizes.hidden),
            "layers": [list(part) for part in case.parts], "heads": sizes.heads,
            "dtype": case.stack.dtype, "seconds": waits and dict(zip(STEP_LETTERS, waits))},
            subject.arrays(), mesh.comm, "execute the pipeline", mesh.comm.size)

    def sample(self) -> Sample:
        """Execute another step; see `gather_actions`."""
        found = self.processes.take_turn("step")
        slept = np.array([found["slept"].get(step, np.nan) for step in STEP_LETTERS])
        return gather_actions(self.mesh.comm, self.case, np.array(
            [action[3:] for action in found["actions"]]), found["processor"], slept)

    def check(self) -> list[Check]:
        """Execute a step, and check its results and that its actions are the schedule's.

        Raises UsageError on all ranks, when it takes other actions.
        """
        found = self.processes.ask("check")
        self._compare_order([(kind, stage, micro) for kind, stage, micro, *_ in found["actions"]])
        if self.case.waits is not None:
            wrong, arrived = self.mesh.comm.allreduce(found["wrong"])
            return [Check("PyTorch's results that arrived", wrong / arrived, 0.0)]
        squares: dict[str, np.ndarray] = {
            p.name: squared_error(found[p.name],
                                  p.grid.backend.to_host(p.grad).reshape(p.public_shape))
            for p in self.subject.pipeline.parameters}
        tolerance = tolerances.beside_serial(self.case.stack.dtype, self.case.sizes.layers)[1]
        return [Check(f"PyTorch's gradient of {name}", float(np.sqrt(error / norm)), tolerance)
                for one in self.mesh.comm.allgather(squares)
                for name, (error, norm) in one.items()]

    def _compare_order(self, found: list[tuple[str, int, int]]) -> None:
        """Set `order`; UsageError when the actions are not the schedule's, in any order."""
        schedule, rank = self.case.schedule, self.mesh.stage
        wanted = [(action.kind, schedule.stage_of(rank, action.chunk), action.micro)
                  for action in schedule.rows[rank]]
        agree(None if sorted(found) == sorted(wanted) else
              f"--torch, schedule {self.case.name}: PyTorch takes other actions than this "
              f"schedule, so times cannot be compared", self.mesh.comm)
        other = self.mesh.comm.allgather(found != wanted)
        self.order = ("the same actions in the same order" if not any(other) else
                      f"the same actions, in another order on {sum(other)} of {len(other)} ranks")


def _spend(step: Callable[[], None]) -> float:
    """Return the seconds of processor time of a step."""
    begin = time.process_time()
    step()
    return time.process_time() - begin


def _check_both(subject: Any, reference: TorchPipeline | None, when: str = "") -> list[Check]:
    """Return the checks of both sides; WrongResult, on all ranks, when one did not pass."""
    checks = require_passed(subject.check(), f"{when}differs from the model in one stage: ")
    if not reference:
        return checks
    return checks + require_passed(reference.check(), f"{when}differs from this pipeline: ")


def _case_settings(mesh: Mesh, case: PipelineCase) -> dict[str, Setting]:
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


def _expected_memory(mesh: Mesh, case: PipelineCase) -> float:
    """Return this rank's peak bytes by a dry run; NaN without layers."""
    if case.waits is not None:
        return np.nan
    return dry_run.trace(lambda comm, backend: mm3d.Pipeline(
        Mesh(comm, mesh.shape["s"], mesh.scheme.name, mesh.grids, backend, **mesh.options),
        case.schedule, **case.stack.fields()),
        mesh.comm.size, mesh.comm.rank, mesh.scheme.grid.backend.block).pool_peak


def _measure_hop(subject: Any, clock: Clock) -> np.ndarray:
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


def _side_numbers(found: dict[str, list[Sample]], hops: np.ndarray) -> dict[str, dict[str, Any]]:
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


def _hop_words(mesh: Mesh, case: PipelineCase) -> int:
    """Return the words that all ranks send to other stages, by the closed form."""
    schedule, stack = case.schedule, case.stack
    rows = stack.batch // schedule.microbatches
    # Each rank of the receiving stage gets its block once.
    blocks = [Words(mesh.scheme.name, grid, rows, stack.seq, **mesh.options).outer.words(
        rows * stack.seq, stack.hidden) for grid in mesh.grids]
    return sum(blocks[one.other] for rank in range(schedule.ranks)
               for one in operations(schedule, rank) if one.kind == "send")
