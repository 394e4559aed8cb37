"""Make of the options of rows what their ranks wait for, and how links and waits are slowed."""

import argparse
from dataclasses import replace
from typing import Callable

from bench.cases.case import Case
from bench.cases.paper import load_tables
from bench.cluster.rates import change_links
from bench.cluster.spec import Cluster
from bench.command_line import row_options
from bench.experiments.rows.dilation import Both, Dilation
from bench.experiments.rows.settings import ModelledWork
from bench.prediction.machine_model import Machine
from bench.prediction.seconds import work_seconds
from bench.prediction.similarity import (emulating_machine, predict_original, predict_phases,
                                         shrink_machine)
from mm3d.grid.shape import GridShape


def work_of(machine: Machine, scale: float, shrink: float) -> ModelledWork:
    """Return the work of ranks that wait `scale` times the seconds of a machine that is shrunk."""
    shrunk = shrink_machine(machine, shrink)
    return ModelledWork(machine.name, lambda event: scale * work_seconds(shrunk, event),
                        machine.elementwise_block, scale, shrink)


def waits_and_dilation(arguments: argparse.Namespace, comm
                       ) -> tuple[Callable[[Case], ModelledWork] | None, Dilation | None]:
    """Return what gives the seconds that ranks of a case wait, and how these and links are slowed.

    None and None where ranks compute; no dilation outside an emulated cluster.  Errors are those
    of `row_options.waited_machine` and `check_share`.
    """
    row_options.check_share(arguments)
    found = row_options.waited_machine(arguments, comm)
    if found is None:
        return None, None
    machine, scale = found
    cluster, preset = Cluster.from_environment(), load_tables().presets[arguments.preset]

    def work(one: Case) -> ModelledWork:
        return work_of(machine, scale, preset.of_table(one.row.table).shrink)

    def predict(one: Case, grid: GridShape, order: str, link: float | None) -> Both:
        shrink = preset.of_table(one.row.table).shrink
        model = emulating_machine(machine, shrink, scale, replace(cluster, link=link))
        where, how = (grid, order, one.sizes), (one.variant, arguments.recompute)
        return (predict_phases(model, one.row.scheme, *where, *how),
                {} if one.overridden else predict_original(machine, one.row, *where, *how))
    return work, cluster and Dilation(row_options.share_of(arguments, preset), cluster.link,
                                      predict, change_links)
