"""Run one micro-batch dry in the ends of a GPT: embedding, norm, head and loss."""

from typing import Any

import numpy as np

from mm3d.model.cross_entropy import Targets
from mm3d.tracing.events import HALVES, PHASES
from mm3d.tracing.trace import SUMS, Trace


def step_of_ends(model: Any, trace: Trace, halves: bool = False) -> None:
    """Compute one micro-batch in the ends of a `GPT` on this rank, without its layers.

    Its passes are those of the layers: backward belongs to the first of the `halves`.
    """
    ends, chunks = model.chains[-1], model.chunks
    rows = model.pipeline.rows[0]
    tokens = np.zeros((rows.stop - rows.start, model.shape[1]), int)
    trace.begin_phase(PHASES[0])
    if ends.embedding is not None:
        ends.embedding.forward(tokens)
    if ends.output is not None:
        goal = Targets(tokens, 1.0)
        y = chunks[-1].random("output")
        saved = ends.output.forward(y, goal)[1]
        trace.begin_phase(HALVES[0] if halves else PHASES[1])
        ends.output.backward(goal, saved)
        del y, saved
    trace.begin_phase(HALVES[0] if halves else PHASES[1])
    if ends.embedding is not None:
        ends.embedding.backward(chunks[0].random("gradient"), tokens)
    trace.begin_phase(SUMS)
