"""Measure a training step of GPT on a mesh: verify it, then repeat it with work waited for."""

from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any, Callable, ContextManager, Iterator

import numpy as np
from mpi4py import MPI

import mm3d
from bench.cases.combined import TrainingCase
from bench.checks.against_serial import TOLERANCES, failure_message, worst_error
from bench.cluster.spec import Cluster
from bench.errors import Failed
from bench.experiments.rows.dilation import Dilation, run_free, set_links, slow_down
from bench.experiments.rows.row import fail_on_value_error, free_at_end
from bench.experiments.rows.settings import ModelledWork
from bench.experiments.rows.waited import check_with_dry_run
from bench.experiments.training.timed_step import OPTIMIZER, draw_batch
from bench.instruments import host
from bench.instruments.clock import Clock
from bench.instruments.sampling import measured_environment, take_samples, time_side
from bench.instruments.timing import Limits, unwatched
from bench.instruments.waited_work import WorkClock, waited_work
from bench.records.measurements import Check, Measurements, Variable
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
    limits : Limits
        When to stop repeating.
    order : int
        The seed of the order of rows, which is recorded.
    work : ModelledWork
        The seconds that ranks wait.
    dilation : Dilation
        How links and waits are slowed; its `predict` is not called.
    predict : callable
        Predicts, on rank 0, the seconds of a step without software by the parts of
        `bench.prediction.waited_step`, from a training and its number of ranks.
    watched : callable
        The context of the steps that count or are timed, as from `mm3d.tracing.watchdog`.
    """

    limits: Limits
    order: int
    work: ModelledWork
    dilation: Dilation
    predict: Callable[[Config, int], dict[str, float]]
    watched: Callable[..., ContextManager] = unwatched


class Training:
    """A model and its optimizer, on ranks that compute or wait."""

    def __init__(self, model: mm3d.GPT) -> None:
        self.model, self.optimizer = model, mm3d.AdamW(model, **OPTIMIZER)
        self.batch = draw_batch(model.config.model)

    def step(self) -> float:
        """Take a step; return the loss before it."""
        loss = self.model.step(*self.batch)
        self.optimizer.step()
        return loss


def measure_training(one: TrainingCase, settings: TrainingSettings,
                     comm: Any) -> Measurements | None:
    """Verify and measure a row; every rank of `comm`, as many as it has, calls this.

    Returns
    -------
    Measurements or None
        A record of kind "combined" on rank 0; None on the others.

    Raises
    ------
    Failed
        On every rank, when the ranks cannot be divided so, the losses or gradients differ from
        the serial scheme's, or a step moves other words or waits other seconds than its dry run.
    """
    predicted = settings.predict(one.config, comm.size) if comm.rank == 0 else {}
    wait_patiently(comm)
    set_links(None, comm, settings.dilation.change)    # what is not timed need not wait
    real = fail_on_value_error(lambda: mm3d.GPT(one.config, comm, asleep=True))
    with free_at_end(real.free), settings.watched(real.mesh.scheme.grid):
        checks = verify(real, one.config)
        with waiting_training(real, settings.work) as (training, clock):
            return time_training(one, settings, training, clock, (checks, predicted))


def verify(model: mm3d.GPT, config: Config) -> list[Check]:
    """Compare two losses, with a step between them, and all gradients with the serial scheme's.

    Returns
    -------
    list of Check
        The same on every rank, all passed.

    Raises
    ------
    Failed
        On every rank, when one did not pass.
    """
    comm = model.comm
    found = losses_and_gradients(Training(model))
    checks = None
    if comm.rank == 0:
        micro = config.division.microbatches if config.model.experts else 1
        serial = mm3d.GPT(Config(config.model, Division(scheme="serial", microbatches=micro)),
                          MPI.COMM_SELF)
        wanted = losses_and_gradients(Training(serial))
        serial.free()
        of_loss, of_gradient = TOLERANCES[config.model.dtype]
        checks = [Check(name, worst_error([(tuple(map(slice, a.shape)), found[name])], a),
                        of_gradient if name.startswith("gradient") else of_loss)
                  for name, a in wanted.items()]
    wait_patiently(comm)
    checks = comm.bcast(checks)
    if problem := failure_message(checks):
        raise Failed(problem)
    return checks


def losses_and_gradients(training: Training) -> dict[str, np.ndarray]:
    """Return the losses of two steps, and all gradients of the first."""
    loss = training.step()
    found = {f"gradient of {name}": a for name, a in training.model.gradients().items()}
    return {"loss": np.array([loss]), "loss after a step": np.array([training.step()])} | found


@contextmanager
def waiting_training(real: mm3d.GPT,
                     work: ModelledWork) -> Iterator[tuple[Training, WorkClock]]:
    """Build a training on the mesh of `real` whose ranks wait; yield it and its `WorkClock`."""
    mesh, config = real.mesh, real.config
    experts = real.pipeline.data_grids[1:]
    if experts:    # a grid of experts is made by the model, not by its mesh
        mesh.data_grid.with_experts = lambda parts: experts[0]
    fields = {name: getattr(part, name) for part in (config.model, config.division)
              for name in part.__dataclass_fields__ if name not in OF_MESH}
    with waited_work(real.grids, work.seconds, work.block) as backend:
        model = mm3d.GPT(mesh, asleep=True, **fields)
        yield Training(model), backend.trace
        del model.pipeline.data_grids[1:]    # freed with `real`
        model.free()
    if experts:
        del mesh.data_grid.with_experts


def time_training(one: TrainingCase, settings: TrainingSettings, training: Training,
                  clock: WorkClock,
                  before: tuple[list[Check], dict[str, float]]) -> Measurements | None:
    """Slow a training that waits, compare a step with its dry run, and time steps.

    `before` are the checks and the prediction; the rest is as in `measure_training`.
    """
    (checks, predicted), comm = before, training.model.comm
    backend, shared = training.model.mesh.scheme.grid.backend, Clock(comm)

    def sample() -> float:
        return time_side(training.step, comm, backend.synchronize, shared).seconds

    def counted_sample() -> float:
        """Take a sample; compare the first of them with the dry run."""
        if found:
            return sample()
        found.append(count_step(training, clock, sample))
        check_with_dry_run(comm, {"a step": (found[0].moved, trace.total_traffic(),
                                             found[0].work, clock.pace * modelled)})
        return found[0].seconds
    found: list[Counted] = []
    trace = trace_rank(one.config, comm, settings.work)
    factor, software = slow_down(comm, clock, settings.dilation, lambda: [sample()],
                                 sum(predicted.values()))
    modelled = trace.work(settings.work.seconds)
    samples, ended_by = take_samples(counted_sample, settings.limits, comm)
    run_free(comm, clock, settings.dilation)    # the rest is not timed
    first = found[0]
    words = sum(traffic.words for traffic in first.moved.values())
    everyone = comm.gather((factor * modelled, first.slept, first.overlapped, words))
    environment = measured_environment("numpy", comm)
    if everyone is None:
        return None
    cluster = Cluster.from_environment()
    if cluster is not None:    # whose links may be slowed now
        environment |= host.describe_cluster(replace(cluster, link=settings.dilation.link))
    columns = dict(zip(("modelled", "slept", "overlapped", "words"), np.array(everyone).T))
    variables = {
        "samples": Variable(np.array(samples), "s", ("repetition",)),
        "software": Variable(software[0], "s", ("alone",)),
        "predicted": Variable(np.array(list(predicted.values())), "s", ("part",))} | {
        name: Variable(values, "1" if name == "words" else "s", ("rank",))
        for name, values in columns.items()}
    configuration = one.settings | settings.work.settings | asdict(settings.limits) | {
        "order": settings.order, "ended_by": ended_by, "dilation": factor,
        "software_share": settings.dilation.share}
    scales = {"repetition": range(len(samples)), "alone": range(software.shape[1]),
              "part": list(predicted), "rank": range(comm.size)}
    return Measurements(KIND, configuration, environment, scales, variables, checks)


def trace_rank(config: Config, comm: Any, work: ModelledWork) -> Trace:
    """Run a step of this rank dry, its optimizer included, and nothing else."""
    def step(model: mm3d.GPT, trace: Trace) -> None:
        training = Training(model)
        trace.events.clear()
        training.step()
    return dry_run.trace(lambda comm, backend: mm3d.GPT(config.on(backend), comm), comm.size,
                         comm.rank, work.block, step)


@dataclass(frozen=True)
class Counted:
    """A step that was timed and counted.

    Attributes
    ----------
    seconds : float
        Its makespan.
    work, slept, overlapped : float
        Seconds of work of this rank; of them slept, and passed while the host worked.
    moved : dict
        This rank's traffic, by direction and collective.
    """

    seconds: float
    work: float
    slept: float
    overlapped: float
    moved: dict[tuple[str, str], Any]


def count_step(training: Training, clock: WorkClock, sample: Callable[[], float]) -> Counted:
    """Take a sample of a step, and count it."""
    clock.settle()
    clock.reset()
    training.model.reset_traffic()
    seconds = sample()
    moved = {key: one for key, one in training.model.traffic().items() if one.calls}
    return Counted(seconds, clock.counted, clock.slept, clock.overlapped, moved)
