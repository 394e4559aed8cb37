"""Measure a training step of GPT on a mesh: verify it, then repeat it.

Ranks wait for the modelled seconds of their work, or compute.
"""

import sys
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Callable, ContextManager, Iterator

import numpy as np
from mpi4py import MPI

import mm3d
from bench.cases.combined import TrainingCase
from bench.checks.against_serial import worst_error
from bench.checks.tolerances import SERIAL
from bench.checks.passed import require_passed
from bench.errors import Failed
from bench.experiments.rows.dilation import Dilation, note_dilation, run_free, set_links, slow_down
from bench.experiments.rows.row import fail_on_value_error, free_at_end
from bench.experiments.rows.settings import ModelledWork
from bench.experiments.rows.waited import Counted, check_with_dry_run, take_counts
from bench.experiments.training.timed_step import TimedTraining
from bench.instruments.clock import Clock
from bench.instruments.sampling import measured_environment, take_samples, time_side
from bench.instruments.timing import Limits, unwatched
from bench.instruments.waited_work import WorkClock, waited_work
from bench.records.model_run import make_record
from bench.records.measurements import Check, Measurements
from mm3d import launcher
from mm3d.config import OF_MESH, Config, Division
from mm3d.launcher import wait_patiently
from mm3d.tracing import dry_run
from mm3d.tracing.trace import Trace

KIND = "combined"    # of records


@dataclass(frozen=True)
class TrainingSettings:
    """How the rows of trainings are measured.

    Attributes
    ----------
    order : int
        The seed of the order of rows, which is recorded.
    work : ModelledWork or None
        The seconds that ranks wait; None if they compute.
    dilation : Dilation or None
        How links and waits are slowed, where ranks wait; its `predict` is not called.
    predict : callable
        Predicts, on rank 0, the seconds of a step without software by the parts of
        `bench.prediction.pipelines.waited_step`, from a training and its number of ranks.
    watched : callable
        The context of the steps that count or are timed, as from `mm3d.tracing.watchdog`.
    backend : str or None
        The array library of ranks that compute.
    predicted_by, unpredicted : str
        The machine that `predict` takes, and why it predicts nothing; one of them is "".
    """

    limits: Limits
    order: int
    work: ModelledWork | None
    dilation: Dilation | None
    predict: Callable[[Config, int], dict[str, float]]
    watched: Callable[..., ContextManager] = unwatched
    backend: str | None = None
    predicted_by: str = ""
    unpredicted: str = ""


def measure_training(one: TrainingCase, settings: TrainingSettings,
                     comm: Any) -> Measurements | None:
    """Verify and measure a row; every rank of `comm`, as many as it has, calls this.

    Returns a record of kind "combined" on rank 0; None on the others.  Raises Failed on every
    rank, when the ranks cannot be divided so, the losses or gradients differ from the serial
    scheme's, or a step moves other words or waits other seconds than its dry run.
    """
    predicted = settings.predict(one.measured, comm.size) if comm.rank == 0 else {}
    wait_patiently(comm)
    if settings.dilation:
        set_links(None, comm, settings.dilation.change)    # what is not timed need not wait
    with built(one.config, settings, comm) as real:
        checks = verify_gpt(real, one.config)
        if settings.work:
            with waiting_training(real, settings.work) as (training, clock):
                return time_steps(one, settings, training, clock, (checks, predicted))
    with built(one.measured, settings, comm) as model:
        return time_steps(one, settings, TimedTraining(model), None, (checks, predicted))


@contextmanager
def built(config: Config, settings: TrainingSettings, comm: Any) -> Iterator[mm3d.GPT]:
    """Build a model whose ranks compute, for the block; ValueErrors are raised as Failed."""
    asleep = bool(settings.work) or launcher.oversubscribed()
    model = fail_on_value_error(
        lambda: mm3d.GPT(config.on(settings.backend), comm, asleep=asleep))
    with free_at_end(model.free), settings.watched(model.mesh.scheme.grid):
        yield model


def verify_gpt(model: mm3d.GPT, config: Config) -> list[Check]:
    """Compare two losses, with a step between them, and all gradients with the serial scheme's.

    Returns the checks, the same on every rank, all passed.  Raises Failed on every
    rank, when one did not pass.
    """
    comm = model.comm
    found = losses_and_gradients(TimedTraining(model))
    checks = None
    if comm.rank == 0:
        micro = config.division.microbatches if config.model.experts else 1
        serial = mm3d.GPT(Config(config.model, Division(scheme="serial", microbatches=micro)),
                          MPI.COMM_SELF)
        wanted = losses_and_gradients(TimedTraining(serial))
        serial.free()
        of_loss, of_gradient = SERIAL[config.model.dtype]
        checks = [Check(name, worst_error([(tuple(map(slice, a.shape)), found[name])], a),
                        of_gradient if name.startswith("gradient") else of_loss)
                  for name, a in wanted.items()]
    wait_patiently(comm)
    return require_passed(comm.bcast(checks), "differs from the serial scheme: ", Failed)


def losses_and_gradients(training: TimedTraining) -> dict[str, np.ndarray]:
    """Return the losses of two steps, and all gradients of the first."""
    loss = training.step()
    found = {f"gradient of {name}": a for name, a in training.model.gradients().items()}
    return {"loss": np.array([loss]), "loss after a step": np.array([training.step()])} | found


@contextmanager
def waiting_training(real: mm3d.GPT,
                     work: ModelledWork) -> Iterator[tuple[TimedTraining, WorkClock]]:
    """Build a training on the mesh of `real` whose ranks wait; yield it and its `WorkClock`."""
    mesh, config = real.mesh, real.config
    experts = real.pipeline.data_grids[1:]
    if experts:    # a grid of experts is made by the model, not by its mesh
        mesh.data_grid.with_experts = lambda parts: experts[0]
    fields = {name: getattr(part, name) for part in (config.model, config.division)
              for name in part.__dataclass_fields__ if name not in OF_MESH}
    with waited_work(real.grids, work.seconds, work.block) as backend:
        model = mm3d.GPT(mesh, asleep=True, **fields)
        yield TimedTraining(model), backend.trace
        del model.pipeline.data_grids[1:]    # freed with `real`
        model.free()
    if experts:
        del mesh.data_grid.with_experts


def time_steps(one: TrainingCase, settings: TrainingSettings, training: TimedTraining,
               clock: WorkClock | None,
               before: tuple[list[Check], dict[str, float]]) -> Measurements | None:
    """Compare a step with its dry run, and time more of them.

    Where ranks wait, links and waits are slowed first.  Where they compute, and `clock` is None,
    the compared step warms up; with experts its words depend on what the tokens choose, and only
    calls are compared.  `before` are the checks and the prediction; the rest is as in
    `measure_training`.
    """
    (checks, predicted), model, comm, work = before, training.model, training.comm, settings.work
    backend, shared = model.mesh.scheme.grid.backend, Clock(comm)
    config, block = (one.config, work.block) if work else (one.measured, sys.maxsize)
    trace = trace_rank(config, comm, block)
    modelled = trace.work(work.seconds) if work else 0.0
    counted: list[Counted] = []

    def sample() -> float:
        return time_side(training.step, comm, backend.synchronize, shared).seconds

    def counted_sample() -> float:
        """Take a sample; compare the first of them with the dry run."""
        if counted:
            return sample()
        take_counts(model, clock)
        seconds = sample()
        counted.append(take_counts(model, clock))
        moved, dry = counted[0].moved, trace.total_traffic()
        if not work and config.model.experts:
            moved, dry = ({key: traffic.calls for key, traffic in found.items()}
                          for found in (moved, dry))
        check_with_dry_run(comm, {"a step": (moved, dry, counted[0].work,
                                             clock.pace * modelled if clock else 0.0)})
        return seconds
    if clock:
        factor, software = slow_down(comm, clock, settings.dilation, lambda: [sample()],
                                     sum(predicted.values()))
    else:
        counted_sample()
    samples, ended_by = take_samples(counted_sample, settings.limits, comm)
    if clock:
        run_free(comm, clock, settings.dilation)    # the rest is not timed
        modelled *= factor
    first = counted[0]
    everyone = comm.gather((sum(traffic.words for traffic in first.moved.values()), modelled,
                            first.slept, first.overlapped))
    environment = measured_environment("numpy" if work else backend.name, comm)
    if everyone is None:
        return None
    words, *waits = np.array(everyone, float).T
    taken = {"samples": samples, **({"predicted": [*predicted.values()]} if predicted else {})}
    configuration = one.settings | asdict(settings.limits) | {
        "order": settings.order, "ended_by": ended_by}
    if work:
        configuration |= work.settings
        taken |= {"software": software[0],
                  **dict(zip(("modelled", "slept", "overlapped"), waits))}
    else:
        configuration |= {"predicted_by": settings.predicted_by,
                          "unpredicted": settings.unpredicted}
    record = make_record(KIND, configuration, environment, {"s": taken, "1": {"words": words}},
                         checks, **({"part": list(predicted)} if predicted else {}))
    if clock:
        note_dilation(record, factor, settings.dilation)
    return record


def trace_rank(config: Config, comm: Any, block: int) -> Trace:
    """Run a step of this rank dry, its optimizer included, and nothing else."""
    def step(model: mm3d.GPT, trace: Trace) -> None:
        training = TimedTraining(model)
        trace.events.clear()
        training.step()
    return dry_run.trace(lambda comm, backend: mm3d.GPT(config.on(backend), comm), comm.size,
                         comm.rank, block, step)
