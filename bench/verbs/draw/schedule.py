"""Print, check, time and draw pipeline schedules, from a name or a file."""

import argparse
from fractions import Fraction
from functools import partial

from bench.command_line import options
from bench.document import Notes
from bench.errors import UsageError, as_usage_error
from bench.prediction.pipelines import schedule_costs
from bench.prediction.pipelines.schedule_costs import ComparedPipeline
from bench.reports import schedule_tables
from bench.reports.figures import style
from mm3d.console import say
from mm3d.training.schedules import all_builders, format_schedule
from mm3d.training.schedules.builders import check_request


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``draw schedule``."""
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--schedule", type=options.schedule, metavar="NAME", help=(
        f"the schedule: {', '.join(all_builders())}; interleaved:3 has 3 chunks a rank; auto "
        f"is searched for, with one stage a rank"))
    what.add_argument("--file", metavar="FILE", help=(
        "a schedule as this verb prints it, such as an edited one; it is checked"))
    parser.add_argument("--stages", type=options.whole(1), metavar="P",
                        help=(
        "ranks of the pipeline, each with one or more chunks of layers (needed with --schedule)"))
    parser.add_argument("--microbatches", type=options.whole(1), metavar="M",
                        help="micro-batches of a step (needed with --schedule)")
    parser.add_argument("--times", type=options.fractions, default=(Fraction(1),) * 3,
                        metavar="F,B,W", help=(
        "times of all layers of a rank for one micro-batch, in any unit: forward, gradient of the "
        "input, gradient of the weights (default 1,1,1)"))
    parser.add_argument("--hop", type=options.fraction, default=Fraction(0), metavar="TIME",
                        help="time of a message between ranks, in the unit of --times (default 0)")
    parser.add_argument("--max-activations", type=options.fraction, metavar="N", help=(
        "the most that auto may hold, in activations of one micro-batch (default: as many as "
        "stages); others that hold more are named"))
    parser.add_argument("--kept", type=options.fraction, default=Fraction(1), metavar="SHARE",
                        help=(
        "share of the activations, 0 to 1, kept after the gradient of the input until that of the "
        "weights is done (default 1)"))
    parser.add_argument("--beside", type=options.schedules, default=[], metavar="NAMES",
                        help="further schedules, with commas between")
    parser.add_argument("--picture", metavar="FILE",
                        help="draw all of them: .png, .svg or .pdf")


def run(arguments: argparse.Namespace) -> int:
    """Print a schedule and its costs, and draw it; UsageError when that is not possible."""
    if arguments.picture:
        style.check_picture(arguments.picture)
    schedule = schedule_costs.read_schedule(arguments.file) if arguments.file else None
    pipeline = _pipeline(arguments, schedule)
    names = list(dict.fromkeys([*[arguments.schedule] * (not schedule), *arguments.beside]))
    with as_usage_error():    # before any is built
        for name in names:
            check_request(name, pipeline.ranks, pipeline.microbatches)
    if schedule:
        timelines = {arguments.file: schedule_costs.timed_schedule(schedule, pipeline)}
    else:
        timelines = {arguments.schedule: schedule_costs.timed(arguments.schedule, pipeline)}
    first = next(iter(timelines.values()))
    timelines |= {name: schedule_costs.timed(name, pipeline) for name in arguments.beside}
    warnings = [f"MEMORY: {name} {problem}" for name, timeline in timelines.items()
                if (problem := schedule_costs.over_memory(timeline, pipeline))]
    text, parts = format_schedule(first.schedule), [
        schedule_tables.costs(timelines), schedule_tables.cost_notes(),
        schedule_tables.chains(timelines),
        *[Notes("More than the memory", warnings)] * bool(warnings)]
    if arguments.format == "text":
        say(text)
    else:
        parts = [Notes("Schedule", text.splitlines()), *parts]
    arguments.show(parts)
    from bench.reports.figures import schedules as figures
    draws = [partial(figures.picture, arguments.picture, timelines)] * bool(arguments.picture)
    return style.draw_pictures(draws)


def _pipeline(arguments: argparse.Namespace, schedule) -> ComparedPipeline:
    """Return sizes and times from the options; a schedule file gives its own sizes."""
    sizes = []
    for option, own in (("stages", "ranks"), ("microbatches", "microbatches")):
        value = getattr(arguments, option)
        if schedule and value not in (None, getattr(schedule, own)):
            raise UsageError(f"--{option} {value}: {arguments.file} has {getattr(schedule, own)}")
        if not schedule and value is None:
            raise UsageError(f"--schedule {arguments.schedule}: give --{option} too")
        sizes.append(getattr(schedule, own) if schedule else value)
    if arguments.kept > 1:
        raise UsageError(f"--kept {arguments.kept}: a share from 0 to 1 would do")
    return ComparedPipeline(*sizes, arguments.times, arguments.hop, arguments.max_activations,
                            arguments.kept)
