"""The verb ``dry``: what one rank of any number of ranks would do."""

import sys
from collections import defaultdict

from tabulate import tabulate

import mm3d
from bench import fit, model
from bench.cases import UsageError, load as load_cases
from bench.variants import Variant
from bench.verbs import grids
from mm3d import cost, dry


def sizes(arguments) -> dict[str, int]:
    """The model's sizes from the command line; heads by the tables' setting, or 128 wide."""
    chosen = {name: getattr(arguments, name)
              for name in ("layers", "hidden", "heads", "batch", "seq")}
    if chosen["heads"] is None:
        known = load_cases().settings.heads
        chosen["heads"] = known.get(chosen["hidden"]) or max(1, chosen["hidden"] // 128)
    for name, value in chosen.items():
        if value < 1:
            raise UsageError(f"--{name} {value}: must be at least 1")
    if chosen["hidden"] % chosen["heads"]:
        raise UsageError(f"--hidden {chosen['hidden']}: must be a multiple of the "
                         f"{chosen['heads']} heads; give --heads")
    return chosen


def run(arguments) -> int:
    """Print the report of a dry run.

    Raises
    ------
    UsageError
        When the sizes, the ranks, the grid, the rank or what is kept cannot be.
    """
    chosen = sizes(arguments)
    if arguments.ranks < 1:
        raise UsageError(f"--ranks {arguments.ranks}: must be at least 1")
    if arguments.scheme not in mm3d.SCHEMES:
        raise UsageError(f"scheme {arguments.scheme!r} is unknown: choose one of "
                         f"{', '.join(mm3d.SCHEMES)}")
    shape = grids.grid(arguments.grid, arguments.scheme, arguments.ranks,
                       arguments.machine or "longhorn", arguments.dtype, chosen,
                       arguments.recompute)
    machine = model.load(arguments.machine, arguments.dtype) if arguments.machine else None
    trace_of = dry.step if arguments.all_layers else dry.extended
    options = {"keep": arguments.keep} if arguments.keep else {}
    limit = fit.size(arguments.memory) if arguments.memory else 0
    if limit and arguments.rank:
        raise UsageError("--memory is held against rank 0, which has the most: leave --rank out")
    try:
        shape = shape or mm3d.SCHEMES[arguments.scheme].default_grid(arguments.ranks)
        trace = trace_of(arguments.scheme, arguments.ranks, shape, arguments.rank,
                         options=options, dtype=arguments.dtype, causal=arguments.causal,
                         recompute=arguments.recompute,
                         block=machine.granule if machine else sys.maxsize, **chosen)
    except ValueError as error:
        raise UsageError(str(error)) from error
    print(f"scheme {arguments.scheme}, grid {' x '.join(map(str, shape))}, rank "
          f"{arguments.rank} of {arguments.ranks}; "
          + ", ".join(f"{name} {value}" for name, value in chosen.items())
          + f", {arguments.dtype}, recompute {arguments.recompute}\n")
    whole = cost.flops(**chosen, causal=arguments.causal)
    for table in (phases(trace, whole), collectives(trace), parts(trace), memory(trace)):
        print(table + "\n")
    if machine:
        print(predicted(trace, machine))
    if not limit:
        return 0
    fits, line = fit.verdict(arguments.scheme, tuple(shape), arguments.dtype, arguments.recompute,
                             chosen, limit,
                             Variant(keep=arguments.keep or "none", causal=arguments.causal))
    print(line)
    return int(not fits)


def phases(trace: dry.Trace, whole: dict[str, int]) -> str:
    """Flops, words and messages of a step."""
    again = {"forward": 0, "backward": trace.flops_again()}
    rows = [[phase, trace.flops(phase), again[phase], whole[phase], trace.words(phase),
             sum(t.messages for t in trace.traffic[phase].values()),
             sum(e.bytes * n for e, n in trace.of(dry.Pass, phase).items())]
            for phase in dry.PHASES]
    return tabulate(rows, ["phase", "flops", "of these again", "useful flops of all ranks",
                           "words counted", "messages",
                           "bytes of elementwise work"], intfmt=",")


def collectives(trace: dry.Trace) -> str:
    """The collectives by phase, direction and kind."""
    groups = {e.direction: (e.size, e.stride) for e in trace.of(dry.Collective)}
    rows = [[phase, axis, kind, *groups[axis], t.calls, t.messages, t.words, t.bytes]
            for phase in dry.PHASES for (axis, kind), t in sorted(trace.traffic[phase].items())]
    return tabulate(rows, ["phase", "direction", "collective", "ranks", "stride", "calls",
                           "messages", "words", "bytes"], intfmt=",") + (
        "\nWords, bytes and messages are counted by the bucket algorithm; nothing travels.")


def parts(trace: dry.Trace) -> str:
    """Of all layers together, by part of the layer: where the work and the traffic are."""
    found: dict = defaultdict(lambda: [0, 0, 0, 0])
    for (phase, part, event), times in trace.events.items():
        if phase not in dry.PHASES:
            continue
        row = found[phase, part]
        if isinstance(event, dry.Gemm):
            row[0] += times * event.flops
        elif isinstance(event, dry.Pass):
            row[1] += times * event.bytes
        else:
            row[2] += times
            row[3] += times * event.bytes
    return tabulate([[*key, *row] for key, row in found.items()],
                    ["phase", "part", "flops", "bytes of elementwise work", "collectives",
                     "bytes of their wholes"], intfmt=",")


def memory(trace: dry.Trace) -> str:
    """Bytes of this rank."""
    return tabulate([["parameters and gradients", trace.parameters],
                     ["kept from forward to backward", trace.saved],
                     ["peak of the model's arrays", trace.pool_peak],
                     ["peak with intermediate arrays", trace.peak]],
                    ["memory of this rank", "bytes"], intfmt=",")


def predicted(trace: dry.Trace, machine: model.Machine) -> str:
    """Seconds on a machine, and what they are spent on."""
    spent = model.terms(machine, trace)
    rows = []
    for phase in dry.PHASES:
        parts = {t: v / getattr(machine.achieved, t) for t, v in spent[phase].items()}
        rows.append([phase, sum(parts.values()), *parts.values()])
    fits = "fits" if trace.peak <= machine.memory_bytes else "does not fit"
    return (f"{machine.about}\n(a model: predicted seconds; {fits} into "
            f"{machine.memory_bytes / 2**30:.1f} GiB a rank)\n\n"
            + tabulate(rows, ["phase", "seconds", *model.TERMS], floatfmt=".4g"))
