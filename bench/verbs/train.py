"""Train a GPT on text, on any mesh, with checkpoints; or the same steps on many, under mpirun."""

import argparse
import hashlib
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

from mpi4py import MPI

from bench.agreement import make_on_each_rank, make_on_rank_0
from bench.command_line import expert_options, measuring, model_options, options
from bench.command_line.config_options import (MESH, Told, add_fields, add_inside, names_of, read,
                                               told)
from bench.command_line.publish import check_pictures, publish, report_failure
from bench.errors import UsageError, WrongResult, as_usage_error
from bench.experiments.products.operands import observe_products
from bench.experiments.torch.child import check_interpreter
from bench.experiments.training import plain_gpt, record, torch_training, trainer
from bench.experiments.training.history import History, progress_line
from bench.experiments.training.plan import Plan
from bench.experiments.training.text import Text, share_text
from bench.experiments.training.trainer import Course, TrainingEnd, TrainingRun
from bench.instruments.placement import mesh_order, reorder_ranks
from bench.records.journal import claim_folder
from bench.records.measurements import Measurements, failed_checks
from bench.reports.figures import style
from bench.reports.micro_tables import showing
from mm3d.config import Config, Division
from mm3d.console import say
from mm3d.launcher import wait_patiently
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run
from mm3d.training.gpt import GPT
from mm3d.training.mesh import check_data, stage_grids

GROUP = "Train a model"
ON_ALL_RANKS = True
# By default, and with --compare: float64 and SGD, so that a wrong factor shows.
TRAINED = Plan(layers=4, hidden=128, heads=4, batch=16, seq=128, steps=300)
COMPARED = Plan(layers=4, hidden=24, heads=6, batch=24, seq=10, steps=50, dtype="float64",
                optimizer="sgd", lr=0.2, weight_decay=0.0, clip=0.0)
CHECKPOINTS = "checkpoints"
COURSE = tuple(Course.__dataclass_fields__)
QUIET = 10.0    # seconds without a line of progress, at most
PLANNED = ("layers", "hidden", "heads", "batch", "seq", "steps", "seed", "dropout", "optimizer",
           "lr", "warmup", "weight_decay", "clip", "momentum", "dtype")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``train``."""
    parser.add_argument("--text", metavar="FILE", help=(
        "learn the bytes of this file (default: the English text of Python's own help)"))
    add_fields(parser, Division, (*MESH, "in_flight", "overlap"))
    model_options.add_named(parser)
    expert_options.add_layers(parser)
    add_fields(parser, Division, ["expert_parallel"])
    add_fields(parser, Plan, PLANNED, {name: Told(default_of(name)) for name in PLANNED})
    add_fields(parser, Plan, ["tied"])
    add_inside(parser)
    add_fields(parser, Course, COURSE, told(Course, COURSE, checkpoints=(
        f": a folder of its own for each text and settings, in ./{CHECKPOINTS}")))
    parser.add_argument("--sample", type=options.whole(1), metavar="N",
                        help="print N bytes that the trained model writes")
    options.add_torch(parser, "the same model is trained afterwards, from the same parameters on "
                              "the same batches")
    parser.add_argument("--compare", action="store_true", help=(
        "instead, train the same steps on one rank and on a list of meshes of these ranks, and "
        "compare losses, gradients and weights, and with --experts which experts were chosen and "
        "what was dropped; fail where they differ; options that choose one mesh are refused"))
    options.add(parser, "pictures")
    measuring.add_shared(parser, "out")
    measuring.add_stall(parser)


def default_of(name: str) -> str:
    """State the default of an option, and its default with ``--compare``."""
    first, second = (getattr(plan, name) for plan in (TRAINED, COMPARED))
    return f"{first}" + (f"; {second} with --compare" if second != first else "")


def run(arguments: argparse.Namespace, comm) -> int:
    """Train, or compare meshes; return the exit status."""
    plan = make_on_each_rank(lambda: make_plan(arguments), comm)    # all see the file of --model
    division = read(Division, arguments)
    if not arguments.inside:
        return run_on(comm, arguments, plan, division)
    own = place_ranks(comm, division, arguments.inside)
    status = run_on(own, arguments, plan, division)
    own.Free()
    return status


def place_ranks(comm, division: Division, inside: str):
    """Return the ranks in the order in which a direction of their mesh lies inside nodes."""
    with as_usage_error():
        shards = check_data(comm.size, division.data, division.shards, division.context)
        kind, replicas = find_scheme(division.scheme), division.data * division.context
        grid = stage_grids(kind, comm.size // replicas, division.stages, division.grid)[0]
        mesh = {"r": replicas // shards, "d": shards, "s": division.stages, **grid}
        return reorder_ranks(comm, mesh, mesh_order(mesh, inside))


def run_on(comm, arguments: argparse.Namespace, plan: Plan, division: Division) -> int:
    """Train on the ranks in their order, or compare meshes; return the exit status."""
    if arguments.torch:
        torch_training.check_torch(plan)
        make_on_rank_0(lambda: check_interpreter(arguments.torch), comm,
                       wait=wait_patiently)
    check_pictures(arguments.pictures, comm)
    measuring.check_model_memory(plan.layers, plan.hidden, plan.batch * plan.seq,
                                 arguments.backend, comm)
    text = share_text(arguments.text, plan.batch, plan.seq, comm)
    out = claim_folder(arguments.out, comm)
    if arguments.compare:
        return compare_trainings(arguments, plan, text, out, comm)
    training = TrainingRun(comm, plan, division, text)
    course = make_course(arguments, training)
    name = f"train-{arguments.scheme}-d{arguments.data}-p{arguments.stages}-h{plan.hidden}"
    try:
        with arguments.watched(training.mesh.scheme.grid):
            outcome = trainer.run_training(training, course, ProgressLines(plan))
    except WrongResult as wrong:
        return report_failure(name, wrong, comm)
    return finish(arguments, training, course, outcome, out, name)


def make_plan(arguments: argparse.Namespace) -> Plan:
    """Make the plan of a training from the given options, and defaults for the others."""
    start, named = COMPARED if arguments.compare else TRAINED, model_options.read_model(arguments)
    if arguments.compare:
        refuse_unused(arguments)
    if named is None:    # its vocabulary is the text's in any case
        more = {"experts": expert_options.experts_of(arguments)}
    else:
        more = {name: getattr(named, name) for name in ("tied", "experts", "architecture")}
    plan = read(start, arguments, **more)
    refuse_without_effect(plan, read(Division, arguments))
    for name in ("save_every", "keep_checkpoints"):
        value = getattr(arguments, name)
        if arguments.checkpoints == "none" and value is not None:
            raise options.without_effect(name, value, "--checkpoints DIR")
    return plan


def check_ranks(arguments: argparse.Namespace, ranks: int) -> None:
    """Build the model of so many ranks dry, as the first; UsageError when there is none."""
    config = Config(make_plan(arguments), read(Division, arguments))
    with as_usage_error():
        dry_run.trace(lambda comm, backend: GPT(config.on(backend), comm), ranks, 0, sys.maxsize,
                      lambda model, trace: None)


def refuse_without_effect(plan: Plan, division: Division) -> None:
    """Refuse options that the others leave without an effect: UsageError names the first."""
    replicas = division.data * division.context
    for nothing, option, value, remedy in (
            (replicas == 1, "zero", division.zero, "--data 2 or more"),
            (replicas == 1, "in-flight", division.in_flight, "--data 2 or more"),
            (division.context == 1, "context-way", "context_way" in division.given() and
             division.context_way, "--context 2 or more"),
            (plan.experts is None, "expert-parallel", division.expert_parallel - 1 and
             division.expert_parallel, "--experts 8"),
            (plan.optimizer != "sgd", "momentum", plan.momentum, "--optimizer sgd"),
            (plan.optimizer == "sgd", "lr-warmup", plan.warmup, "--optimizer adamw")):
        if value and nothing:
            raise options.without_effect(option, value, remedy)


def refuse_unused(arguments: argparse.Namespace) -> None:
    """Refuse the options that ``--compare`` would ignore: UsageError names the first."""
    for name in options.given_of(arguments, ("torch", "sample", "inside",
                                             *names_of(Course, COURSE))):
        raise UsageError(f"--compare with --{name.replace('_', '-')}: it trains many models "
                         f"for a few steps; leave one of them out")
    for name in read(Division, arguments).given():
        raise UsageError(f"--compare with --{name.replace('_', '-')}: it trains on a list of "
                         f"meshes of its own; leave one of them out")


def make_course(arguments: argparse.Namespace, training: TrainingRun) -> Course:
    """Return when to validate, to save and to stop."""
    folder = arguments.checkpoints
    if folder is None:
        digest = hashlib.blake2b(json.dumps(training.settings()).encode(), digest_size=4)
        folder = str(Path(CHECKPOINTS) / digest.hexdigest())
    return read(Course, arguments, checkpoints=None if folder == "none" else folder)


class ProgressLines:
    """Print a line of progress after each validation, and now and then."""

    def __init__(self, plan: Plan, who: str = "") -> None:
        self.plan, self.who, self.last = plan, who, time.monotonic()

    def __call__(self, done: int, history: History) -> None:
        """Print the line of `done` steps, if it is time."""
        if done in history.validation or time.monotonic() > self.last + QUIET:
            self.last = time.monotonic()
            say(self.who + progress_line(
                done, history, self.plan.steps, self.plan.batch * self.plan.seq))


def finish(arguments: argparse.Namespace, training: TrainingRun, course: Course,
           outcome: TrainingEnd, out: Path, name: str) -> int:
    """Train by PyTorch if asked; write and draw the record; print a sample."""
    comm, status, beside = training.comm, 0, None
    if arguments.torch:
        try:
            beside = by_torch(arguments, training, course, outcome)
        except UsageError as error:    # the record of what was trained is not lost
            status = report_failure(name, error, comm)
    found = record.training_record(training, course, outcome, beside)
    status = write(arguments, found, out, name, comm) or status
    if lost := trainer.lost_loss(training, outcome):
        status = report_failure(name, lost, comm)
    elif arguments.sample:
        state = training.model.state()
        if comm.rank == 0:
            written = plain_gpt.write_sample(state, training.plan, arguments.sample)
            say(f"\nwhat the model writes, {arguments.sample} bytes:\n"
                f"{written.decode(errors='replace')}")
        wait_patiently(comm)
    if outcome.ended_by != "steps" and comm.rank == 0:
        say(f"stopped after {outcome.steps} of {training.plan.steps} steps"
            + (f"; the same command goes on from {course.checkpoints}" if course.checkpoints
               else ": without checkpoints nothing is kept"))
    training.free()
    return status


def by_torch(arguments: argparse.Namespace, training: TrainingRun, course: Course,
             outcome: TrainingEnd) -> Any:
    """Train the same by PyTorch on rank 0, while the others sleep and return None."""
    plan, comm = training.plan, training.comm
    batch = training.text.batch(plan.seed, 0, plan.batch, plan.seq)
    products = observe_products(lambda: training.model.step(*batch), training.mesh.scheme.grid)
    training.model.zero_gradients()

    def work() -> torch_training.TorchTraining:
        alone = Division(scheme="serial", backend="numpy")
        state = GPT(Config(plan, alone), MPI.COMM_SELF).state()
        return torch_training.train_by_torch(
            arguments.torch, plan, training.text, state, outcome.steps,
            outcome.history.validation, course.validation_batches,
            ProgressLines(plan, "PyTorch: "),
            training.model.schedule.microbatches, products)
    return make_on_rank_0(work, comm, wait=wait_patiently)


def compare_trainings(arguments: argparse.Namespace, plan: Plan, text: Text, out: Path,
                      comm) -> int:
    """Compare meshes; print the table in any case, and fail where they differ."""
    from bench.experiments.training import comparison    # which a training does without
    found = comparison.compare_meshes(comm, plan, text, lambda name: say(f"training: {name}"),
                                      arguments.watched)
    name = f"train-meshes-{comm.size}-ranks"
    if comm.rank == 0 and failed_checks(found.checks):
        showing(arguments.show)(found)
        say()
    return write(arguments, found, out, name, comm)


def write(arguments: argparse.Namespace, found: Measurements | None, out: Path, name: str,
          comm) -> int:
    """Write, print and draw the record of rank 0, or report which of its checks failed."""
    if problem := comm.bcast(found and "; ".join(failed_checks(found.checks))):
        return report_failure(name, problem, comm)
    status = publish(found, out, name, comm, showing(arguments.show))
    return draw_training(found, arguments.pictures, name, comm) or status


def draw_training(found: Measurements | None, folder: str | None, name: str, comm) -> int:
    """Draw the picture of a record on rank 0, if there is a folder; 1 if it cannot be, else 0."""
    status = 0
    if folder and comm.rank == 0:
        from bench.reports.figures import training
        picture = (training.training_picture if found.kind == record.KIND
                   else training.meshes_picture)
        status = style.draw_pictures([partial(picture, Path(folder) / f"{name}.png", found)])
    return comm.bcast(status)
