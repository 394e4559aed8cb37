"""Set the two ways of a context beside each other: words, seconds and bytes of a layer.

Words are counted by dry runs of one layer, beside the closed form.  Seconds are a model's: as the
library computes, which waits for every block, and if blocks of a ring went on behind attention.
"""

from collections import Counter
from copy import copy
from dataclasses import dataclass, replace
from typing import Callable, Iterator, Sequence

from bench.prediction.kernels import ATTENTION, priced
from bench.prediction.machine_model import Machine
from bench.prediction.pipelines.pipeline_model import PASSES, PipelineModel, build_once
from bench.prediction.seconds import achieved_seconds, trace_terms
from bench.prediction.training_plans.choices import CONTEXT_WAYS, Training
from mm3d.grid.shape import GridShape
from mm3d.model.attention.costs import context_moves
from mm3d.schemes import find_scheme
from mm3d.tracing.events import PHASES, Collective
from mm3d.tracing.trace import Trace

SCHEME = "1d-sp"    # inside a stage
LENGTHS = (8192, 32768, 131072, 524288)    # of sequences, by default


@dataclass(frozen=True)
class ContextWay:
    """What the first rank moves along a context, forward and backward, in words and seconds.

    `hidden` are the seconds if what moves went on behind attention; `peak` bytes have parameters.
    """

    words: int
    seconds: float
    hidden: float
    peak: int


@dataclass(frozen=True)
class ContextPlace:
    """A context of so many ranks, in each place of a grid, for sequences of a length.

    `words` are those of a rank along the context in closed form, the mean of all.
    """

    seq: int
    ranks: int
    places: int
    words: float
    ways: dict[str, ContextWay]


def list_contexts(asked: Training, contexts: Sequence[int], lengths: Sequence[int],
                  progress: Callable[[str], None] = lambda line: None) -> Iterator[ContextPlace]:
    """Count all contexts of one layer and one sequence, on one rank each and on whole nodes.

    Of `asked` its GPUs, batch and sequences do not count.

    Raises ValueError when sequences, heads or features cannot be divided so.
    """
    for places in dict.fromkeys((1, asked.machine.ranks_per_node)):
        for seq in lengths:
            for ranks in contexts:
                progress(f"{seq} tokens, {ranks} x {places} ranks")
                grid = find_scheme(SCHEME).grid_shape((places,))
                here = replace(asked, seq=seq)
                ways = {way: _count_way(asked.machine, _model(here, grid, ranks, way))
                        for way in CONTEXT_WAYS}
                moves = context_moves(SCHEME, grid, here.stack(1, "none", 1).sizes, ranks)
                words = sum(move.words for phase in moves.values() for move in phase.values())
                yield ContextPlace(seq, ranks, places, words / (ranks * places), ways)


def _model(asked: Training, grid: GridShape, ranks: int, way: str) -> PipelineModel:
    """Return one layer of the model; ValueError when it cannot be divided so."""
    model = PipelineModel(build_once("gpipe", 1, 1), SCHEME, (grid,), asked.stack(1, "none", 1),
                          context=ranks, context_way=way)
    model.parts    # raises
    return model


def _count_way(machine: Machine, model: PipelineModel) -> ContextWay:
    """Run the layer dry, and price it."""
    trace = model.trace(1, block=machine.elementwise_block, parts=PASSES)
    words = sum(one.words for moved in trace.traffic.values()
                for (direction, _), one in moved.items() if direction == "c")
    found = priced(trace, machine, model.stack, model.masked)
    seconds = hidden = 0.0
    for phase in PHASES:
        whole, over, scores = (_seconds(machine, found, phase, which) for which in (
            lambda part, event: True,
            lambda part, event: isinstance(event, Collective) and event.direction == "c",
            lambda part, event: part == ATTENTION and not isinstance(event, Collective)))
        seconds += whole
        hidden += whole - min(over, scores)
    return ContextWay(words, seconds, hidden, trace.peak)


def _seconds(machine: Machine, trace: Trace, phase: str,
             which: Callable[[str, object], bool]) -> float:
    """Predict the seconds of some events of a phase."""
    found = copy(trace)
    found.events = Counter({key: times for key, times in trace.events.items()
                            if key[0] == phase and which(*key[1:])})
    return achieved_seconds(machine, trace_terms(machine, found)[phase])
