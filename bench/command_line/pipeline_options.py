"""Define the options of verbs that predict a pipeline, and read them."""

import argparse

from bench.command_line import options
from bench.errors import UsageError
from bench.prediction.pipeline_seconds import PipelineModel
from mm3d import ModelSizes
from mm3d.grid.shape import GridShape
from mm3d.training.batches import divide_layers
from mm3d.training.schedules import build, registry


def add_pipeline(parser: argparse.ArgumentParser) -> None:
    """Add the options by which the layers are divided among the stages of a pipeline."""
    parser.add_argument("--stages", type=options.whole(1), metavar="P", help=(
        "predict a pipeline: the ranks are P stages of equally many, each with its layers on a "
        "grid of its own; --batch is that of all micro-batches"))
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
    if arguments.stages is None:
        for name in ("schedule", "microbatches"):
            if getattr(arguments, name) is not None:
                raise UsageError(f"--{name} {getattr(arguments, name)}: give --stages too")
        return arguments.ranks
    if arguments.ranks % arguments.stages:
        raise UsageError(f"--stages {arguments.stages} does not divide --ranks {arguments.ranks}: "
                         f"a divisor would do")
    return arguments.ranks // arguments.stages


def pipeline_model(arguments: argparse.Namespace, scheme: str, grid: GridShape,
                   sizes: ModelSizes, **more) -> PipelineModel:
    """Return the pipeline that the options ask for; ValueError when there is none such."""
    count = arguments.microbatches or 2 * arguments.stages
    model = PipelineModel(build(arguments.schedule or "1f1b", arguments.stages, count), scheme,
                          grid, sizes, arguments.dtype, arguments.recompute, **more)
    divide_layers(model.schedule, model.schedule.ranks, sizes, count)
    return model
