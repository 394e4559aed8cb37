"""Count the events of one micro-batch in a chunk of layers, by dry runs that models share."""

from collections import Counter
from copy import copy
from dataclasses import replace
from functools import cache

from bench.prediction.pipeline_model import ENDS, LAYERS, PipelineModel, build_once
from mm3d.grid.shape import GridShape
from mm3d.tracing import dry_run
from mm3d.tracing.trace import SUMS, Trace


@cache
def events_of_chunk(model: PipelineModel, layers: int, stage: int, block: int) -> Trace:
    """Return the events of `PipelineModel.trace`; the memory in the trace means nothing.

    Layers, ends and sums are run apart.  Where replicas do not meet in passes, those are run once
    for all models that differ in replicas and stages alone.

    Parameters
    ----------
    model : PipelineModel
        A model with one micro-batch.
    layers, stage, block : int
        As of `PipelineModel.trace`.
    """
    grid, last = model.grids[stage], model.schedule.ranks - 1
    ends, where = model, stage
    if model.zero < 2 and model.context == 1 and not model.experts:
        ends, where = _one_replica(model, (grid,) * min(2, last + 1)), min(1, stage)
    causal = model.stack.causal or model.vocab > 0    # a GPT is
    alone = replace(ends if ends is model else _one_replica(model, (grid,)), vocab=0,
                    stack=replace(model.stack, causal=causal))
    runs = [dry_run.extrapolate(
        lambda count: _copied(_run_of(alone, count, alone.grids.index(grid), block, LAYERS)),
        layers, dry_run.period_of(model.stack.recompute, model.experts))]
    if model.vocab:
        group = dry_run.period_of("none", model.experts)
        runs.append(_run_of(ends, group, where, block, ENDS))
    if model.replicas > 1:
        runs.append(model.trace(layers, stage=stage, block=block, parts=(SUMS,)))
    found = copy(runs[0])
    found.events = sum((one.events for one in runs), Counter())
    found.traffic = {phase: moved for one in runs for phase, moved in one.traffic.items()}
    return found


@cache
def _run_of(model: PipelineModel, layers: int, stage: int, block: int, part: str) -> Trace:
    """Run a part dry."""
    return model.trace(layers, stage=stage, block=block, parts=(part,), extrapolates=False)


def _copied(trace: Trace) -> Trace:
    """Return a trace whose counts can be changed."""
    found = copy(trace)
    found.events = Counter(trace.events)
    found.traffic = {phase: {key: copy(one) for key, one in moved.items()}
                     for phase, moved in trace.traffic.items()}
    return found


def _one_replica(model: PipelineModel, grids: tuple[GridShape, ...]) -> PipelineModel:
    """Return one replica of a model, with a stage on each grid."""
    return replace(model, data=1, zero=0, shards=None, grids=grids, schedule=build_once(
        "zb-h1" if model.halves else "gpipe", len(grids), 1))
