"""Describe a row for its file: its configuration, its published times and the expected words."""

import sys
from dataclasses import asdict

import numpy as np
from mpi4py import MPI

from bench.cases.case import Case
from bench.cases.paper import Row
from bench.experiments.rows.settings import Settings
from bench.instruments import host, timing
from bench.records import model_run
from bench.records.model_run import make_group, make_record, traffic_group, transport_names
from bench.records.kinds.model import expected_words
from bench.records.measurements import Check, Group, Setting, grid_settings
from mm3d.model.architecture import INNER_FACTOR


def row_configuration(one: Case, scheme, settings: Settings) -> dict[str, Setting]:
    """Return all settings that determine a run of the case on the grid of `scheme`."""
    shape, variant = scheme.grid.shape, asdict(one.variant)
    verified_sizes = {f"verified_{name}": value for name, value in one.verified.items()}
    return {"table": one.row.table, "scheme": one.row.scheme, "preset": one.preset,
            **grid_settings(shape), "mlp_factor": INNER_FACTOR,
            "seed": settings.seed, **variant, "recompute": settings.recompute,
            "warmup": settings.warmup, "order": settings.order, **asdict(settings.limits),
            "overridden": " ".join([*one.overridden, *["grid"] * (settings.grid is not None)]),
            "verified_measured_model": one.verified == one.sizes,
            "verified_by": "serial model" if one.verified == one.sizes else "residuals",
            **({"equal_tokens": one.row.like} if one.row.like else {}),
            **one.sizes, **verified_sizes}


def published_row(row: Row) -> Group:
    """Return the row as the paper prints it, by the names that files use."""
    return make_group("model.published", {
        "1": {"gpus": row.gpus, "batch": row.batch, "hidden": row.hidden},
        "s": {"forward_time": row.forward, "backward_time": row.backward,
              "average_step_time": row.average, "recomputed_step_time": row.recomputed}})


def row_record(one: Case, scheme, configuration: dict[str, Setting], times: timing.TimedSteps,
               traffic: np.ndarray, checks: list[Check],
               groups: dict[str, Group | None]) -> model_run.Run:
    """Make the record of a row, on rank 0.

    Parameters
    ----------
    configuration : dict
        See `row_configuration`; the transport is added.
    times : Measured
        The times of all ranks; see `bench.instruments.timing.measure`.
    traffic : ndarray
        Counts and "moved" of all ranks, (counts, phases, ranks, directions, collectives).
    checks : list of Check
        The checks of the results, all passed.
    groups : dict
        Further groups of the file by name; those that are None are left out.
    """
    grid = scheme.grid
    words = expected_words(scheme.name, grid.shape, one.sizes, one.variant,
                           configuration["recompute"])
    record = make_record(
        "model", configuration | {"transport": transport_names(grid), "ended_by": times.ended_by},
        host.describe_host(grid.backend.name, grid.comm.size, MPI.Get_library_version(),
                           host.command_line(sys.argv[1:])),
        {"s": times.samples | {f"{phase}_late": late for phase, late in times.late.items()}},
        checks)
    own = {"traffic": traffic_group(dict(zip((*model_run.COUNTS, "moved"), traffic)), words,
                                    model_run.directions_of(grid.shape)),
           "clock": make_group("model.clock", {"s": {"resolution": times.clock_resolution,
                                                     "offset_error": times.clock_offset_error}}),
           "published": published_row(one.row)}
    record.groups.update(own | {name: group for name, group in groups.items() if group})
    return record
