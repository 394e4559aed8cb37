"""Define and read the options of the verbs that measure the rows of the paper's tables."""

import argparse
import math
from typing import Any, Callable

from bench.agreement import broadcast_from_rank_0
from bench.cases.paper import HEADINGS, PAPER, TITLES, load_tables
from bench.cases.variants import PLAIN_DTYPE, Variant
from bench.cluster.spec import Cluster
from bench.command_line import measuring, options
from bench.command_line.config_options import add_fields, read, told
from bench.errors import UsageError
from bench.instruments.timing import Limits
from bench.prediction import memory_fit
from bench.prediction.machine_model import Machine, load_machine
from bench.prediction.similarity import work_scale
from mm3d.arrays.backend import Backend
from mm3d.arrays.plain_numbers import GREATEST
from mm3d.config import Division, Model


def add_row_options(parser: argparse.ArgumentParser, preset: str | None = "laptop") -> None:
    """Add the options that ``run`` and ``reproduce`` share."""
    add_selection(parser, preset)
    measuring.add_shared(parser, "out")
    _add_steps(parser)
    add_variant(parser)
    _add_work(parser)
    add_fields(parser, Division, ["backend"])
    add_fields(parser, Model, ["seed"], about="seed of parameters and input")
    add_fields(parser, Division, ["recompute"])
    parser.add_argument("--node-memory", metavar="SIZE", help=(
        "memory of a node, such as '32 GB': rows that need more by an estimate are left out; "
        "none: no row is (default: the available memory that the system reports; on a GPU none)"))
    measuring.add_stall(parser)
    measuring.add_shared(parser, "cluster")


def add_selection(parser: argparse.ArgumentParser, preset: str | None) -> None:
    """Add the options that say which rows are measured, and at what sizes, by default `preset`."""
    default = preset or ("emulated with --equal-tokens where this machine can emulate a cluster "
                         "and ranks are not told what to do, else laptop")
    presets = "; ".join(f"{name}: {preset.about}"
                        for name, preset in load_tables().presets.items())
    parser.add_argument("--table", default="all", metavar="NAMES",
                        help=f"rows of these tables: {', '.join(HEADINGS)}, several "
                             f"separated by commas, or all (default); combined, of reproduce and "
                             f"mm3d-jobs: training steps on meshes of all dimensions")
    parser.add_argument("--scheme", default="paper", metavar="NAMES",
                        help=f"rows of these schemes: {', '.join(TITLES)}, several "
                             f"separated by commas, all that divide the work, or those of the "
                             f"paper, {', '.join(PAPER)} (default: paper)")
    parser.add_argument("--preset", default=preset, choices=load_tables().presets,
                        help=f"sizes of the models (default: {default}). {presets}")
    parser.add_argument("--equal-tokens", action="store_true", help=(
        "measure 3-D rows also with the batch of each other scheme's row on as many ranks, and "
        "these with that of 3-D, so that speed-ups at equal batches can be read"))


def _preset_values(name: str) -> str:
    """Return what a help says of the default of an option, which is that of each preset."""
    return ": " + ", ".join(f"{getattr(preset, name):g} ({which})"
                            for which, preset in load_tables().presets.items())


def _add_steps(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--warmup", type=options.whole(1), metavar="N",
                        help="steps before the first that is timed, the verified one included "
                             f"(default{_preset_values('warmup')})")
    add_row_limits(parser, _preset_values)
    parser.add_argument("--traced", type=options.whole(0), metavar="N",
                        help="trace this number of steps after the timed ones, to show where the "
                             f"time goes; 0 for none (default{_preset_values('traced')})")


def add_row_limits(parser: argparse.ArgumentParser, values: Callable[[str], str]) -> None:
    """Add the options on the repetitions of rows and their order; `values` tells defaults."""
    measuring.add_limits(parser, **{name: values(name) for name in measuring.LIMIT_NAMES})
    parser.add_argument("--order", type=options.whole(0, GREATEST), metavar="SEED",
                        help="seed of the order in which rows are measured (default: drawn at "
                             "random and recorded)")


def add_variant(parser: argparse.ArgumentParser) -> None:
    """Add the options of a row's variant."""
    add_fields(parser, Variant, ["dtype", "keep", "overlap", "causal"])


def _add_work(parser: argparse.ArgumentParser) -> None:
    """Add the options of rows whose ranks wait for their work."""
    add_fields(parser, Variant, ["work"], told(Variant, ["work"], work=(
        ": wait with the presets of emulated clusters, else compute")))
    parser.add_argument("--machine", metavar="NAME", help=(
        "the machine model of --work wait (default: the preset's), and of --grid auto (default "
        "cpu): a supplied one or a .toml file"))
    parser.add_argument("--work-scale", type=options.number(above=True), metavar="FACTOR", help=(
        "with --work wait: multiply the machine's seconds by this factor (default: with the "
        "presets of emulated clusters, how many times slower their links are than the machine's, "
        "else 1)"))
    add_software_share(parser)


def add_software_share(parser: argparse.ArgumentParser) -> None:
    """Add ``--software-share``."""
    parser.add_argument("--software-share", type=software_share, metavar="FRACTION", help=(
        "in an emulated cluster with --work wait: slow the links and the waits of each row by a "
        "factor from which on software, on cores that ranks share, takes this fraction of a step "
        "or less; none: as they are (default: 0.25 with the presets of emulated clusters, else "
        "none)"))


def software_share(text: str) -> float:
    """Read a fraction of a step, greater than 0 and less than 1; 0 for ``none``."""
    if text == "none":
        return 0.0
    share = options.number(above=True)(text)
    if share >= 1:
        raise argparse.ArgumentTypeError(f"{text!r}: a fraction less than 1 would do, or none")
    return share


def waited_machine(arguments: argparse.Namespace, comm=None) -> tuple[Machine, float] | None:
    """Return the machine whose seconds ranks wait, and their factor; None if ranks compute.

    Rank 0 of `comm`, if given, reads the machine.  UsageError on every rank, when the options
    contradict each other, or there is no such machine.
    """
    scale, preset = arguments.work_scale, load_tables().presets[arguments.preset]
    if chosen_work(arguments) == "compute":
        if scale is not None:
            raise UsageError(f"--work-scale {scale:g}: only waits are scaled; give --work wait, "
                             f"or leave --work-scale out")
        return None
    name = arguments.machine or preset.machine
    if not name:
        raise UsageError("--work wait: ranks wait for the seconds of a machine model; give "
                         "--machine, such as --machine longhorn")

    def load() -> Machine:
        return load_machine(name, arguments.dtype)
    machine = broadcast_from_rank_0(load, comm) if comm else load()
    if scale is None:
        scale = (work_scale(machine, Cluster.from_environment() or Cluster.parse(preset.cluster))
                 if preset.cluster else 1.0)
    return machine, scale


def share_of(arguments: argparse.Namespace, defaults: object) -> float:
    """Return the share of a step that software may take, else that of `defaults`."""
    return _given(arguments, "software_share", defaults)


def check_share(arguments: argparse.Namespace) -> None:
    """Raise UsageError, on every rank, for ``--software-share`` where nothing can be slowed."""
    share = arguments.software_share
    if share and (Cluster.from_environment() is None or chosen_work(arguments) == "compute"):
        raise UsageError(f"--software-share {share:g}: waits and the links of an emulated cluster "
                         f"are slowed; give --work wait and --cluster, such as "
                         f"--cluster 16x4:50Mbit, or leave --software-share out")


def chosen_work(arguments: argparse.Namespace) -> str:
    """Return what ranks do with their work: the value of ``--work``, or the preset's default."""
    preset = load_tables().presets.get(getattr(arguments, "preset", ""))
    return getattr(arguments, "work", None) or (
        "wait" if preset and preset.machine else "compute")


def variant(arguments: argparse.Namespace, backend: Backend | None = None) -> Variant:
    """Return the variant that the options of `add_variant` name, on arrays of `backend`."""
    tf32 = arguments.dtype == PLAIN_DTYPE and bool(getattr(backend, "tf32", False))
    return read(Variant, arguments, tf32=tf32, work=chosen_work(arguments))


def node_memory(arguments: argparse.Namespace) -> float | None:
    """Return the bytes of ``--node-memory``, infinite for none; None if it is not given."""
    if arguments.node_memory is None:
        return None
    given = arguments.node_memory
    return math.inf if given.lower() == "none" else memory_fit.parse_size(given)


def step_counts(arguments: argparse.Namespace) -> tuple[int, Limits]:
    """Return the warm-up steps and the limits of repetitions, by default the preset's."""
    preset = load_tables().presets[arguments.preset]
    return _given(arguments, "warmup", preset), measuring.limits_of(arguments, preset)


def traced_steps(arguments: argparse.Namespace) -> int:
    """Return the steps to trace, by default the preset's; with ``--trace`` at least 1."""
    steps = _given(arguments, "traced", load_tables().presets[arguments.preset])
    wanted = arguments.traced is None and getattr(arguments, "trace", None)
    return max(steps, 1) if wanted else steps


def _given(arguments: argparse.Namespace, name: str, defaults: object) -> Any:
    """Return the value of an option, else that field of `defaults`."""
    value = getattr(arguments, name)
    return getattr(defaults, name) if value is None else value
