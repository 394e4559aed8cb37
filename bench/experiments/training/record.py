"""Make the record of a training."""

from typing import Any

import numpy as np

from bench.experiments.training.history import History
from bench.experiments.training.plan import Plan, make_optimizer
from bench.experiments.training.torch_training import TorchTraining
from bench.experiments.training.trainer import Course, TrainingEnd, TrainingRun
from bench.instruments.sampling import measured_environment
from bench.records.model_run import add_numbers, make_record, transport_names
from bench.records.measurements import Check, Measurements, Setting, grid_settings
from mm3d.arrays.backend import Backend
from mm3d.config import Config, Division
from mm3d.tracing import dry_run
from mm3d.training.gpt import GPT
from mm3d.training.mesh import Mesh

KIND = "training"
BESIDE = 0.02    # the largest difference of validation losses, a training beside another


def training_record(training: TrainingRun, course: Course, outcome: TrainingEnd,
                    beside: TorchTraining | None = None) -> Measurements | None:
    """Make the record of a training on rank 0, None on the others; every rank calls this.

    `beside` is the same training by PyTorch.
    """
    mesh, plan = training.mesh, training.plan
    environs = measured_environment(mesh.scheme.grid.backend.name, training.comm)
    memory = training.comm.gather((training.peak_bytes, expected_peak_bytes(
        plan, training.division, training.comm.size, training.comm.rank)))
    if training.comm.rank:
        return None
    history, steps = outcome.history, sorted(outcome.history.losses)
    validated = sorted(history.validation)
    peaks, expected = np.array(memory, float).T
    plain = {"loss": [history.losses[n] for n in steps],
             "learning_rate": [plan.rate(n) for n in steps],
             "validation_loss": [history.validation[n] for n in validated]}
    seconds = {"step_seconds": [history.seconds[n] for n in steps]}
    if history.entropy:
        plain |= {name: [found.get(n, np.nan) for n in steps] for name, found in (
            ("entropy", history.entropy), ("dropped_share", history.dropped))}
    checks = list(outcome.checks)
    settings = _training_settings(training, course, outcome)
    if beside is not None:
        other = beside.history
        plain |= {"torch_loss": [other.losses.get(n, np.nan) for n in steps],
                  "torch_validation_loss": [other.validation.get(n, np.nan) for n in validated]}
        seconds["torch_step_seconds"] = [other.seconds.get(n, np.nan) for n in steps]
        checks += beside_checks(history, other)
        settings["torch"] = beside.about
    record = make_record(
        KIND, settings, environs, {"1": plain, "s": seconds, "byte": {
            "peak_bytes": peaks, "expected_peak_bytes": expected}}, checks,
        step=steps, validated=validated)
    return add_numbers(record, beside.kernels if beside else {})


def _training_settings(training: TrainingRun, course: Course,
                       outcome: TrainingEnd) -> dict[str, Setting]:
    """Return the settings of a record: what was trained, where, and how it ended."""
    mesh, division = training.mesh, training.division
    scaling = training.optimizer.loss_scaling
    return {**training.settings(), **mesh_settings(mesh, division),
            "shards": division.shards or mesh.shape["d"],
            **({"context": division.context, "context_way": division.context_way}
               if division.context > 1 else {}),
            "rate_falls_to": "last step",
            **({"expert_parallel": division.expert_parallel} if training.plan.experts else {}),
            "validate_every": course.validate_every,
            "validation_batches": course.validation_batches,
            "began": outcome.began, "ended_by": outcome.ended_by,
            "skipped_steps": scaling.skipped if scaling else 0}


def mesh_settings(mesh: Mesh, division: Division) -> dict[str, Setting]:
    """Return the settings that every record of a training on a mesh has."""
    return {"scheme": mesh.scheme.name, **grid_settings(mesh.shape),
            "stage_grids": "; ".join(map(str, mesh.grids)),
            **{name: getattr(division, name) for name in (
                "data", "stages", "zero", "schedule", "microbatches", "recompute")},
            "overlap": int(division.overlap or 0),
            "transport": transport_names(mesh.scheme.grid)}


def expected_peak_bytes(plan: Plan, division: Division, ranks: int, rank: int) -> int:
    """Return the peak bytes of a rank's arrays in a step by a dry run, without shared memory.

    Experts get equally many tokens, unlike in a real training.
    """
    def step(model: Any, trace: dry_run.Trace) -> None:
        optimizer = make_optimizer(plan, model)
        model.rehearse()
        optimizer.step()
    return dry_run.trace(
        lambda comm, backend: GPT(Config(plan, division).on(backend), comm),
        ranks, rank, Backend.block, step).pool_peak


def beside_checks(own: History, other: History) -> list[Check]:
    """Compare the last validation losses of two trainings, if they were validated at all."""
    return [Check("last validation loss beside PyTorch's",
                  abs(own.validation[last] - other.validation[last]), BESIDE)
            for last in sorted(own.validation)[-1:]]
