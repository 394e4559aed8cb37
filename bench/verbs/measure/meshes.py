"""Measure training steps of ``reproduce --table combined``, under mpirun."""

import argparse
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from bench.agreement import broadcast_from_rank_0, make_on_each_rank
from bench.cases.combined import TrainingCase, cases_by_name, load_rows
from bench.cases.case import shuffle_cases
from bench.cluster.rates import change_links
from bench.cluster.spec import Cluster
from bench.command_line import measuring, row_options, waiting
from bench.command_line.config_options import add_fields
from bench.command_line.publish import publish_row
from bench.errors import UsageError
from bench.experiments.rows.dilation import Dilation, set_links
from bench.experiments.rows.training_row import TrainingSettings, measure_training
from bench.prediction.machine_model import load_machine
from bench.prediction.pipelines.waited_step import find_machine, predict_waited
from bench.prediction.similarity import emulating_machine, work_scale
from bench.records import run_file
from bench.records.journal import claim_folder
from bench.records.measurements import Measurements
from mm3d.arrays import backend as backends
from mm3d.config import Config, Division
from mm3d.console import say
from mm3d.transport.nodes import number_nodes

ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure meshes``."""
    measuring.add_shared(parser, "out")
    row_options.add_row_limits(parser, lambda name: f": {getattr(load_rows(), name):g}")
    row_options.add_software_share(parser)
    parser.add_argument("names", metavar="ROWS", help=(
        "rows of bench/cases/combined.toml, such as combined:dense-8-1,combined:dense-8-2. Their "
        "ranks wait for modelled work; those of combined:dense-8-1:tiny compute, with the same "
        "model, and of combined:dense-8-1:paper with the lengths that the file divides, while a "
        "model of the file's is verified"))
    parser.add_argument("--machine", metavar="NAME", help=(
        "predict the steps of ranks that compute before, by this machine's model: a supplied one "
        "or a .toml file (default: nothing is predicted)"))
    add_fields(parser, Division, ["backend"])
    measuring.add_stall(parser)
    measuring.add_shared(parser, "cluster")


def run(arguments: argparse.Namespace, comm: Any) -> int:
    """Measure the rows that are named and have as many ranks as the job."""
    named = cases_by_name(arguments.names)
    cases = [one for one in named if one.ranks == comm.size]
    if not cases:
        raise UsageError(f"no row of {arguments.names} is for {comm.size} rank"
                         f"{'s' * (comm.size > 1)}: mpirun -n "
                         f"{' or '.join(map(str, sorted({one.ranks for one in named})))} would do")
    settings = (computing_settings if cases[0].preset else read_training_settings)(arguments, comm)
    out, statuses = claim_folder(arguments.out, comm), []
    for one in shuffle_cases(cases, settings.order):
        status, _ = publish_row(one, lambda: measure_training(one, settings, comm),
                                lambda record: write_training_row(record, one, out), out, comm)
        if settings.dilation:
            set_links(settings.dilation.link, comm, settings.dilation.change)
        statuses.append(status)
    return max(statuses)


def write_training_row(record: Measurements, one: TrainingCase, out: Path) -> tuple[int, str]:
    """Write a record; return the exit status, and what the row's line says."""
    path = run_file.write_run(record, out, one.name)
    seconds = record.values("seconds")[0]
    if one.preset:
        return 0, f"{seconds:.3g} s, {path.name}"
    share = float(record.values("share_of_software"))
    return 0, (f"{seconds:.3g} s, predicted "
               f"{record.values('predicted').sum():.3g} s, slowed "
               f"{record.configuration['dilation']:.3g} times, software {share:.0%}, {path.name}")


def read_training_settings(arguments: argparse.Namespace, comm: Any) -> TrainingSettings:
    """Return how rows are measured that wait; links are slowed in an emulated cluster alone."""
    for name in ("machine", "backend"):
        if getattr(arguments, name):
            raise UsageError(f"{arguments.names} --{name} {getattr(arguments, name)}: ranks wait "
                             f"for the machine of bench/cases/combined.toml; leave --{name} out, "
                             f"or let them compute, by names such as combined:dense-8-1:tiny")
    file, cluster = load_rows(), Cluster.from_environment()
    machine = broadcast_from_rank_0(lambda: load_machine(file.machine), comm)
    scale = work_scale(machine, cluster if cluster and cluster.link else
                       Cluster.parse(file.cluster))
    work = waiting.work_of(machine, scale, file.shrink)
    link = cluster.link if cluster else None
    emulated = emulating_machine(machine, file.shrink, scale, cluster)
    share = row_options.share_of(arguments, file) if cluster else 0.0
    return TrainingSettings(
        measuring.limits_of(arguments, file), arguments.order or 0, work,
        Dilation(share, link, lambda *given: ({}, {}),
                 change_links if cluster else lambda rate: None),
        lambda config, ranks: predict_waited(config, ranks, emulated), arguments.watched)


def computing_settings(arguments: argparse.Namespace, comm: Any) -> TrainingSettings:
    """Return how rows are measured whose ranks compute."""
    if arguments.software_share:
        raise UsageError(f"{arguments.names} --software-share {arguments.software_share:g}: only "
                         f"waits are slowed, and these ranks compute; leave it out")
    make_on_each_rank(lambda: backends.get(arguments.backend), comm)
    machine, reason = broadcast_from_rank_0(lambda: find_machine(arguments.machine, comm.size),
                                            comm)
    nodes = number_nodes(comm)
    placed = machine and replace(machine, ranks_per_node=max(map(nodes.count, nodes)),
                                 kernels="numpy")    # of this library, which are timed

    def predict(config: Config, ranks: int) -> dict[str, float]:
        if placed is None:
            say(f"predicted before: cannot tell: {reason}")
            return {}
        found = predict_waited(config, ranks, placed)
        say(f"predicted before: {config.division}: {sum(found.values()):.3g} s by {placed.name}")
        return found
    return TrainingSettings(
        measuring.limits_of(arguments, load_rows()), arguments.order or 0, None, None, predict,
        arguments.watched, arguments.backend, placed.name if placed else "", reason)
