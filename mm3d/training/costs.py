"""Compute what a pipeline costs in closed form: words between stages, and memory of a rank."""

import math
from typing import Any, Mapping, Sequence

from mm3d.grid.layout import Layout
from mm3d.grid.shape import GridShape
from mm3d.model import cost
from mm3d.model.chain_specs import ModelSpec
from mm3d.schemes import find_scheme
from mm3d.schemes.parallelism import Parallelism
from mm3d.training.data_costs import parameter_peak_words
from mm3d.training.schedules.messages import operations
from mm3d.training.schedules.schedule import Event, Schedule


def hop_words(schedule: Schedule, scheme: str, grids: Sequence[GridShape],
              shape: tuple[int, int, int], options: Mapping[str, Any] | None = None,
              sequences: Sequence[int] | None = None) -> int:
    """Count the words that all ranks send to other stages in a step.

    Each rank of the receiving stage gets its block once: where nothing is stored twice, that is
    b s h words for each result of F and of B that goes to another stage.  A GPT sends those of
    `tied_words` too.

    Parameters
    ----------
    schedule : Schedule
        The schedule.
    scheme : str
        Name of the tensor parallelism.
    grids : sequence of GridShape
        The grid of each rank of the schedule.
    shape : tuple of int
        Global shape of the activations of a micro-batch, (batch, seq, hidden).
    options : mapping, optional
        Options of the scheme.
    sequences : sequence of int, optional
        Number of sequences of each micro-batch, where not all have that of `shape`.
    """
    batch, seq, hidden = shape
    lengths = sequences or [batch] * schedule.microbatches
    block = {(rank, n): Parallelism(scheme, grid, n, seq, **(options or {})).outer.words(
        n * seq, hidden) for rank, grid in enumerate(grids) for n in set(lengths)}
    return sum(block[operation.other, lengths[operation.event.micro]]
               for rank in range(schedule.ranks)
               for operation in operations(schedule, rank) if operation.kind == "send")


def tied_words(scheme: str, grids: Sequence[GridShape], vocab: int, hidden: int, data: int = 1,
               zero: int = 0, shards: int | None = None) -> int:
    """Count the words in which two stages exchange the gradients of a tied table in a step.

    Each rank of both gets its block, or from stage 1 of ZeRO on its shard, from the other stage.

    Parameters
    ----------
    scheme : str
        Name of the tensor parallelism.
    grids : sequence of GridShape
        Grids of the stage of the embedding and of that of the head.
    vocab, hidden : int
        Global shape of the table.
    data, zero, shards
        As in `mm3d.training.data_costs.data_words`.
    """
    copies = data // (shards or data) if zero else data
    layout = Layout(find_scheme(scheme).down_weight)
    return sum(copies * vocab * hidden * grid.ranks_along(
        c for c in grid if c not in layout.letters) for grid in grids)


def peak_words(schedule: Schedule, rank: int, chunks: Sequence[ModelSpec],
               parallelism: Parallelism, weights_half: str = "keep", zero: int = 0,
               shards: int = 1) -> float:
    """Count the words that a rank of a stage holds at the peak, where everything divides evenly.

    They are parameters and gradients of all chunks; what the micro-batches in flight have saved;
    results that have arrived early or wait to be used; and what one layer computes with, as in
    `mm3d.model.cost.peak_words`.  From the end of B to the end of W only the operands of the
    weights' gradients are kept; during B they are there beside all that was saved.  Messages that
    are being sent are left out, since how long that takes is not known.

    Parameters
    ----------
    schedule : Schedule
        The schedule.
    rank : int
        A rank of it.
    chunks : sequence of ModelSpec
        The layers of each chunk of that rank, with the sizes of a micro-batch.
    parallelism : Parallelism
        The scheme and grid of that rank, with the sizes of a micro-batch.
    weights_half : {"keep", "gather"}
        Of the model, see `mm3d.Transformer`.
    zero, shards : int
        The stage of ZeRO, and the number of replicas that divide a copy of the model.
    """
    parallelism = parallelism.of_largest_rank
    ranks, outer = parallelism.ranks, parallelism.outer
    block = outer.words(parallelism.tokens, chunks[0].hidden) / ranks
    saved = [sum(spec.chain.saved_words(parallelism)) / ranks for spec in chunks]
    working = [spec.chain.transient_words(parallelism) + 2 * block for spec in chunks]
    operands = [cost.sum_operand_words(parallelism, spec, weights_half) / ranks
                for spec in chunks]
    waiting: set[Event] = set()
    held = peak = 0.0
    program = operations(schedule, rank)
    for operation in program:
        if operation.kind == "send":
            waiting.remove(operation.event)
        elif operation.kind == "run":
            ahead = operation.index + len(operation.actions)
            waiting |= {one.event for one in program if one.kind == "receive"
                        and operation.index <= one.index <= ahead}
            for action in operation.actions:
                before = {event for event in schedule.inputs(rank, action)
                          if event.stage != schedule.stage_of(rank, action.chunk)}
                waiting -= before
                all_saved, kept = saved[action.chunk], operands[action.chunk]
                held += all_saved * (action.kind == "F")
                work = block if action.kind == "F" else working[action.chunk]
                if action.kind == "B":
                    work += kept - _linear_inputs(chunks[action.chunk], parallelism)
                peak = max(peak, held + len(waiting) * block + work)
                held -= {"F": 0, "B": all_saved - kept, "W": kept, "BW": all_saved}[action.kind]
                waiting |= _kept_results(schedule, rank, action)
    stored = sum(cost.parameters(spec) for spec in chunks) / parallelism.weight_parts
    largest = max(math.prod(shape) for spec in chunks for one in spec.chain.forward_passes()
                  for shape in one.layer.parameters().values()) / parallelism.weight_parts
    return parameter_peak_words(zero, shards, stored, largest) + peak


def _linear_inputs(spec: ModelSpec, parallelism: Parallelism) -> float:
    """Count the words of a rank in the inputs of all linear layers, which are operands of W."""
    return sum(one.times * one.layer.input_words(parallelism)
               for one in spec.chain.backward_passes()
               if one.layer.products(spec.batch, spec.seq)) / parallelism.ranks


def _kept_results(schedule: Schedule, rank: int, action) -> set[Event]:
    """Return the results of an action that are kept until they are sent or used."""
    return {Event("B", event.stage + 1, event.micro)
            if event.step == "F" and event.stage + 1 == schedule.stage_count else event
            for event in schedule.outputs(rank, action)
            if event.step == "F" or event.step == "B" and event.stage}
