"""Run a step of the model dry: trace any one rank of any grid, in one process, without data.

The unchanged model runs on arrays without contents (`mm3d.tracing.dry_arrays`) and on a
`mm3d.transport.communicators.DryCommunicator`.  The `Trace` counts every matrix product, every
elementwise pass, every collective, and the peaks of memory, exactly.

>>> trace = mm3d.tracing.dry_run.trace_step("3d", 4096, grid=(16, 16, 16), layers=2,
...                                         hidden=1024, heads=16, batch=32, seq=128)
>>> trace.flops("forward"), trace.peak > trace.parameters
(51380224, True)
"""

import sys
from contextlib import nullcontext
from typing import Any, Callable

from mm3d.arrays import backend as backends
from mm3d.model.chains import saved_arrays
from mm3d.model.recomputation import period_of
from mm3d.model.transformer import Transformer
from mm3d.schemes.creation import scheme as make_scheme
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.tracing.events import LayerEvent, Observer, Phase
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import SUMS, Trace
from mm3d.transport.communicators import DryCommunicator

MOST_LAYERS = 1024    # that are traced one by one: some seconds


def trace(build: Callable[[DryCommunicator, DryBackend], Any], ranks: int, rank: int = 0,
          block: int = sys.maxsize, step: Callable[[Any, Trace], Any] | None = None,
          events: bool = True) -> Trace:
    """Trace a step of a model on one rank of any number of ranks.

    Parameters
    ----------
    build : callable
        Builds the model on a communicator, with a backend, as on real ranks: a `GPT` or a
        `Pipeline` on a `Mesh`, or a `Transformer` on a scheme.
    ranks, rank : int
        Number of ranks, and the rank to trace.
    block : int
        Elements that elementwise work handles at a time: ``Backend.block`` for NumPy's; by
        default all at once, as on a GPU, where functions of 16 bits for which this library has
        kernels of its own, or cuDNN's, hold no intermediate arrays.
    step : callable, optional
        Computes a step of the model, and may set fields of the trace.  By default it is
        `rehearse` of the model, without an optimizer.
    events : bool
        Whether events are counted, beside memory and traffic.

    Returns
    -------
    Trace
        The events, the traffic and the memory of the rank.

    Raises
    ------
    ValueError
        When there is no such rank, or what is built refuses its arguments.

    Examples
    --------
    >>> def build(comm, backend):
    ...     mesh = mm3d.Mesh(comm, data=64, stages=16, grid=(4, 4, 4), backend=backend)
    ...     return mm3d.GPT(mesh, layers=64, hidden=12288, heads=96, vocab=51200, batch=512,
    ...                     seq=1024, microbatches=8, zero=1)
    >>> trace(build, 65536, rank=7).peak > 2 ** 30
    True
    """
    backend = backends.get(DryBackend())
    backend.reset(block)
    found = backend.trace
    model = build(DryCommunicator(ranks, rank), backend)
    found.parameters = sum(p.nbytes for p in model.trained)
    found.divided = sum(p.nbytes for p in model.trained if p.grid is not model.grids[0])
    found.count_traffic(model)
    backend.pool.leave_out()    # parameters
    with (observed(model.grids, found, *model.chains) if events else nullcontext(),
          observed(model.grids, SavedArrays(backend), *model.chains)):
        found.begin_phase(SUMS)
        if step is None:
            model.rehearse()
        else:
            step(model, found)
        found.finish()
    return found


class SavedArrays(Observer):
    """Tell the backend of a dry run which arrays layers save for backward."""

    kinds = LayerEvent, Phase

    def __init__(self, backend: DryBackend) -> None:
        self.backend = backend

    def see_layer(self, call: str, x: Any, result: Any) -> None:
        """Count what a layer saves, beside its result or instead of it."""
        if call == "recompute_saved":
            self.backend.count_saved(saved_arrays(result))
        else:
            self.see_pass(call, result)

    def see_pass(self, call: str, result: Any) -> None:
        """Count what a pass saves, or keeps for the other half of backward."""
        if call in ("forward", "backward_input"):
            self.backend.count_saved(saved_arrays(result[1]))


def trace_step(name: str, ranks: int, grid: tuple[int, ...] | None = None, rank: int = 0,
               block: int = sys.maxsize, options: dict[str, Any] | None = None,
               **sizes: Any) -> Trace:
    """Trace a forward and a backward pass of a Transformer on one rank.

    `name`, `grid` and `options` are as in `mm3d.scheme`, `ranks`, `rank` and `block` as in `trace`
    (rank 0 has the largest blocks), and `sizes` as in `mm3d.Transformer`.  The trace has the bytes
    that are saved, too.  Raises ValueError for arguments that one of these refuses.
    """
    if sizes["layers"] > MOST_LAYERS:
        raise ValueError(f"{sizes['layers']} layers are more than a dry run plays one by one: "
                         f"{MOST_LAYERS} at most would do")
    return trace(lambda comm, backend: Transformer(
        make_scheme(name, comm, grid, backend, **(options or {})), **sizes), ranks, rank, block,
        step_of_chunks)


def step_of_chunks(model: Any, trace: Trace, halves: bool = False) -> None:
    """Compute forward and backward, or its halves, of one micro-batch in this rank's layers."""
    for chunk in model.chunks:
        chunk.mask_key.place = 0, 0    # as in training
        x, dy = chunk.random("input"), chunk.random("output gradient")
        y, saved = chunk.forward(x)
        trace.saved += chunk.saved_bytes(saved)
        if not halves:
            chunk.backward(dy, saved)
            continue
        _, operands = chunk.backward_input(dy, saved)
        del saved
        trace.operands += chunk.saved_bytes(operands)
        chunk.backward_weights(operands)


def extrapolate_step(name: str, ranks: int, grid: tuple[int, ...] | None = None, rank: int = 0, *,
                     layers: int, **rest: Any) -> Trace:
    """Return the trace of `trace_step` for any number of layers, in the time of five layers."""
    return extrapolate(
        lambda count: trace_step(name, ranks, grid, rank, layers=count, **rest), layers,
        period_of(rest.get("recompute", "none"), rest.get("experts")))


def extrapolate(trace_of: Callable[[int], Trace], layers: int, period: int,
                least: int = 2) -> Trace:
    """Return ``trace_of(layers)`` in the time of five groups of layers.

    All groups of `period` layers are alike (in a pipeline `period` counts those of all stages), so
    each group beyond the third adds what the third adds to the first two.  The smaller of the two
    models that are run has `least` groups; 1 would do for events, where neighbours alone meet.
    Where the peak of memory lies elsewhere in the larger one, more groups are run.
    """
    groups, left = divmod(layers, period)
    if groups <= least + 1:
        return trace_of(layers)
    two, three = (trace_of(n * period + left) for n in (least, least + 1))
    while not 0 <= three.activations - two.activations <= three.peak - two.peak:
        least += 1
        if groups <= least + 1:
            return trace_of(layers)
        two, three = three, trace_of((least + 1) * period + left)

    def beyond(second: int, third: int) -> int:
        return third + (groups - least - 1) * (third - second)

    for key, times in three.events.items():
        three.events[key] = beyond(two.events[key], times)
    for phase, moved in three.traffic.items():
        for key, traffic in moved.items():
            before = two.traffic[phase][key]
            for field, value in vars(traffic).items():
                setattr(traffic, field, beyond(getattr(before, field), value))
    for field in ("parameters", "divided", "saved", "operands", "peak", "activations", "held",
                  "pool_peak"):
        setattr(three, field, beyond(getattr(two, field), getattr(three, field)))
    return three
