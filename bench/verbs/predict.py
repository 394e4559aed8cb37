"""Predict the paper's tables, or what was or is measured, by the model of a machine."""

import argparse
from functools import partial

from bench.cases.paper import HEADINGS
from bench.cases.selection import select_rows
from bench.command_line import measuring, options, pipeline_options
from bench.command_line.config_options import MEASURED_DTYPES, add_fields
from bench.errors import UsageError, as_usage_error
from bench.instruments import host
from bench.prediction import machine_model
from bench.records.journal import check_folder
from bench.records.run_file import report_left_out
from bench.reports.figures import style
from mm3d.config import Division, Model
from mm3d.console import say
from mm3d.schemes import registry

GROUP = "Plan and predict"
# Options of predictions, and of measurements: each has no use beside the other's.
PREDICTED = dict.fromkeys(("results", "steps", "fit", "table", "stages",
                           *pipeline_options.OF_STAGES, "data", "grid", "pictures"))
MEASURED = {"layers": 1, "rounds": 20, "scheme": [], "inside": [], "dtype": "float32", "seed": 0,
            "out": host.default_out(), "stall": None, "cluster": None}


def measures(arguments: argparse.Namespace) -> bool:
    """Return whether something is measured, on all ranks."""
    return bool(arguments.matmul or arguments.layer)


ON_ALL_RANKS = measures


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``predict``."""
    options.add(parser, "machine")
    parser.add_argument("--results", metavar="DIR",
                        help="set predictions beside the measurements in this folder instead")
    parser.add_argument("--steps", metavar="FILE.csv", help=(
        "predict the steps of training in this file, measured by others, instead; its columns "
        "are those of vTrain, see bench/prediction/README.rst"))
    parser.add_argument("--fit", type=options.whole(1), metavar="GPUS", help=(
        "with --steps: fit the achieved fractions of the machine to the rows of at most so many "
        "GPUs first"))
    parser.add_argument("--table", metavar="NAMES", help=(
        f"rows of these tables: {', '.join(HEADINGS)}, several separated by commas, or all "
        f"(default)"))
    pipeline_options.add_replicas(parser, "replicas of the stages, among which the ranks and the "
                                          "batch of a row are divided")
    pipeline_options.add_pipeline(parser, " and replicas")
    add_fields(parser, Division, ["grid"], about=(
        "with --stages: {}, in a stage, for the rows that have such a grid; with commas between, "
        "one for each stage"), type=options.grids_of_stages)
    options.add(parser, "pictures")
    add_measured(parser.add_argument_group(
        "to measure every scheme and grid now, under mpirun, beside the predictions of a machine "
        "that was calibrated with as many ranks"))


def add_measured(parser: argparse._ArgumentGroup) -> None:
    """Add the options of measurements."""
    parser.add_argument("--matmul", type=options.shape, action="append", metavar="M,N,K",
                        help="a product: C is M x K, the sum has N terms; may be repeated")
    parser.add_argument("--layer", type=options.sizes("HIDDEN,HEADS,BATCH,SEQ"), action="append",
                        metavar="HIDDEN,HEADS,BATCH,SEQ", help="a Transformer; may be repeated")
    add_fields(parser, Model, ["layers"], {"layers": 1})
    parser.add_argument("--rounds", type=options.whole(1), default=20, metavar="N",
                        help="rounds over all measurements, whose medians count (default 20)")
    known = [name for name, scheme in registry().items() if scheme.divides_work]
    add_fields(parser, Division, ["scheme"], {"scheme": []}, (
        f"only these, separated by commas (default: {', '.join(known)})"),
        type=options.some_of(*known), metavar="NAMES")
    parser.add_argument("--inside", type=lambda text: text.split(","), default=[],
                        metavar="AXES", help=(
                            "directions such as x,y,z: measure each grid once for each, placed "
                            "so that lines along it stay inside a node, where ranks fill one node "
                            "after the other (default: in the order of the grid alone)"))
    add_fields(parser, Model, ["dtype"], choices=MEASURED_DTYPES)
    measuring.add_seed(parser)
    measuring.add_shared(parser, "out")
    measuring.add_stall(parser)
    measuring.add_shared(parser, "cluster")


def run(arguments: argparse.Namespace, comm=None) -> int:
    """Print predictions: of the paper's tables, or beside measurements; return the exit status."""
    for name, default in (PREDICTED if measures(arguments) else MEASURED).items():
        if getattr(arguments, name) != default:
            raise UsageError(f"--{name.replace('_', '-')} would do nothing here: it is of "
                             f"predictions "
                             + ("that are not measured now; leave it, or --matmul and --layer, "
                                "out" if measures(arguments) else
                                "that are measured now; give --matmul or --layer too"))
    if measures(arguments):
        return _measure(arguments, comm)
    pipeline_options.check_stage_options(arguments)
    if not arguments.stages:
        options.refuse(arguments, ("data", "grid"), "it is of --stages: give that too")
    if arguments.fit and not arguments.steps:
        options.refuse(arguments, ("fit",), "it is of --steps: give that too")
    if arguments.steps:
        return _steps(arguments)
    if arguments.results:
        return _measured(arguments)
    if arguments.stages:
        return _pipelines(arguments)
    from bench.prediction.published.paper_fit import predict_tables
    from bench.reports import measured_tables as tables
    wanted = {row.table for row in select_rows(arguments.table or "all")}
    if arguments.pictures:
        check_folder(arguments.pictures, "--pictures")
    outcome = predict_tables(machine_model.load_machine(arguments.machine, "float32"))
    parts = [tables.prediction_table(outcome, name) for name in HEADINGS if name in wanted]
    arguments.show([*parts, *tables.prediction_remarks(outcome)])
    if arguments.pictures:
        from bench.reports.figures.prediction import draw_predicted_scaling
        return style.draw_pictures([partial(draw_predicted_scaling, arguments.pictures, outcome)])
    return 0


def _pipelines(arguments: argparse.Namespace) -> int:
    """Print predictions of the paper's rows, layers divided among pipeline stages; 1 for none."""
    from bench.prediction.published.paper_fit import predict_tables
    from bench.prediction.published.paper_pipelines import predict_as_pipelines
    from bench.reports.dry_tables import row_parts
    if arguments.pictures:
        raise UsageError(f"--pictures {arguments.pictures}: pictures are of rows without --stages")
    with as_usage_error():
        schedule = pipeline_options.build_schedule(arguments)
        replicas = pipeline_options.replicas(arguments)
    rows = select_rows(arguments.table or "all")
    outcome = predict_tables(machine_model.load_machine(arguments.machine, "float32"))
    found, missing = predict_as_pipelines(outcome, rows, schedule, arguments.grid, **replicas)
    arguments.show(row_parts(arguments.schedule or "1f1b", schedule, outcome, found, missing))
    return int(not found)


def _steps(arguments: argparse.Namespace) -> int:
    """Print predictions of the steps in a file; return 0, or 1 when no row could be predicted."""
    from bench.prediction.published.published_steps import fit_to_steps, predict_rows, read_steps
    from bench.reports.measured_tables import step_parts
    options.refuse(arguments, ("results", "table", "stages", "pictures"),
                   f"leave it out: --steps {arguments.steps} says all of its rows")
    machine = machine_model.load_machine(arguments.machine)
    rows, problems = read_steps(arguments.steps)
    if arguments.fit:
        machine = fit_to_steps([row for row in rows if row.gpus <= arguments.fit], machine)
    found, more = predict_rows(rows, machine)
    arguments.show(step_parts(machine, found, problems + more, arguments.fit or 0))
    return int(not found)


def _measured(arguments: argparse.Namespace) -> int:
    """Print predictions beside the measurements in the files of a folder."""
    from bench.prediction import beside_measured
    from bench.reports.measured_tables import compare_predictions
    options.refuse(arguments, ("table", "stages", "pictures"),
                   f"leave it out: what --results {arguments.results} has is no row of the "
                   f"paper's tables, and has no figures")
    found, problems = beside_measured.read_measured_folder(arguments.results)
    arguments.show(compare_predictions(machine_model.load_machine(arguments.machine), found))
    return report_left_out(problems)


def _measure(arguments: argparse.Namespace, comm) -> int:
    """Measure products and layers, print them beside the model's seconds; 0 when written."""
    from bench.agreement import broadcast_from_rank_0
    from bench.cluster.spec import Cluster
    from bench.command_line.publish import measure_and_publish
    from bench.experiments.products import operands
    from bench.prediction import whole_steps
    from bench.prediction.beside_measured import read_measured
    from bench.records.journal import claim_folder
    from bench.reports.measured_tables import compare_predictions
    machine = broadcast_from_rank_0(
        lambda: machine_model.load_machine(arguments.machine, arguments.dtype), comm)
    known = sorted({axis for scheme in registry().values() for axis in scheme.directions})
    unknown = [axis for axis in arguments.inside if axis not in known]
    if unknown:
        raise UsageError(f"--inside {','.join(arguments.inside)}: no grid has a direction "
                         f"{unknown[0]!r}; {', '.join(known)} would do")
    transport = operands.default_transport(comm)
    machine_model.check_machine(machine, arguments.machine, comm.size, transport,
                                Cluster.from_environment())
    out = claim_folder(arguments.out, comm)
    batches = broadcast_from_rank_0(lambda: _list_batches(arguments, machine, comm.size), comm)
    chosen = {"dtype": arguments.dtype, "seed": arguments.seed, "transport": transport}
    with as_usage_error():
        return measure_and_publish("check", lambda: whole_steps.measure_check(
            batches, comm, chosen, arguments.rounds,
            lambda line: say(line) if comm.rank == 0 else None), out, comm,
            lambda record: arguments.show(
                compare_predictions(machine, list(read_measured(record)))))


def _list_batches(arguments: argparse.Namespace, machine: machine_model.Machine,
                  ranks: int) -> list[list]:
    """List the works to measure, in batches that fit in memory, on one rank."""
    import math
    from bench.instruments.available_memory import total_memory
    from bench.prediction import work_list
    from bench.prediction.work import predict_seconds
    dtype = arguments.dtype
    works = work_list.list_works(
        ranks, arguments.matmul or (),
        [(*sizes, arguments.layers) for sizes in arguments.layer or ()],
        arguments.inside, arguments.scheme)
    expected = [sum(predict_seconds(machine, work, dtype).values()) for work in works]
    return work_list.works_in_batches(work_list.sort_contenders(works, expected), dtype,
                                      total_memory() or math.inf)
