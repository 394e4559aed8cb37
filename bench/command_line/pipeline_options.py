"""Define the options of verbs that predict a pipeline, and read them."""

import argparse

from bench.command_line import options
from bench.errors import UsageError
from bench.prediction.pipeline_seconds import PipelineModel
from mm3d import ModelSizes
from mm3d.grid.shape import GridShape
from mm3d.training.schedules import Schedule, build, registry


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """Add the options by which the layers are divided among the stages of a pipeline."""
    parser.add_argument("--stages", type=options.whole(1), metavar="P", help=(
        "predict a pipeline: the ranks are P stages of equally many, each with its layers on a "
        "grid of its own; the batch is that of all micro-batches"))
    parser.add_argument("--schedule", metavar="NAME", help=(
        f"with --stages: the schedule, of {', '.join(registry())} (default 1f1b)"))
    parser.add_argument("--microbatches", type=options.whole(1), metavar="M",
                        help="with --stages: micro-batches of a step (default 2 for each stage)")


def stage_ranks(arguments: argparse.Namespace) -> int:
    """Return the ranks of a stage, all of them without a pipeline.

    Raises
    ------
    UsageError
        When the stages do not divide the ranks, or an option of pipelines is given without them.
    """
    check_stages(arguments)
    if arguments.stages is None:
        return arguments.ranks
    if arguments.ranks % arguments.stages:
        raise UsageError(f"--stages {arguments.stages} does not divide --ranks {arguments.ranks}: "
                         f"a divisor would do")
    return arguments.ranks // arguments.stages


def check_stages(arguments: argparse.Namespace) -> None:
    """Raise UsageError for an option of pipelines without ``--stages``."""
    for name in ("schedule", "microbatches"):
        if arguments.stages is None and getattr(arguments, name) is not None:
            raise UsageError(f"--{name} {getattr(arguments, name)}: give --stages too")


def build_schedule(arguments: argparse.Namespace) -> Schedule:
    """Return the schedule that the options ask for; ValueError when there is none such."""
    return build(arguments.schedule or "1f1b", arguments.stages,
                 arguments.microbatches or 2 * arguments.stages)


def pipeline_model(arguments: argparse.Namespace, scheme: str, grid: GridShape,
                   sizes: ModelSizes, **more) -> PipelineModel:
    """Return the pipeline that the options ask for; ValueError when there is none such."""
    model = PipelineModel(build_schedule(arguments), scheme, grid, sizes, arguments.dtype,
                          arguments.recompute, **more)
    model.parts    # raises where layers or sequences cannot be divided
    return model
