"""Predict a row of an emulated cluster before it is measured."""

from bench.cases.case import Case
from bench.cases.paper import load_tables
from bench.cluster.spec import Cluster
from bench.instruments import placement
from bench.prediction.machine_model import Machine
from bench.prediction.similarity import emulating_machine, predict_original, predict_phases
from bench.reports.emulated import Emulated, total_seconds
from mm3d.schemes import find_scheme


def of_case(one: Case, machine: Machine, scale: float, cluster: Cluster | None,
            recompute: str = "none") -> Emulated:
    """Make the row of a case that is not measured yet, on its scheme's own grid."""
    kind = find_scheme(one.row.scheme)
    shrink = load_tables().presets[one.preset].of_table(one.row.table).shrink
    grid = kind.grid_shape(kind.default_grid(one.row.gpus))
    order = placement.direction_order("auto", kind.name, grid, one.sizes)
    here = predict_phases(emulating_machine(machine, shrink, scale, cluster), kind.name, grid,
                          order, one.sizes, one.variant, recompute)
    there = predict_original(machine, one.row, grid, order, one.sizes, one.variant, recompute)
    return Emulated(one.row, one.sizes, one.variant, machine.name, shrink, scale, cluster,
                    *(total_seconds([*found.values()]) for found in (here, there)))
