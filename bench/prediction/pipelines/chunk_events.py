"""Run what is alike dry once: the chunks of layers of many models, and many micro-batches."""

from collections import Counter
from copy import copy
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from operator import add, sub
from typing import Any, Iterable

import numpy as np

from bench.prediction.pipelines.pipeline_model import ENDS, LAYERS, PipelineModel, build_once
from mm3d.grid.shape import GridShape
from mm3d.model.chains import saved_arrays
from mm3d.tracing import dry_run
from mm3d.tracing.trace import SUMS, Trace


@cache
def events_of_chunk(model: PipelineModel, layers: int, stage: int, block: int) -> Trace:
    """Return the events of `PipelineModel.trace` of a model with one micro-batch.

    The memory in the trace means nothing.  Layers, ends and sums are run apart.  Where replicas do
    not meet in passes, those are run once for all models that differ in replicas and stages alone.
    """
    grid, last = model.grids[stage], model.schedule.ranks - 1
    ends, where = model, stage
    if model.zero < 2 and model.context == 1 and not model.experts:
        ends, where = _one_replica(model, (grid,) * min(2, last + 1)), min(1, stage)
    causal = model.stack.causal or model.vocab > 0    # a GPT is
    alone = replace(ends if ends is model else _one_replica(model, (grid,)), vocab=0,
                    stack=replace(model.stack, causal=causal))
    runs = [dry_run.extrapolate(
        lambda count: _copied(run_once(alone, count, block, LAYERS,
                                       stage=alone.grids.index(grid))),
        layers, dry_run.period_of(model.stack.recompute, model.experts), least=1)]
    if model.vocab:
        group = dry_run.period_of("none", model.experts)
        runs.append(run_once(ends, group, block, ENDS, stage=where))
    if model.replicas > 1:
        runs.append(model.trace(layers, stage=stage, block=block, parts=(SUMS,)))
    found = copy(runs[0])
    found.events = sum((one.events for one in runs), Counter())
    found.traffic = {phase: moved for one in runs for phase, moved in one.traffic.items()}
    return found


def run_once(model: PipelineModel, layers: int, block: int, *parts: str, stage: int = 0) -> Trace:
    """Run parts as `PipelineModel.trace` does, once for models that differ in their layers alone.

    It does not extrapolate; do not change the trace.
    """
    return _run_of(replace(model, stack=replace(model.stack, layers=1)), layers, block, parts,
                   stage)


@lru_cache(maxsize=512)
def _run_of(model: PipelineModel, layers: int, block: int, parts: tuple[str, ...],
            stage: int) -> Trace:
    return model.trace(layers, stage=stage, block=block, parts=parts, extrapolates=False)


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


@dataclass(frozen=True)
class ChunkCall:
    """What a call of a chunk does to the memory of a rank.

    `peak` and `net` are the most bytes in use during the call, and those after it, beside those
    before, each with those of them that are saved for backward; `out` shape and type of the
    result, and whether it is in the model's pool; `kept` the numbers of the arrays that are saved,
    among those given and the result.
    """

    peak: tuple[int, int]
    net: tuple[int, int]
    out: tuple[tuple[int, ...], np.dtype, bool] | None
    kept: tuple[int, ...]


class SavedChunk:
    """What a micro-batch saves: `data` of a call that ran, and the `arrays` among what it got."""

    def __init__(self, data: Any = None, arrays: tuple[Any, ...] = ()) -> None:
        self.data, self.arrays = data, arrays


class AlikeCalls:
    """Layers that are run dry for some micro-batches; for the others their memory is counted.

    A `mm3d.training.worker.Worker` takes it.  From the second micro-batch on, all calls of a kind
    do the same to the memory of a rank: they are `known` by the name of a method to all chunks of
    as many layers.  As many micro-batches as `runs` are run.
    """

    def __init__(self, chunk: Any, backend: Any, runs: int, known: dict[str, ChunkCall]) -> None:
        self.chunk, self.backend, self.runs, self.known = chunk, backend, runs, known
        self.times: Counter = Counter()

    def forward(self, x: Any) -> tuple[Any, SavedChunk]:
        """Run forward of the layers, or count it."""
        return self._call("forward", (x,), SavedChunk(), self.times["forward"] < self.runs)

    def backward(self, dy: Any, saved: SavedChunk) -> Any:
        """Run backward of the layers, or count it."""
        return self._call("backward", (dy,), saved, saved.data is not None)[0]

    def backward_input(self, dy: Any, saved: SavedChunk) -> tuple[Any, SavedChunk]:
        """Run the first half of backward of the layers, or count it."""
        return self._call("backward_input", (dy,), saved, saved.data is not None)

    def backward_weights(self, saved: SavedChunk) -> None:
        """Run the second half of backward of the layers, or count it."""
        self._call("backward_weights", (), saved, saved.data is not None)

    def _call(self, kind: str, given: tuple, before: SavedChunk,
              runs: bool) -> tuple[Any, SavedChunk]:
        """Return the result of a call, and what it saves."""
        self.times[kind] += 1
        return (self._run if runs else self._count)(kind, given, before)

    def _run(self, kind: str, given: tuple, before: SavedChunk) -> tuple[Any, SavedChunk]:
        trace, start = self.backend.trace, self._in_use()
        most = trace.peak, trace.activations
        trace.peak, trace.activations = start
        found = getattr(self.chunk, kind)(*given, *[before.data] * (before.data is not None))
        out, data = found if isinstance(found, tuple) else (found, None)
        arrays, before.data, before.arrays = (*before.arrays, *given, out), None, ()
        homes = {id(_home(one)) for one in saved_arrays(data)}
        kept = tuple(number for number, one in enumerate(arrays)
                     if one is not None and id(_home(one)) in homes)
        saved = SavedChunk(data, tuple(arrays[number] for number in kept))
        del arrays
        if self.times[kind] == 2:
            made = None if out is None else (
                out.shape, out.dtype, self.backend.pool.lease_of(out._shell) is not None)
            peak, after = (trace.peak, trace.activations), self._in_use()
            self.known[kind] = ChunkCall(_less(peak, start), _less(after, start), made, kept)
        if trace.peak <= most[0]:
            trace.peak, trace.activations = most
        return out, saved

    def _count(self, kind: str, given: tuple, before: SavedChunk) -> tuple[Any, SavedChunk]:
        backend, known, start, out = self.backend, self.known[kind], self._in_use(), None
        if start[0] + known.peak[0] > backend.trace.peak:
            backend.trace.peak, backend.trace.activations = map(add, start, known.peak)
        if known.out:
            *what, own = known.out
            out = (backend.empty if own else backend.scratch_array)(*what)
        arrays = *before.arrays, *given, out
        before.arrays, saved = (), SavedChunk(None, tuple(arrays[number] for number in known.kept))
        del arrays
        backend.count_saved(saved.arrays)
        more, more_saved = _less(map(add, start, known.net), self._in_use())
        backend.pool.in_use += more
        backend.pool.saved += more_saved
        return out, saved

    def _in_use(self) -> tuple[int, int]:
        """Return the bytes in use, and those of them that are saved."""
        return self.backend.pool.in_use + self.backend.scratch.in_use, self.backend.saved


def _less(a: Iterable[int], b: Iterable[int]) -> tuple[int, ...]:
    return tuple(map(sub, a, b))


def _home(a: Any) -> Any:
    """Return the array that has the memory of a dry array."""
    return a._shell.base if type(a._shell.base) is np.ndarray else a._shell


def run_few(model: Any) -> None:
    """Let a dry `mm3d.GPT` or `mm3d.Pipeline` run few of its micro-batches, and count the others.

    They are the first, and the second in the first and in the last of all chunks with such layers,
    whose forward and whose backward come before those of the others.
    """
    pipeline = getattr(model, "pipeline", model)
    chunks = pipeline.worker.chunks = [*pipeline.chunks]
    alike: dict[tuple[int, int], list[int]] = {}
    for number, stage in enumerate(pipeline.schedule.stages[pipeline.mesh.stage]):
        part, stack = pipeline.parts[stage], chunks[number].stack
        place = part.start % dry_run.period_of(stack.recompute, stack.experts)
        alike.setdefault((len(part), place), []).append(number)
    for numbers in alike.values():
        known: dict[str, ChunkCall] = {}
        for number in numbers:
            chunks[number] = AlikeCalls(chunks[number], pipeline.mesh.scheme.grid.backend,
                                        1 + (number in (numbers[0], numbers[-1])), known)
