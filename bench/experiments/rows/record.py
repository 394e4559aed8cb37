"""What the file of a row says beside what was measured: how it was made, and what is expected."""

from dataclasses import asdict

import msgspec
import numpy as np

import mm3d
from bench.cases.case import Case
from bench.cases.paper import Row
from bench.experiments.rows.settings import Settings
from bench.records import run_file
from bench.records.measurements import Setting, grid_settings
from mm3d import ModelSizes
from mm3d.grid.axis import COLLECTIVES
from mm3d.grid.shape import GridShape
from mm3d.tracing.events import PHASES


def expected_words(scheme: str, grid: GridShape, sizes: ModelSizes, keep: str = "none",
                   recompute: str = "none",
                   directions: tuple[str, ...] | None = None) -> np.ndarray:
    """The closed form of the words of one step, as `bench.records.run_file.Run` keeps it.

    Along `directions`; those of a new record, if not given.
    """
    directions = directions or run_file.directions_of(grid)
    forms = mm3d.cost.words(scheme, grid, mm3d.model_spec(sizes, recompute=recompute), keep=keep)
    expected = np.zeros((len(PHASES), len(directions), len(COLLECTIVES)), np.int64)
    for phase, name in enumerate(PHASES):
        for (axis, collective), words in forms[name].items():
            expected[phase, directions.index(axis), COLLECTIVES.index(collective)] = words
    return expected


def configuration(one: Case, scheme, settings: Settings) -> dict[str, Setting]:
    """Everything that says what was run."""
    shape, variant = scheme.grid.shape, msgspec.structs.asdict(one.variant)
    verified_sizes = {f"verified_{name}": value
                      for name, value in one.verified.items()}
    return {"table": one.row.table, "scheme": one.row.scheme, "preset": one.preset,
            **grid_settings(shape), "mlp_factor": one.sizes.mlp_factor,
            "seed": settings.seed, **variant, "recompute": settings.recompute,
            "warmup": settings.warmup, "order": settings.order, **asdict(settings.limits),
            "overridden": " ".join([*one.overridden, *["grid"] * (settings.grid is not None)]),
            "verified_measured_model": one.verified == one.sizes,
            "verified_by": "serial model" if one.verified == one.sizes else "residuals",
            **({"equal_tokens": one.row.like} if one.row.like else {}),
            **one.sizes, **verified_sizes}


def published(row: Row) -> dict[str, float]:
    """The row as the paper prints it, with the names that files use."""
    return {"gpus": row.gpus, "batch": row.batch, "hidden": row.hidden,
            "forward_time": row.forward, "backward_time": row.backward,
            "average_step_time": row.average, "recomputed_step_time": row.recomputed}
