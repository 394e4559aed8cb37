"""Predict the paper's tables by a machine model fitted on some of their rows."""

import argparse
from functools import partial

from bench.cases.paper import HEADINGS
from bench.cases.selection import select_rows
from bench.errors import UsageError
from bench.prediction import machine_model
from bench.document import Notes
from bench.reports.formats import FORMATS, render
from bench.reports.figures import style
from bench.command_line import options, pipeline_options
from mm3d.console import say

GROUP = "Plan and predict"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``predict``."""
    options.add_machine(parser)
    parser.add_argument("--results", metavar="DIR",
                        help="set predictions beside the measurements in this folder instead")
    parser.add_argument("--table", metavar="NAMES", help="weak, strong or all (default)")
    pipeline_options.add_replicas(parser, "replicas of the stages, among which the ranks and the "
                                          "batch of a row are divided")
    pipeline_options.add_pipeline(parser, " and replicas")
    parser.add_argument("--grid", type=options.stage_grids, metavar="XxYxZ", help=(
        "with --stages: sizes of the grid's directions in a stage, such as 2x2x2, for the rows "
        "that have such a grid; with commas between, one for each stage (default: that of each "
        "scheme, such as a cube)"))
    options.add_pictures(parser)
    options.add_format(parser, FORMATS)


def run(arguments: argparse.Namespace) -> int:
    """Print predictions beside the paper's tables, or beside measurements of ``--results``; 0."""
    pipeline_options.check_stages(arguments)
    if not arguments.stages:
        _refuse(arguments, ["data", "grid"], "it is of --stages: give that too")
    if arguments.results:
        return _measured(arguments)
    if arguments.stages:
        return _pipelines(arguments)
    from bench.prediction.paper_fit import predict_tables
    from bench.reports import prediction_tables as tables
    wanted = {row.table for row in select_rows(arguments.table or "all")}
    outcome = predict_tables(machine_model.load_machine(arguments.machine, "float32"))
    parts = [tables.prediction_table(outcome, name) for name in HEADINGS if name in wanted]
    say(render([*parts, *tables.prediction_remarks(outcome)], arguments.format))
    if arguments.pictures:
        from bench.reports.figures.prediction import draw_scaling
        return style.draw_pictures([partial(draw_scaling, arguments.pictures, outcome)],
                                   arguments.format)
    return 0


def _pipelines(arguments: argparse.Namespace) -> int:
    """Print predictions of the paper's rows whose layers are divided among stages; 0."""
    from bench.prediction.paper_fit import predict_tables
    from bench.prediction.paper_pipelines import predict_rows
    from bench.reports.predicted_pipelines import row_parts
    if arguments.pictures:
        raise UsageError(f"--pictures {arguments.pictures}: pictures are of rows without --stages")
    try:
        schedule = pipeline_options.build_schedule(arguments)
        replicas = pipeline_options.replicas(arguments)
    except ValueError as error:
        raise UsageError(str(error)) from error
    rows = select_rows(arguments.table or "all")
    outcome = predict_tables(machine_model.load_machine(arguments.machine, "float32"))
    found, missing = predict_rows(outcome, rows, schedule, arguments.grid, **replicas)
    say(render(row_parts(arguments.schedule or "1f1b", schedule, outcome, found, missing),
               arguments.format))
    return 0


def _refuse(arguments: argparse.Namespace, names: list[str], remedy: str) -> None:
    """Raise UsageError if one of these options was given."""
    for name in names:
        value = getattr(arguments, name.replace("-", "_"))
        if value is not None:
            raise UsageError(f"--{name} {_as_given(value)}: {remedy}")


def _as_given(value: object) -> str:
    """Return the value of an option as it is written."""
    if isinstance(value, tuple):
        return "x".join(map(str, value))
    return ",".join(map(_as_given, value)) if isinstance(value, list) else str(value)


def _measured(arguments: argparse.Namespace) -> int:
    """Print predictions beside the measurements in the files of a folder."""
    from bench.prediction import beside_measured
    from bench.reports.measured_tables import compare_predictions
    idle = [f"--{name} {value}" for name in ("table", "stages", "pictures")
            if (value := getattr(arguments, name)) is not None]
    if idle:
        raise UsageError(f"--results {arguments.results} {' '.join(idle)}: what was measured is "
                         f"no row of the paper's tables and has no figures; give --results "
                         f"without {' and '.join(name.split()[0] for name in idle)}")
    found, problems = beside_measured.read_measured_folder(arguments.results)
    parts = compare_predictions(machine_model.load_machine(arguments.machine), found)
    if problems:
        parts.append(Notes("Left out:", problems))
    say(render(parts, arguments.format))
    return 0
