"""Rank every scheme and grid by predicted time, or whole trainings on a number of GPUs."""

import argparse
import time
from dataclasses import replace
from functools import partial
from typing import Any

from bench.command_line import expert_options, model_options, options, pipeline_options
from bench.command_line.config_options import add_fields, told
from bench.command_line.progress import StatusLine
from bench.errors import UsageError, as_usage_error
from bench.prediction import machine_model, planner
from bench.prediction.closed_form_plan import screen_grid
from bench.prediction.meshes.layer_costs import list_costs, list_layer_costs
from bench.prediction.model_file import ModelFile
from bench.prediction.pipelines import pipeline_seconds
from bench.prediction.training_plans.choices import Training
from bench.prediction.training_plans.search import Search
from bench.records.journal import check_folder
from bench.reports import dry_tables
from bench.reports.figures import style
from bench.reports.plans import training_plans
from bench.reports.plans.layer_costs import layer_costs_parts, printed_costs_parts
from bench.reports.plans.training_plans import plan_remarks, plan_table
from mm3d import ModelSizes
from mm3d.config import Division, Model
from mm3d.console import say
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.experts.token_order import capacity_of
from mm3d.model.sizes import SIZES
from mm3d.model.stack import Stack

GROUP = "Plan and predict"
# Defaults of options; plans of whole trainings, which have a model of their own, have others.
SIZES_OF_LAYERS = {"layers": 24, "batch": 384, "seq": 512}
DEFAULTS = SIZES_OF_LAYERS | {"dtype": "float32", "recompute": "none"}
# What a training needs to be planned.
SUCH = {"gpus": "512", "model": "llama-3-70b", "batch": "512"}
MOST_CONTEXT = 1024    # of --contexts: a dry run for each
OF_TRAININGS = ("gpus", "all", "hide_sums")
OF_LAYERS = ("ranks", "recompute", "data", "stages", *pipeline_options.OF_STAGES, "costs",
             "pictures")


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``plan``."""
    parser.add_argument("--gpus", type=options.ranks, metavar="N", help=(
        "instead, plan whole trainings of --model on N GPUs: replicas, stages, schemes and grids, "
        "ZeRO, experts, schedules, micro-batches and recomputation that fit the memory, in "
        "float16 unless --dtype says more"))
    model_options.add_named(parser)
    parser.add_argument("--all", action="store_true", help=(
        "with --gpus: also print predicted plans that do not fit, the nearest where none does, "
        "and what they lack"))
    options.add(parser, "hide_sums")
    parser.add_argument("--rules", nargs="?", const="overview", metavar="NAME", help=(
        "instead, test rules of thumb for meshes: those of a supplied file (default: overview) "
        "or of a .toml file, each beside the planner's own choice"))
    parser.add_argument("--map", type=options.numbers, metavar="N,N", help=(
        "instead, estimate on which of these numbers of GPUs X x Y x Z trains --model faster than "
        "1 x t x 1 with a pipeline, at 1/8 to 8 times the machine's rate of links between nodes; "
        "--pictures draws it"))
    parser.add_argument("--contexts", type=options.numbers, metavar="N,N", help=(
        "instead, count what these numbers of ranks move that divide the positions of sequences "
        "of --model, 8192 to 524288 tokens or --seq, keys and values gathered or in a ring"))
    parser.add_argument("--ranks", type=options.ranks, metavar="N",
                        help="ranks of the job, of all replicas")
    add_fields(parser, Model, (*SIZES, "dtype"), told(
        Model, (*SIZES, "dtype"), hidden=": none", heads=model_options.HEADS, **SIZES_OF_LAYERS))
    options.add(parser, "machine")
    parser.add_argument("--top", type=options.whole(1), default=12, metavar="N",
                        help="number of plans to print (default 12)")
    parser.add_argument("--costs", action="store_true", help=(
        "also print what two linear layers cost a rank in 1-D, 2-D, 2.5-D and 3-D, as counted by "
        "dry runs and as the documentation of Colossal-AI prints it, and what a Transformer layer "
        "costs the least, the mean and the busiest rank in every scheme"))
    add_fields(parser, Division, ["recompute"], told(Division, ["recompute"]))
    pipeline_options.add_replicas(parser, "replicas of the stages, among which the ranks and the "
                                          "batch are divided")
    pipeline_options.add_pipeline(parser, " of a replica")
    expert_options.add_layers(parser)
    options.add(parser, "pictures")


def run(arguments: argparse.Namespace) -> int:
    """Print the plans; return 0."""
    if arguments.pictures:
        check_folder(arguments.pictures, "--pictures")
    if "help" in (arguments.machine, arguments.model, arguments.rules):
        return _formats(arguments)
    if arguments.rules:
        return _rules(arguments)
    if arguments.map:
        return _map(arguments)
    if arguments.contexts:
        return _contexts(arguments)
    if arguments.gpus or arguments.model or arguments.all or arguments.hide_sums:
        return _trainings(arguments)
    for name in ("ranks", "hidden"):
        if getattr(arguments, name) is None:
            raise UsageError(f"--{name} is missing: --ranks 8 --hidden 1024 would do, or --gpus "
                             f"512 --model llama-3-70b for whole trainings")
    for name, value in DEFAULTS.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)
    pipeline_options.check_stage_options(arguments)
    if arguments.data and not arguments.stages:
        raise UsageError(f"--data {arguments.data}: give --stages too, such as --stages 1; plans "
                         f"without are of one replica")
    pipeline_options.divide_among_replicas(arguments)
    pipeline_options.stage_ranks(arguments)
    ranks, dtype, recompute = arguments.ranks, arguments.dtype, arguments.recompute
    if ranks < 2:
        raise UsageError(f"--ranks {ranks}: at least 2 ranks would do, in each replica")
    machine = machine_model.load_machine(arguments.machine, dtype)
    sizes = model_options.model_sizes(arguments)
    experts = expert_options.experts_of(arguments)
    if experts:
        _check_experts(arguments, experts, sizes)
    stack = Stack(**sizes, dtype=dtype, recompute=recompute, experts=experts)
    if arguments.stages:
        return _pipelines(arguments, machine, stack)
    start = time.perf_counter()
    with as_usage_error():
        found = planner.rank_plans(ranks, machine, stack,
                                   max(arguments.top, planner.TRACED_OF_MANY))
    took = time.perf_counter() - start
    shown = found[:arguments.top]
    fits = [planner.describe_fit(one, machine, stack) for one in shown]
    title = (f"{ranks} ranks; " + ", ".join(f"{key} {value}" for key, value in sizes.items())
             + f", {dtype}, recompute {recompute}")
    parts = [machine.described, title, plan_table(shown, fits),
             plan_remarks(found, sizes, ranks, took, experts is not None)]
    if experts:
        parts.append(dry_tables.plan_notes(experts))
    if arguments.costs:
        parts += printed_costs_parts(*list_costs(ranks, sizes), ranks, sizes)
        parts += layer_costs_parts(*list_layer_costs(ranks, sizes), ranks, sizes)
    arguments.show(parts)
    if arguments.pictures:
        from bench.reports.figures.prediction import draw_plans
        return style.draw_pictures(draw_plans(arguments.pictures, ranks, machine, stack))
    return 0


def _trainings(arguments: argparse.Namespace) -> int:
    """Print the plans of whole trainings; return 0.  With ``--all`` also those that do not fit."""
    _require(arguments, *SUCH)
    options.refuse(arguments, OF_LAYERS,
                   "with --gpus the plan says it; leave it, or --gpus and --model, out")
    asked = model_options.words_of(arguments)
    training = _training(arguments, arguments.hide_sums, arguments.machine, asked)
    nearest, problem = [], None
    with StatusLine() as status:
        search = Search(training, status.show)
        try:
            found = search.run()
        except UsageError as error:
            nearest, problem = search.nearest(arguments.top) if arguments.all else [], error
    if nearest:
        arguments.show([*training_plans.headings(training),
                        training_plans.unfit_table(training, nearest)])
    if problem:
        raise problem
    arguments.show(training_plans.training_parts(training, found, arguments.all, arguments.top))
    return 0


def _formats(arguments: argparse.Namespace) -> int:
    """Print the format of the files of machines, models or rules; return 0."""
    from bench.reports.log_tables import describe_format
    from bench.prediction.meshes.rules_of_thumb import Rules
    formats = {"machine": (machine_model.Machine, "dgx-a100"), "model": (ModelFile, "gpt-3-175b"),
               "rules": (Rules, "overview")}
    for name, (kind, example) in formats.items():
        if getattr(arguments, name) == "help":
            say(describe_format(name.removesuffix("s"), kind, example))
    return 0


def _rules(arguments: argparse.Namespace) -> int:
    """Print rules of thumb beside the planner's choice; return 0."""
    from bench.prediction.meshes.rules_of_thumb import check_rules, load_rules
    from bench.reports.plans.kind_map import rule_parts
    options.refuse(arguments, ("model", *model_options.EXPERT_OPTIONS, *SIZES, "map", "contexts",
                               *OF_TRAININGS, *OF_LAYERS),
                   f"the rules of --rules {arguments.rules} say it; leave it, or --rules, out")
    rules, dtype = load_rules(arguments.rules), arguments.dtype or "float16"
    machine = machine_model.load_machine(arguments.machine, dtype)
    with StatusLine() as status:
        found = [*check_rules(rules, machine, dtype, status.show)]
    arguments.show(rule_parts(rules, machine, found))
    return 0


def _map(arguments: argparse.Namespace) -> int:
    """Print, and draw, where X x Y x Z is faster than 1 x t x 1; return 0."""
    from bench.prediction.meshes.kind_map import FACTORS, map_kinds
    from bench.reports.plans.kind_map import map_parts
    _require(arguments, "model", "batch")
    options.refuse(arguments, ("contexts", *OF_TRAININGS,
                               *(name for name in OF_LAYERS if name != "pictures")),
                   "with --map the plans say it; leave it, or --map, out")
    if max(arguments.map) > options.MOST_RANKS:
        raise UsageError(f"--map {max(arguments.map)}: at most {options.MOST_RANKS} GPUs would do")
    asked = _training(arguments)
    rates = [factor * asked.machine.network.bytes_per_second for factor in FACTORS]
    with StatusLine() as status:
        places = [*map_kinds(asked, arguments.map, rates, status.show)]
    arguments.show(map_parts(asked, places))
    if arguments.pictures:
        from bench.reports.figures.prediction import draw_map
        return style.draw_pictures([partial(draw_map, arguments.pictures, asked, places)])
    return 0


def _contexts(arguments: argparse.Namespace) -> int:
    """Print both ways of contexts beside each other; return 0."""
    from bench.prediction.meshes.context_ways import LENGTHS, list_contexts
    from bench.reports.plans.kind_map import context_parts
    _require(arguments, "model")
    options.refuse(arguments, ("batch", "layers", *OF_TRAININGS, *OF_LAYERS), (
        "with --contexts one sequence of one layer is counted; leave it, or --contexts, out"))
    if max(arguments.contexts) > MOST_CONTEXT or min(arguments.contexts) < 2:
        raise UsageError(f"--contexts {','.join(map(str, arguments.contexts))}: numbers from 2 to "
                         f"{MOST_CONTEXT} would do")
    lengths, asked = [arguments.seq] if arguments.seq else LENGTHS, _training(arguments)
    with as_usage_error(), StatusLine() as status:
        places = [*list_contexts(asked, arguments.contexts, lengths, status.show)]
    arguments.show(context_parts(asked, places))
    return 0


def _training(arguments: argparse.Namespace, *more: Any) -> Training:
    """Return the training of ``--model``, by default of a sequence on one GPU in float16."""
    gpt, dtype = model_options.read_model(arguments), arguments.dtype or "float16"
    return Training(gpt, arguments.gpus or 1, arguments.batch or 1, gpt.seq, dtype,
                    machine_model.load_machine(arguments.machine, dtype), *more)


def _require(arguments: argparse.Namespace, *names: str) -> None:
    """Raise UsageError if one of these options of a training was not given."""
    for name in names:
        if getattr(arguments, name) is None:
            raise UsageError(f"--{name} is missing to plan a training: --{name} {SUCH[name]} "
                             f"would do")


def _check_experts(arguments: argparse.Namespace, experts: ExpertOptions,
                   sizes: ModelSizes) -> None:
    """Raise UsageError for options that cannot be planned with experts."""
    for name in ("pictures", "costs", "data"):
        if getattr(arguments, name):
            raise UsageError(f"--experts {experts.count} --{name}: what is planned with experts "
                             f"is one replica, in one table; leave one of them out")
    if not arguments.stages:    # micro-batches have fewer tokens
        with as_usage_error():
            capacity_of(experts, sizes.tokens)


def _pipelines(arguments: argparse.Namespace, machine: machine_model.Machine,
               stack: Stack) -> int:
    """Print the plans of a pipeline's stages; 0."""
    if arguments.pictures:
        raise UsageError(f"--pictures {arguments.pictures}: pictures are of plans without "
                         f"--stages")
    if arguments.costs:
        raise UsageError("--costs: the costs are of layers without --stages")
    with as_usage_error():
        every = [pipeline_options.pipeline_model(arguments, scheme, (grid,) * arguments.stages,
                                                 stack)
                 for scheme, grid in planner.list_candidates(
                     pipeline_options.stage_ranks(arguments))]
    stage = replace(stack, layers=max(map(len, every[0].parts)), batch=every[0].micro.batch)
    best = sorted(every, key=lambda one: screen_grid(
        one.scheme, one.grids[0], machine, stage).seconds)[:arguments.top]
    found = pipeline_seconds.plan_pipelines(best, machine)
    parts = [machine.described, *dry_tables.plan_parts(found, len(every))]
    if stack.experts:
        parts.append(dry_tables.plan_notes(stack.experts))
    arguments.show(parts)
    return 0
