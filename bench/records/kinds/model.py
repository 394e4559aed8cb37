"""Rows of the tables: their operations; `bench.reports.paper_tables` shows them.

Useful operations are those of all matrix products of a step, each product once, without those that
backward repeats or several ranks duplicate.
"""

import numpy as np

from bench.cases.variants import Variant
from bench.records import model_run
from bench.records.kinds import Derived, require_as_many
from bench.records.measurements import Measurements
from mm3d import ModelSizes
from mm3d.grid.axis import COLLECTIVES
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.tracing.events import PHASES

BOTH = {"phase": [["forward", "backward"]]}
COUNTED = "phase rank axis collective"
MACHINE = ("gemm_alone gemm_together memory_alone memory_together last_level_caches memory_arrays "
           "ranks_at_work")
SCHEMAS = {
    "model": {
        "verified": True,
        "group": "samples",
        "positive": "forward backward flops",
        "complete": "forward backward",
        "environment": (
            "ranks cores ranks_per_core oversubscribed cpu_model backend mpi blas "
            "blas_architecture blas_threads python numpy_version git_commit git_clean"),
        "settings": (
            "table scheme preset grid grid_axes layers hidden heads batch seq mlp_factor dtype "
            "warmup repetitions overridden verified_measured_model ended_by"),
        "variables": dict.fromkeys(("forward", "backward", "forward_late", "backward_late"),
                                   "repetition rank"),
        "derived": {"flops": "", "flops_again": ""}},
    "model.clock": {
        "required": True,
        "variables": {"offset_error": "", "resolution": ""}},
    "model.published": {
        "required": True,
        "variables": dict.fromkeys((
            "average_step_time", "backward_time", "batch", "forward_time", "gpus", "hidden",
            "recomputed_step_time"), "")},
    "model.traffic": {
        "required": True,
        "whole": "calls messages words bytes expected_words",
        "variables": {
            "bytes": COUNTED, "calls": COUNTED, "expected_words": "phase axis collective",
            "messages": COUNTED, "words": COUNTED},
        "optional": {"moved": COUNTED},
        "labels": BOTH},
    "model.machine": {
        "positive": MACHINE,
        "optional": dict.fromkeys(MACHINE.split(), "")},
    "model.memory": {
        "signed": "resident_growth",
        "optional": {
            "device_peak": "rank", "expected_gradients": "", "expected_parameters": "",
            "expected_pool_peak": "", "expected_saved": "", "gradients": "rank",
            "parameters": "rank", "pool_peak": "rank", "resident_growth": "rank", "saved": "rank",
            "transient": "rank"}},
    "model.parts": {
        "signed": "seconds",
        "complete": "seconds",
        "spent": "seconds",
        "variables": {"seconds": "repetition phase rank part"},
        "optional": dict.fromkeys(("bytes", "calls", "flops"), "phase rank part"),
        "labels": BOTH},
    "model.predicted": {
        "variables": {"seconds": "phase kind"},
        "optional": {"machine_seconds": "phase kind"},
        "labels": BOTH | {"kind": [["work", "links"]]}},
    "model.software": {
        "positive": "samples",
        "variables": {"samples": "phase repetition"},
        "labels": BOTH},
    "model.waits": {
        "variables": dict.fromkeys(("counted", "modelled", "overlapped", "slept"), "phase rank"),
        "labels": BOTH},
    "model.wire": {
        "variables": {"least": "phase axis", "received": "phase node", "sent": "phase node"},
        "labels": BOTH}}


def derive(record: Measurements) -> Derived:
    """Return the useful operations of a step, and those that recomputation repeats."""
    sizes = ModelSizes.from_settings(record.configuration)
    sizes.check()
    again = cost.flops_again(sizes, str(record.configuration.get("recompute", "none")))
    return {"flops": (sum(cost.flops(sizes).values()), "1"), "flops_again": (again, "1")}


def expected_words(scheme: str, grid: GridShape, sizes: ModelSizes, variant: Variant,
                   recompute: str, directions: tuple[str, ...] | None = None) -> np.ndarray:
    """Compute the words of one step in closed form, (phases, directions, collectives)."""
    directions = directions or model_run.directions_of(grid)
    forms = cost.words(scheme, grid, sizes, recompute, **variant.options(scheme))
    expected = np.zeros((len(PHASES), len(directions), len(COLLECTIVES)), np.int64)
    for phase, name in enumerate(PHASES):
        for (axis, collective), words in forms[name].items():
            expected[phase, directions.index(axis), COLLECTIVES.index(collective)] = words
    return expected


def check_texts(run: Measurements) -> None:
    """Check that traffic is that of the ranks, and the placement an order of directions."""
    axes, collectives, ranks = (list(run.groups["traffic"].scales[name])
                                for name in ("axis", "collective", "rank"))
    if len(set(axes)) != len(axes):
        raise ValueError(f"traffic/axis has a direction twice: {' '.join(map(str, axes))}")
    if not set(collectives) <= set(COLLECTIVES):
        raise ValueError(f"traffic/collective has others than {', '.join(COLLECTIVES)}")
    require_as_many("traffic/rank", ranks, run.scales["rank"], "rank of the samples")
    order, directions = str(run.configuration.get("placement", "")), "".join(run.grid)
    if order and sorted(order) != sorted(directions):
        raise ValueError(f"configuration/placement is {order!r:.60}, which should be an order of "
                         f"the directions {directions}")
