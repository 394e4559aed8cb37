"""Measure pipelines: schedules executed over MPI, verified, beside the clock, under mpirun."""

import argparse
import gc
import re
from fractions import Fraction
from functools import partial
from pathlib import Path

from bench.cases.variants import Variant
from bench.command_line import measuring, options
from bench.command_line.config_options import MEASURED_DTYPES, add_fields, read, told
from bench.command_line.publish import (check_pictures, check_trace_file, publish,
                                        report_failure)
from bench.errors import WrongResult, as_usage_error
from bench.experiments.pipeline.action_trace import make_action_trace
from bench.experiments.pipeline.measured import measure_pipeline, refuse_pipeline
from bench.experiments.pipeline.subject import PipelineCase, make_pipeline_case
from bench.instruments import chrome_trace
from bench.records.journal import claim_folder
from bench.records.measurements import Measurements
from bench.reports.figures import style
from bench.reports.micro_tables import make_parts
from mm3d import Mesh, ModelSizes
from mm3d.config import Division, Model
from mm3d.console import say
from mm3d.schemes import find_scheme
from mm3d.training.mesh import stage_grids

ON_ALL_RANKS = True
TIMES, UNIT = (Fraction(1),) * 3, Fraction(1, 100)    # by default, with waits
LONGEST = 3600    # seconds that an action may wait
UNITS = {"s": 1, "ms": Fraction(1, 1000), "us": Fraction(1, 10 ** 6)}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure pipeline``."""
    measuring.add_measurement(parser, 5, 20.0)
    add_fields(parser, Division, ["stages"], told(Division, ["stages"], stages=""), (
        "groups of ranks, each with one or more ranges of layers"), required=True)
    add_fields(parser, Division, ["scheme"])
    add_fields(parser, Division, ["grid"], about=(
        "{}, in a stage; with commas between, one for each stage"), type=options.grids_of_stages)
    add_fields(parser, Division, ["schedule"], {"schedule": ["1f1b", "zb-h1"]}, (
        "{}; several with commas between; interleaved:3 has 3 chunks a rank, auto is searched for "
        "and has one"), type=options.schedules, metavar="NAMES")
    add_fields(parser, Division, ["microbatches"], {"microbatches": [8]}, (
        "micro-batches of a step; several with commas between"), type=options.numbers,
        metavar="M,...")
    sizes = {"layers": 8, "hidden": 128, "heads": 4, "seq": 64}
    add_fields(parser, Model, sizes, sizes)
    parser.add_argument("--microbatch", type=options.whole(1), default=2, metavar="N",
                        help="sequences in a micro-batch (default 2)")
    add_fields(parser, Model, ["dtype"], choices=MEASURED_DTYPES)
    add_fields(parser, Division, ["recompute"])
    add_fields(parser, Variant, ["work"], about=(
        "what actions do: compute layers, or wait for --times with the core given away, so that "
        "ranks may outnumber cores; messages and dependencies are real either way"))
    parser.add_argument("--times", type=options.fractions, metavar="F,B,W", help=(
        "with --work wait: times of all layers of a rank for one micro-batch, in units of "
        "--unit: forward, gradient of the input, gradient of the weights (default 1,1,1)"))
    parser.add_argument("--unit", type=duration, metavar="TIME",
                        help="the unit of --times, such as 10ms or 500us (default 10ms)")
    options.add_torch(parser, "torch.distributed.pipelining is measured beside it, by gloo, in "
                              "turns: the same schedule, stages, layers or waits; a stage is one "
                              "rank")
    options.add(parser, "pictures")
    parser.add_argument("--trace", metavar="FILE", help=(
        "write the actions of the median repetition and the clock's for chrome://tracing; with "
        "several schedules the name of each is put into the file's"))


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write each schedule and number of micro-batches; return the exit status."""
    limits = measuring.limits_of(arguments)
    with as_usage_error():
        cases = list_pipelines(arguments)
        mesh = Mesh(comm, arguments.stages, arguments.scheme, arguments.grid, arguments.backend)
    for case in cases if arguments.torch else []:
        refuse_pipeline(mesh, case)
    check_trace_file(arguments.trace, comm)
    measuring.check_model_memory(arguments.layers, arguments.hidden,
                                 arguments.microbatch * arguments.seq, arguments.backend, comm)
    out = claim_folder(arguments.out, comm)
    check_pictures(arguments.pictures, comm)
    status, records = 0, []
    for case in cases:
        gc.collect()
        name = (f"pipeline-{case.work}-{case.name.replace(':', '')}-p{arguments.stages}-"
                f"m{case.schedule.microbatches}{'-torch' * bool(arguments.torch)}")
        try:
            with arguments.watched(mesh.scheme.grid):
                record = measure_pipeline(mesh, case, limits, arguments.torch)
        except WrongResult as wrong:
            status = report_failure(name, wrong, comm)
            continue
        status = max(status, publish(record, out, name, comm))
        if arguments.trace:
            file = chrome_trace.trace_file(arguments.trace, name, len(cases))
            status = max(status, comm.bcast(
                record and chrome_trace.write_file(file, make_action_trace(record))))
        if arguments.pictures:
            status = max(status, comm.bcast(
                record and draw_timeline(record, Path(arguments.pictures) / f"{name}.png")))
        if record is not None:
            records.append(record)
    if records:
        say()
        arguments.show(make_parts(records))
    mesh.free()
    return status


def check_ranks(arguments: argparse.Namespace, ranks: int) -> None:
    """Raise UsageError if so many ranks cannot run the pipeline: its stages, grid or schedules."""
    with as_usage_error():
        list_pipelines(arguments)
        stage_grids(find_scheme(arguments.scheme), ranks, arguments.stages, arguments.grid)


def list_pipelines(arguments: argparse.Namespace) -> list[PipelineCase]:
    """List the cases to measure; ValueError for impossible options, schedules or models."""
    waits = find_waits(arguments)
    sizes = read(ModelSizes, arguments, batch=arguments.microbatch)
    return [make_pipeline_case(name, arguments.stages, microbatches, sizes, seed=arguments.seed,
                               dtype=arguments.dtype, recompute=arguments.recompute, waits=waits)
            for microbatches in arguments.microbatches for name in arguments.schedule]


def find_waits(arguments: argparse.Namespace) -> tuple[Fraction, ...] | None:
    """Return the seconds of F, B and W with ``--work wait``, None without."""
    waits = arguments.work == "wait"
    for name, given in (("times", arguments.times), ("unit", arguments.unit)):
        if given is not None and not waits:
            raise ValueError(f"--{name} is for --work wait, and --work {arguments.work} computes "
                             f"layers: leave --{name} out, or add --work wait")
    if waits and arguments.recompute != "none":
        raise ValueError(f"--recompute {arguments.recompute} is for --work compute, and --work "
                         f"wait recomputes nothing: leave one of them out")
    found = tuple(time * (arguments.unit or UNIT) for time in arguments.times or TIMES)
    if waits and max(found) > LONGEST:
        raise ValueError(f"--times and --unit let an action wait {float(max(found)):g} s: at most "
                         f"{LONGEST} would do")
    return found if waits else None


def draw_timeline(record: Measurements, path: Path) -> int:
    """Draw the measured timeline above the clock's; 1 if that cannot be, else 0."""
    from bench.reports.figures import measured_timelines
    return style.draw_pictures([partial(
        style.save_picture, path, partial(measured_timelines.draw, record), dpi=110)])


def duration(text: str) -> Fraction:
    """Read a time such as ``10ms`` in seconds."""
    found = re.fullmatch(r"(\d{1,9}(?:\.\d{1,9})?)(s|ms|us)", text)
    seconds = Fraction(found[1]) * UNITS[found[2]] if found else 0
    if not 0 < seconds <= LONGEST:
        raise argparse.ArgumentTypeError(f"{text!r}: a time such as 10ms, 500us or 1s would do, "
                                         f"of at most {LONGEST} s")
    return seconds
