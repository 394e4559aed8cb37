"""Measure a training step, alone or beside PyTorch's own parallel trainings, under mpirun."""

import argparse

from bench.command_line import measuring, mesh_options, options
from bench.command_line.publish import publish, report_failure
from bench.errors import UsageError, WrongResult
from bench.experiments.torch.parallel import KINDS
from bench.experiments.training import beside
from bench.experiments.training.timed_step import MeasuredTraining, StepCase
from bench.records.journal import claim_folder
from bench.reports.micro_tables import format_record

GROUP = "Train a model"
ON_ALL_RANKS = True
NUMBERS = (("layers", 1, 4, "Transformer layers"), ("hidden", 1, 512, "features of a token"),
           ("heads", 1, 8, "attention heads"), ("vocab", 1, 8192, "tokens of the vocabulary"),
           ("batch", 1, 8, "sequences of a step, of all replicas"),
           ("seq", 1, 256, "tokens in a sequence"))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``step``."""
    measuring.add_out(parser)
    measuring.add_repetitions(parser, beside.LIMITS.repetitions, beside.LIMITS.max_seconds)
    mesh_options.add_mesh(parser)
    for name, least, default, about in NUMBERS:
        parser.add_argument(f"--{name}", type=options.whole(least), default=default, metavar="N",
                            help=f"{about} (default {default})")
    options.add_dtype(parser)
    parser.add_argument("--torch", metavar="PYTHON", help=(
        "measure PyTorch beside it, in turns, by this interpreter (default: nothing beside it)"))
    parser.add_argument("--torch-parallel", metavar="KIND,...", help=(
        f"how PyTorch is parallel, of {', '.join(KINDS)}; one is one process with all cores "
        f"(default: all)"))


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write a step; return the exit status."""
    limits = measuring.limits_of(arguments)
    if arguments.torch_parallel and not arguments.torch:
        raise UsageError(f"--torch-parallel {arguments.torch_parallel} without --torch: the name "
                         f"of an interpreter that has PyTorch would do")
    kinds = arguments.torch_parallel.split(",") if arguments.torch_parallel else list(KINDS)
    case = StepCase(*(getattr(arguments, name) for name, *_ in NUMBERS), arguments.seed,
                    arguments.dtype)
    if arguments.torch:
        beside.refuse_case(case, kinds, comm.size)
    measuring.check_model_memory(case.layers, case.hidden, case.batch * case.seq,
                                 arguments.backend, comm)
    out = claim_folder(arguments.out, comm)
    subject = MeasuredTraining(comm, case, mesh_options.make_placement(arguments))
    name = f"step-{arguments.scheme}-d{arguments.data}-p{arguments.stages}-h{case.hidden}"
    try:
        with arguments.watched(subject.mesh.scheme.grid):
            record = beside.measure_beside(subject, arguments.torch, kinds, limits)
    except WrongResult as wrong:
        return report_failure(name, wrong, comm)
    status = publish(record, out, name, comm, format_record)
    subject.free()
    return status
