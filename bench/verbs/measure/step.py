"""Measure a training step, alone or beside PyTorch's own parallel trainings, under mpirun."""

import argparse

from bench.command_line import config_options, measuring, options
from bench.command_line.publish import publisher
from bench.errors import UsageError, as_usage_error
from bench.experiments.torch.parallel import PARALLELS
from bench.experiments.training import beside
from bench.experiments.training.timed_step import TimedTraining
from mm3d.config import Config, Division, Model
from mm3d.training.gpt import GPT

ON_ALL_RANKS = True
SIZES = {"layers": 4, "hidden": 512, "heads": 8, "vocab": 8192, "batch": 8, "seq": 256}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure step``."""
    measuring.add_shared(parser, "out")
    measuring.add_repetitions(parser, beside.STEP_LIMITS.repetitions,
                              beside.STEP_LIMITS.max_seconds)
    config_options.add_fields(parser, Division, config_options.MESH)
    config_options.add_fields(parser, Model, SIZES, SIZES)
    config_options.add_fields(parser, Model, ["dtype"], choices=config_options.MEASURED_DTYPES)
    options.add_torch(parser, "PyTorch's training is measured beside it, in turns")
    parser.add_argument("--torch-parallel", type=options.some_of(*PARALLELS), metavar="KIND,...",
                        help=(
        f"how PyTorch is parallel, of {', '.join(PARALLELS)}; one is one process with all cores "
        f"(default: all)"))


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write a step; return the exit status."""
    limits, kinds = measuring.limits_of(arguments), arguments.torch_parallel or list(PARALLELS)
    if arguments.torch_parallel and not arguments.torch:
        raise UsageError(f"--torch-parallel {','.join(kinds)} without --torch: the name of an "
                         f"interpreter that has PyTorch would do")
    case = config_options.read(Model, arguments)
    if case.vocab < 2:
        raise UsageError(f"--vocab {case.vocab}: at least 2 would do, so that there is something "
                         f"to learn")
    if arguments.torch:
        beside.refuse_division(case, kinds, comm.size)
    measuring.check_model_memory(case.layers, case.hidden, case.batch * case.seq,
                                 arguments.backend, comm)
    publish = publisher(arguments, comm)
    with as_usage_error():
        subject = TimedTraining(GPT(Config(case, config_options.read(Division, arguments)), comm))
    with arguments.watched(subject.mesh.scheme.grid):
        status = publish(
            f"step-{arguments.scheme}-d{arguments.data}-p{arguments.stages}-h{case.hidden}",
            lambda: beside.measure_beside(subject, arguments.torch, kinds, limits))
    subject.model.free()
    return status
