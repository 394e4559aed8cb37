"""Define the options of verbs that measure: repetitions, the seed, the backend, the cluster."""

import argparse
from typing import Any

from bench.agreement import agree, make_on_each_rank
from bench.cluster.spec import Cluster
from bench.command_line import options
from bench.command_line.config_options import add_fields, given, told
from bench.errors import UsageError, as_usage_error
from bench.instruments import host
from bench.instruments.available_memory import total_memory
from bench.instruments.timing import Limits, unwatched
from mm3d import launcher
from mm3d.arrays import backend as backends
from mm3d.arrays.backend import Backend
from mm3d.config import Division, Model

CLUSTER = "NxR[:LINK[,LATENCY]]"
LIMIT_NAMES = ("repetitions", "max_repetitions", "max_seconds")
MOST_REPETITIONS = 30    # of a microbenchmark, by default


def add_shared(parser: argparse.ArgumentParser, *names: str) -> None:
    """Add options of `SHARED`, in this order."""
    options.add(parser, *names, known=SHARED)


def add_stall(parser: argparse.ArgumentParser) -> None:
    """Add ``--stall`` to a verb of several ranks; see `mm3d.tracing.watchdog`."""
    parser.add_argument("--stall", type=options.whole(1), metavar="SECONDS", help=(
        "end the job when a rank has not reported for this time, and print the layer and the "
        "collective of each rank; in timed steps also when all ranks wait in collectives "
        "(default: never)"))
    parser.set_defaults(watched=unwatched)    # until the watchdog of the job is there


def add_limits(parser: argparse.ArgumentParser, **said: str) -> None:
    """Add the options that limit repetitions; their defaults, but the width's, are `said`."""
    add_fields(parser, Limits, (*LIMIT_NAMES, "width"), told(Limits, LIMIT_NAMES, **said))


def add_seed(parser: argparse._ActionsContainer) -> None:
    """Add the seed of a measurement that is no row."""
    add_fields(parser, Model, ["seed"], about=(
        "seed of the numbers in arrays and of the order of measurements"))


def add_repetitions(parser: argparse.ArgumentParser, repetitions: int, seconds: float) -> None:
    """Add the options of a microbenchmark: its repetitions, the seed and ``--stall``."""
    add_limits(parser, repetitions=f"{repetitions}, or --max-repetitions if less",
               max_repetitions=f"{MOST_REPETITIONS}, or --repetitions if greater",
               max_seconds=f"{seconds:g}")
    parser.set_defaults(limits=Limits(repetitions, max(repetitions, MOST_REPETITIONS), seconds))
    add_seed(parser)
    add_stall(parser)


def add_measurement(parser: argparse.ArgumentParser, repetitions: int, seconds: float) -> None:
    """Add the options of a microbenchmark that writes a file."""
    add_shared(parser, "out")
    add_fields(parser, Division, ["backend"])
    add_repetitions(parser, repetitions, seconds)


def limits_of(arguments: argparse.Namespace, defaults: object = None) -> Limits:
    """Return when to stop repeating, as the options of `add_limits`, else `defaults`, say.

    Without `defaults` they are those of `add_repetitions`. Of least and most, one that is given
    alone moves the other's default.  UsageError when the most are fewer than the least.
    """
    found = {name: getattr(defaults or arguments.limits, name) for name in LIMIT_NAMES}
    found |= given(Limits, arguments)
    if arguments.max_repetitions is None:
        found["max_repetitions"] = max(found["max_repetitions"], found["repetitions"])
    elif arguments.repetitions is None:
        found["repetitions"] = min(found["max_repetitions"], found["repetitions"])
    with as_usage_error():
        return Limits(**found)


def one_rank_backend(verb: str, backend: str | None, comm) -> Backend:
    """Return the array library of a verb of one rank; UsageError for more, or no such library."""
    if comm.size > 1:
        raise UsageError(f"{verb} measures one rank: start it without mpirun")
    with as_usage_error():
        return backends.get(backend)


def check_memory(needed: int, backend: str | None, comm) -> None:
    """Check before any work that arrays of `needed` bytes, over all ranks, fit the nodes' memory.

    UsageError on every rank, when those on a node exceed its memory, or there is no `backend`.
    """
    on_host = make_on_each_rank(lambda: backends.get(backend), comm).host_buffers
    here, room = needed * launcher.local_ranks() // comm.size, total_memory()
    agree(f"these sizes need {here} bytes on a node or more, which has {room}: smaller sizes "
          f"would do" if on_host and room and here > room else None, comm)


def check_model_memory(layers: int, hidden: int, tokens: int, backend: str | None, comm) -> None:
    """Check by `check_memory` a model's matrices, their gradients and its input, in 16 bits."""
    check_memory(2 * hidden * (24 * layers * hidden + tokens), backend, comm)


def rates(text: str) -> list[float | None]:
    """Read the rates of links ``50Mbit,unlimited``, each once; None for no limit."""
    return [*dict.fromkeys(cluster_spec(f"1x1:{word}").link for word in text.split(","))]


def cluster_spec(text: str) -> Cluster:
    """Read ``16x4:200Mbit``."""
    try:
        return Cluster.parse(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


# Options that are the same in all verbs that have them, with the arguments of ``add_argument``.
SHARED: dict[str, dict[str, Any]] = {
    # By it a verb is run in an emulated cluster; see `bench.cluster`.
    "cluster": {"type": cluster_spec, "metavar": CLUSTER, "help": (
        "run in an emulated cluster of N nodes with R ranks each on this machine, whose links "
        "have a rate and a latency, such as 16x4:200Mbit or 4x2:1Gbit,1ms; starts mpirun itself")},
    "out": {"metavar": "DIR", "default": host.default_out(), "help": (
        "write the .h5 files into this folder (default results/local/<machine>)")}}
