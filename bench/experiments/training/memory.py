"""Compute in closed form what a rank of a training holds at the peak of a step."""

from dataclasses import replace
from typing import Any

import numpy as np

from mm3d.model import cost
from mm3d.model.chain_specs import ChainSpec, ModelSpec
from mm3d.model.gpt_spec import embedding_spec, output_specs
from mm3d.schemes.parallelism import Parallelism
from mm3d.training import costs, data_costs

WHOLE = ("float64", "float32")    # types without separate masters


def stage_specs(model: Any) -> list[ModelSpec]:
    """Return the specs of the chunks of this rank's stage, with embedding, head and loss."""
    schedule, found = model.schedule, []
    stages = schedule.stages[model.mesh.stage]
    last = schedule.stage_count - 1
    for stage, chunk in zip(stages, model.pipeline.chunks):
        spec = chunk.spec
        before = [embedding_spec(model.vocab, model.shape[1], spec.hidden)] * (stage == 0)
        # A tied table on another stage is a copy, as large as a head of its own.
        after = (output_specs(model.vocab, spec.hidden, model.tied and 0 in stages)
                 if stage == last else ())
        found.append(replace(spec, chain=ChainSpec((*before, *spec.chain.layers, *after))))
    return found


def expected_peak_bytes(model: Any, optimizer: Any) -> float:
    """Compute the bytes of this rank's arrays at the peak of a step, where all divides evenly.

    They are those of `mm3d.training.costs.peak_words` and the optimizer's moments.  NaN in 16
    bits, where the closed form of one type does not hold, and with experts, whose rows follow
    from the routing.
    """
    mesh, chunk = model.mesh, model.pipeline.chunks[0]
    if chunk.dtype not in WHOLE or model.experts is not None:
        return np.nan
    specs = stage_specs(model)
    zero, shards = (model.pipeline.data.zero, mesh.data.size) if mesh.data else (0, 1)
    parallelism = Parallelism(mesh.scheme.name, mesh.scheme.grid.shape, *chunk.shape[:2],
                              **mesh.options)
    words = costs.peak_words(model.schedule, mesh.stage, specs, parallelism, zero=zero,
                             shards=shards)
    stored = sum(map(cost.parameters, specs)) / parallelism.of_largest_rank.weight_parts
    words += len(optimizer.moments) * stored * data_costs.state_words(zero, shards).master
    return words * np.dtype(chunk.dtype).itemsize
