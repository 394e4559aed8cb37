"""Define the options of verbs that predict a pipeline, and read them."""

import argparse
from dataclasses import asdict
from typing import Any

from bench.command_line import options
from bench.command_line.config_options import add_fields, read, told
from bench.errors import UsageError, as_usage_error
from bench.prediction.pipelines.pipeline_model import PipelineModel, Replicas
from mm3d.config import Division
from mm3d.grid.shape import GridShape
from mm3d.model.stack import Stack
from mm3d.training.mesh import check_data
from mm3d.training.schedules import Schedule, build
from mm3d.training.schedules.builders import check_size


OF_STAGES = ("schedule", "microbatches", "context", "context_way", "zero", "shards")


def add_pipeline(parser: argparse.ArgumentParser, batch: str) -> None:
    """Add the options that divide layers among stages, and ranks among replicas of these.

    `batch` ends the sentence in the help about the batch.
    """
    add_fields(parser, Division, ["stages"], told(Division, ["stages"], stages=""), (
        f"predict a pipeline: the ranks are P stages of equally many, each with its layers on a "
        f"grid of its own; the batch is that of all micro-batches{batch}"))
    said = told(Division, OF_STAGES, microbatches="2 for each stage")
    add_fields(parser, Division, OF_STAGES[:4], said, "with --stages: {}")
    add_fields(parser, Division, OF_STAGES[4:], said, "with --stages and --data: {}")


def add_replicas(parser: argparse.ArgumentParser, what: str) -> None:
    """Add ``--data``, a number of replicas of the stages; `what` says what they are."""
    add_fields(parser, Division, ["data"], told(Division, ["data"]), f"with --stages: {what}",
               type=options.ranks)


def divide_among_replicas(arguments: argparse.Namespace) -> None:
    """Divide ``--ranks`` by all replicas, and ``--batch`` by those of ``--data``.

    UsageError when the replicas do not divide them.
    """
    data, context = arguments.data or 1, arguments.context or 1
    for name, parts in (("ranks", data * context), ("batch", data)):
        value = getattr(arguments, name) or 0
        if value % parts:
            by = f" x --context {context}" * (parts > data)
            raise UsageError(f"--data {data}{by} does not divide --{name} {value}, which is that "
                             f"of all replicas: a multiple would do")
        setattr(arguments, name, value // parts or None)


def stage_ranks(arguments: argparse.Namespace) -> int:
    """Return the ranks of a stage, all of them without a pipeline.

    UsageError when stages do not divide the ranks; or an option of pipelines is given without
    them.
    """
    check_stage_options(arguments)
    if arguments.stages is None:
        return arguments.ranks
    if arguments.ranks % arguments.stages:
        raise UsageError(f"--stages {arguments.stages} does not divide the {arguments.ranks} "
                         f"ranks of a replica: a divisor would do")
    return arguments.ranks // arguments.stages


def check_stage_options(arguments: argparse.Namespace) -> None:
    """Raise UsageError for an option of pipelines without ``--stages``, or too large ones."""
    if arguments.stages is not None:
        with as_usage_error():    # before anything is made for each stage
            check_size(arguments.stages, arguments.microbatches or 2 * arguments.stages)
    for name in OF_STAGES:
        if arguments.stages is None and getattr(arguments, name) is not None:
            raise UsageError(f"{options.written(name, getattr(arguments, name))}: give --stages "
                             f"too" + ", such as --stages 1" * (name in OF_STAGES[2:]))
    several = (arguments.context or 1) > 1
    for name in ("zero", "shards"):
        if getattr(arguments, name) and not (arguments.data or several):
            raise UsageError(f"--{name} {getattr(arguments, name)}: give --data too, the number "
                             f"of replicas")
    if arguments.context_way and not several:
        raise options.without_effect("context_way", arguments.context_way, "--context 2 or more")


def build_schedule(arguments: argparse.Namespace) -> Schedule:
    """Return the schedule that the options ask for; ValueError when it does not exist."""
    return build(arguments.schedule or "1f1b", arguments.stages,
                 arguments.microbatches or 2 * arguments.stages)


def replicas(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the fields of `bench.prediction.pipelines.pipeline_model.Replicas`.

    Raises ValueError when the shards do not divide the replicas.
    """
    found = read(Replicas, arguments)
    check_data(found.replicas, found.data, found.shards, found.context)
    return asdict(found)


def pipeline_model(arguments: argparse.Namespace, scheme: str, grids: tuple[GridShape, ...],
                   stack: Stack, **more) -> PipelineModel:
    """Return the pipeline that the options ask for.

    ValueError for an unknown schedule, and where layers, sequences or replicas cannot be divided
    so.
    """
    model = PipelineModel(build_schedule(arguments), scheme, grids, stack,
                          **replicas(arguments), **more)
    model.parts    # raises where layers or sequences cannot be divided
    return model
