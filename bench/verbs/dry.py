"""Count the work of one rank in a step, on any number of ranks, without running it."""

import argparse
import sys
from dataclasses import replace

from bench.cases.variants import Variant
from bench.command_line import expert_options, model_options, options, pipeline_options
from bench.command_line.config_options import add_fields, add_inside, read_grid, told
from bench.errors import UsageError
from bench.prediction import machine_model, memory_fit
from bench.prediction.closed_form_plan import GridPlan
from bench.prediction.pipelines import pipeline_seconds
from bench.prediction.pipelines.pipeline_model import PASSES, PipelineModel
from bench.prediction.pipelines.training_step import predict_step
from bench.prediction.planner import TraceOf
from bench.reports import dry_tables
from mm3d import ModelSizes
from mm3d.config import Division, Model
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.sizes import SIZES
from mm3d.model.stack import Stack
from mm3d.schemes import find_scheme
from mm3d.tracing import dry_run
from mm3d.tracing.trace import Trace
from mm3d.training.mesh import stage_grids
from mm3d.training.schedules import build

GROUP = "Plan and predict"


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``dry``."""
    model_options.add_model(parser)
    add_fields(parser, Division, ["scheme"])
    add_fields(parser, Division, ["grid"], about=(
        "{}, or auto for the planner's choice; with --stages and commas between, one for each "
        "stage"), type=str)
    parser.add_argument("--rank", type=options.whole(0), default=0, metavar="N",
                        help="the number of the rank, with --experts or --stages among those of "
                             "all replicas (default 0, whose blocks are the largest)")
    add_fields(parser, Variant, ["keep"], told(Variant, ["keep"]))
    add_fields(parser, Variant, ["overlap"], about=(
        "{}; tables count the collectives in flight then, and the memory of their buffers"))
    add_fields(parser, Division, ["recompute"])
    parser.add_argument("--memory", metavar="SIZE", help=(
        "memory of a rank, such as '16 GB': say whether the model fits, without an optimizer, or "
        "with which --recompute it would; with --data or --stages whether training by AdamW does; "
        "status 1 if it does not"))
    add_fields(parser, Variant, ["causal"])
    add_fields(parser, Division, ["data"], told(Division, ["data"], data=""), (
        "also count what a rank holds of parameters, gradients, masters and the moments of AdamW "
        "where N replicas, of equally many ranks and sequences, divide them, in each stage of "
        "ZeRO; with --stages or --experts also what the replicas send each other; those of "
        "--context come on top, and have the same sequences"), type=options.ranks)
    parser.add_argument("--machine", metavar="NAME", help=(
        "also predict seconds on this machine, a supplied one or a .toml file; --grid auto plans "
        "for it (default longhorn)"))
    add_fields(parser, Model, ["vocab"], told(Model, ["vocab"], vocab=": those of --model"), (
        "with --stages: count a GPT, with embedding, head and loss for N tokens, and with "
        "--machine predict a whole step of its training by AdamW"))
    add_fields(parser, Model, ["tied"])
    expert_options.add_layers(parser)
    add_fields(parser, Division, ["expert_parallel"])
    pipeline_options.add_pipeline(parser, " of a replica")
    add_inside(parser, "with --stages and --machine: ")
    options.add(parser, "hide_sums")


def run(arguments: argparse.Namespace) -> int:
    """Print the tables of a dry run; return 1 when the model does not fit into ``--memory``."""
    gpt = model_options.read_sizes(arguments)
    pipeline_options.divide_among_replicas(arguments)
    ranks = pipeline_options.stage_ranks(arguments)
    if gpt is None:
        sizes = model_options.model_sizes(arguments)
        experts = expert_options.experts_of(arguments)
    else:
        sizes, experts = gpt.sizes(arguments.batch), gpt.experts
        arguments.causal, arguments.experts = True, experts and experts.count
        if arguments.stages:
            arguments.vocab, arguments.untied = gpt.vocab, not gpt.tied
    _refuse_without_effect(arguments, experts)
    stack = Stack(**sizes, dtype=arguments.dtype, causal=arguments.causal or bool(arguments.vocab),
                  recompute=arguments.recompute, experts=experts)
    chosen = [read_grid(text, arguments.scheme, ranks, arguments.machine or "longhorn", stack,
                        _trace_with_experts(arguments, stack))
              for text in _grid_texts(arguments)]
    machine = (machine_model.load_machine(arguments.machine, arguments.dtype)
               if arguments.machine else None)
    limit = memory_fit.parse_size(arguments.memory) if arguments.memory else 0
    if limit and arguments.rank and not experts and not arguments.stages:
        raise UsageError("--memory is held against rank 0, which has the most: leave --rank out")
    scheme = find_scheme(arguments.scheme)
    try:
        if arguments.stages:
            every = stage_grids(scheme, arguments.ranks, arguments.stages,
                                chosen if len(chosen) > 1 else chosen[0])
            return _pipeline(arguments, every, stack, machine, limit)
        grid = scheme.grid_shape(chosen[0] or scheme.default_grid(ranks))
        trace = _trace(arguments, grid, stack, machine)
    except ValueError as error:
        raise UsageError(str(error)) from error
    useful = cost.flops(sizes, experts)
    parts = [_title(arguments, grid, sizes), *dry_tables.dry_tables(trace, useful, machine, stack)]
    if arguments.data is not None:
        parts.append(dry_tables.state_table(trace.parameters, arguments.data, arguments.dtype,
                                            trace.divided,
                                            arguments.data // arguments.expert_parallel))
    if experts:
        parts.append(dry_tables.expert_notes(experts, trace, arguments.data or 1, sizes.tokens))
    fits = True
    if limit and arguments.data is not None:
        fits, line = _judge_training(trace, arguments, limit)
        parts.append(line)
    elif limit and experts:
        fits = trace.peak <= limit
        parts.append(f"{trace.peak / 2 ** 30:.2f} GiB at the peak of this rank, with intermediate "
                     f"arrays: it {'fits without an optimizer' if fits else 'does not fit'}")
    elif limit:
        fits, line = memory_fit.judge_fit(
            arguments.scheme, grid.sizes, stack, limit,
            Variant(arguments.keep or "none", arguments.overlap))
        parts.append(line)
    arguments.show(parts)
    return int(not fits)


def _trace_with_experts(arguments: argparse.Namespace, stack: Stack) -> TraceOf | None:
    """Return how a planner traces a grid of replicas that divide experts; None without any."""
    if not stack.experts or arguments.stages:
        return None

    def trace_of(plan: GridPlan, rank: int, block: int) -> Trace:
        return PipelineModel(
            build("gpipe", 1, 1), plan.scheme, (plan.grid,), stack, data=arguments.data or 1,
            expert_parallel=arguments.expert_parallel,
        ).trace(stack.layers, rank, block=block, parts=PASSES)
    return trace_of


def _judge_training(trace: Trace, arguments: argparse.Namespace,
                    limit: int) -> tuple[bool, str]:
    """Return whether AdamW training fits `limit` bytes with ZeRO 1, and a line on stages 0 and 1.

    ZeRO 2 and 3 are not considered: gradients and parameters are counted whole.
    """
    states = (dry_tables.state_of(trace.parameters, arguments.dtype, zero, arguments.data,
                                  trace.divided, arguments.data // arguments.expert_parallel)
              for zero in (0, 1))
    found = [trace.peak - trace.parameters + sum(one.values()) for one in states]
    said = [f"{memory_fit.format_gib(one)} with ZeRO {zero}, which "
            f"{'fits' if one <= limit else 'does not fit'}" for zero, one in enumerate(found)]
    return found[1] <= limit, (f"at the peak of this rank, in training by AdamW, of "
                               f"{memory_fit.format_gib(limit)}: {'; '.join(said)}; what ZeRO 2 "
                               f"and 3 divide further is not counted")


def _grid_texts(arguments: argparse.Namespace) -> list[str | None]:
    """Split ``--grid`` into one grid, or one per stage; UsageError for several without stages."""
    texts = arguments.grid.split(",") if arguments.grid else [None]
    if len(texts) > 1 and not arguments.stages:
        raise UsageError(f"--grid {arguments.grid}: give --stages too, or one grid")
    if "" in texts:
        raise UsageError(f"--grid {arguments.grid}: sizes with x between, such as 2x2x2, or auto "
                         f"would do for each stage")
    return texts


def _pipeline(arguments: argparse.Namespace, every: tuple[GridShape, ...], stack: Stack,
              machine: machine_model.Machine | None, limit: int) -> int:
    """Print the tables of one rank of a pipeline; return 1 when ``--memory`` does not suffice."""
    replica, place = _split_rank(arguments)
    model = pipeline_options.pipeline_model(
        arguments, arguments.scheme, every, stack,
        options=tuple(_scheme_options(arguments).items()), vocab=arguments.vocab or 0,
        tied=not arguments.untied)
    experts = stack.experts
    stage, place = divmod(place, model.places)
    layers = sum(len(model.parts[part]) for part in model.schedule.stages[stage])
    trace = model.trace(layers, place, stage, replica)
    stage_sizes = replace(model.micro, layers=layers)
    useful = cost.flops(stage_sizes, experts) | cost.flops_of_halves(stage_sizes, experts)
    if model.schedule.stage_count - 1 in model.schedule.stages[stage]:
        for phase, times in (("forward", 2), ("backward", 4), ("backward_input", 4)):
            useful[phase] += times * stage_sizes.tokens * stage_sizes.hidden * model.vocab
    useful = {phase: count // model.context for phase, count in useful.items()}    # a replica's
    parts = [_title(arguments, model.grids[stage], stack.sizes), "One micro-batch:",
             dry_tables.phase_table(trace, useful), dry_tables.collective_table(trace),
             dry_tables.part_table(trace),
             *dry_tables.rank_parts(model, replica, stage, place)]
    if experts:
        parts.append(dry_tables.expert_notes(experts, trace, model.data, model.micro.tokens))
    if arguments.data is not None or model.context > 1:
        whole = replace(model, data=1, context=1, shards=None).trace(layers, place, stage)
        parts.append(dry_tables.state_table(whole.parameters, model.dividing, arguments.dtype))
    if machine:
        inside, name = arguments.inside or "", arguments.schedule or "1f1b"
        if model.vocab:
            step = predict_step(model, machine, overlap=arguments.hide_sums, inside=inside)
            found = step.pipeline
        else:
            found = pipeline_seconds.predict_pipeline(model, machine, inside=inside)
        parts += dry_tables.seconds_parts(name, model, found, machine)
        parts += [dry_tables.training_table(step)] if model.vocab else []
    fits = True
    if limit:
        peak = model.whole_step(place, stage, replica, optimizer=True).peak
        fits = peak <= limit
        parts.append(f"{peak / 2 ** 30:.2f} GiB at the peak of this rank, with AdamW: it "
                     f"{'fits' if fits else 'does not fit'}")
    arguments.show(parts)
    return int(not fits)


def _split_rank(arguments: argparse.Namespace) -> tuple[int, int]:
    """Return the replica of ``--rank`` and its place there; ValueError for no such rank."""
    count = (arguments.data or 1) * (arguments.context or 1) * arguments.ranks
    if arguments.rank >= count:
        raise ValueError(f"--rank {arguments.rank}: 0 to {count - 1} would do")
    return divmod(arguments.rank, arguments.ranks)


def _scheme_options(arguments: argparse.Namespace) -> dict:
    """Return the options of the scheme that were given."""
    return {name: value for name in ("keep", "overlap") if (value := getattr(arguments, name))}


def _title(arguments: argparse.Namespace, grid: GridShape, sizes: ModelSizes) -> str:
    """Name the rank and the model."""
    context = arguments.context or 1
    several = context * (arguments.data or 1 if arguments.experts or arguments.stages else 1)
    of = f"{several} replicas of " * (several > 1)
    return (f"scheme {arguments.scheme}, {of}grid {grid}, rank {arguments.rank} of "
            f"{several * arguments.ranks}; "
            + f"{arguments.model}, " * bool(arguments.model)
            + ", ".join(f"{name} {sizes[name]}" for name in SIZES)
            + f", {arguments.dtype}, recompute {arguments.recompute}"
            + "".join(f", {word}" for word in Variant(overlap=arguments.overlap).words)
            + f"; {arguments.stages} stages" * bool(arguments.stages)
            + f", context {context} {arguments.context_way or 'gather'}" * (context > 1)
            + f", {arguments.vocab} tokens" * bool(arguments.vocab)
            + f", ZeRO {arguments.zero or 0}" * (several > 1 and not arguments.experts))


def _refuse_without_effect(arguments: argparse.Namespace, experts: ExpertOptions | None) -> None:
    """Raise UsageError for options that do nothing without others: it names the first."""
    for name, needed, such in (("vocab", "stages", 1), ("untied", "vocab", 50257),
                               ("hide_sums", "vocab", 50257), ("hide_sums", "machine", "dgx-h100"),
                               ("inside", "stages", 1), ("inside", "machine", "dgx-h100")):
        if getattr(arguments, name) and not getattr(arguments, needed):
            raise UsageError(f"--{name.replace('_', '-')}: give --{needed} too, such as "
                             f"--{needed} {such}")
    if experts is None and arguments.expert_parallel != 1:
        raise options.without_effect("expert_parallel", arguments.expert_parallel, "--experts 8")


def _trace(arguments: argparse.Namespace, grid: GridShape, stack: Stack,
           machine: machine_model.Machine | None) -> Trace:
    """Run a step of the rank dry; ValueError when the scheme cannot use the grid or an option."""
    block = machine.elementwise_block if machine else sys.maxsize
    asked = _scheme_options(arguments)
    if stack.experts:
        replica, place = _split_rank(arguments)
        model = PipelineModel(
            build("gpipe", 1, 1), arguments.scheme, (grid,), stack, tuple(asked.items()),
            data=arguments.data or 1, expert_parallel=arguments.expert_parallel)
        return model.trace(stack.layers, place, 0, replica, block, parts=PASSES)
    return dry_run.extrapolate_step(arguments.scheme, arguments.ranks, grid.sizes, arguments.rank,
                                    options=asked, block=block, **stack.fields())
