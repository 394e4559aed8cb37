"""Run a step of the model dry: trace any one rank of any grid, in one process, without data.

The unchanged model runs on arrays without contents (`mm3d.tracing.dry_arrays`) and on a
`mm3d.transport.silent.DryCommunicator`.  The `Trace` counts every matrix product, every
elementwise pass, every collective, and the memory over time, exactly.

>>> trace = mm3d.tracing.dry_run.trace_step("3d", 4096, grid=(16, 16, 16), layers=2,
...                                         hidden=1024, heads=16, batch=32, seq=128)
>>> trace.flops("forward"), trace.peak
"""

import math
import sys
from contextlib import contextmanager
from typing import Any, Callable, Iterator

import numpy as np

from mm3d.arrays import backend as backends
from mm3d.grid.grid import GridAxes
from mm3d.model.cross_entropy import Targets
from mm3d.model.gpt_ends import WholeGPT
from mm3d.model.recomputation import parse_policy
from mm3d.model.transformer import Transformer
from mm3d.schemes.creation import scheme as make_scheme
from mm3d.schemes.scheme import Scheme
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.tracing.events import Collective, Gemm, PHASES, Pass
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import SUMS, Trace
from mm3d.transport.silent import DryCommunicator

__all__ = ["PHASES", "Collective", "Gemm", "Pass", "Trace", "extrapolate_step", "trace_gpt",
           "trace_step"]

MOST_LAYERS = 1024    # that are traced one by one: some seconds

# The axes, further options of the model, and what ends a step, such as sums over replicas.
Replicas = Callable[[Scheme], tuple[GridAxes, dict[str, Any], Callable[[], Any] | None]]


def trace_step(name: str, ranks: int, grid: tuple[int, ...] | None = None, rank: int = 0,
               block: int = sys.maxsize, options: dict[str, Any] | None = None,
               halves: bool = False, replicas: Replicas | None = None, **sizes: Any) -> Trace:
    """Trace a forward and a backward pass of one rank.

    Parameters
    ----------
    name, grid, options
        As in `mm3d.scheme`.
    ranks, rank : int
        Number of ranks, and the rank to trace; rank 0 has the largest blocks.
    block : int
        Elements that elementwise work handles at a time: ``Backend.block`` for NumPy's; by
        default all at once, as on a GPU.
    halves : bool
        Whether backward is traced in its halves, "backward_input" and "backward_weights".
    replicas : callable, optional
        Returns, for the scheme, the axes of the scheme's grid together with those of other
        replicas, further options of the model, and a function or None that is called after
        backward, in the phase "sums"; see `mm3d.training.dry_replicas`.
    **sizes
        As in `mm3d.Transformer`.

    Returns
    -------
    Trace
        The events, the traffic and the memory of the rank.

    Raises
    ------
    ValueError
        When `mm3d.scheme`, `DryCommunicator` or `mm3d.Transformer` refuses the arguments.
    """
    if sizes["layers"] > MOST_LAYERS:
        raise ValueError(f"{sizes['layers']} layers are more than a dry run plays one by one: "
                         f"{MOST_LAYERS} at most would do")
    scheme, trace = _dry_scheme(name, ranks, grid, rank, block, options)
    axes, more, end = replicas(scheme) if replicas else (scheme.grid, {}, None)
    model = Transformer(scheme, **sizes, **more)
    model.mask_key.place = 0, 0    # as in training
    trace.layers = sizes["layers"]
    trace.parameters = sum(p.nbytes for p in model.parameters)
    trace.divided = sum(p.nbytes for p in model.parameters if p.grid is not scheme.grid)
    x, dy = model.random("input"), model.random("output gradient")
    with observed(axes, trace, model):
        with _traced_phase(axes, trace, "forward"):
            y, saved = model.forward(x)
        trace.saved = model.saved_bytes(saved)
        if halves:
            with _traced_phase(axes, trace, "backward_input"):
                _, operands = model.backward_input(dy, saved)
            del saved
            trace.operands = model.saved_bytes(operands)
            with _traced_phase(axes, trace, "backward_weights"):
                model.backward_weights(operands)
        else:
            with _traced_phase(axes, trace, "backward"):
                model.backward(dy, saved)
        if end is not None:
            with _traced_phase(axes, trace, SUMS):
                trace.phase = SUMS
                end()
    trace.phase = "done"
    return trace


def trace_gpt(name: str, ranks: int, grid: tuple[int, ...] | None = None, rank: int = 0,
              block: int = sys.maxsize, options: dict[str, Any] | None = None,
              **sizes: Any) -> Trace:
    """Trace a forward and a backward pass of a whole GPT on one rank, on one stage.

    Tokens and targets are the numbers of the vocabulary in turn, so that all have their share.

    Parameters
    ----------
    name, ranks, grid, rank, block, options
        As in `trace_step`.
    **sizes
        As in `mm3d.model.gpt_ends.WholeGPT`.

    Returns
    -------
    Trace
        As from `trace_step`.

    Raises
    ------
    ValueError
        As from `trace_step`.
    """
    scheme, trace = _dry_scheme(name, ranks, grid, rank, block, options)
    model = WholeGPT(scheme, **sizes)
    model.inside.mask_key.place = 0, 0
    trace.layers, trace.parameters = sizes["layers"], model.nbytes
    tokens = np.arange(math.prod(model.shape)).reshape(model.shape) % model.vocab
    with observed(scheme.grid, trace, model):
        with _traced_phase(scheme.grid, trace, "forward"):
            _, saved = model.forward(tokens, Targets(tokens))
        trace.saved = model.inside.saved_bytes(saved)
        with _traced_phase(scheme.grid, trace, "backward"):
            model.backward(tokens, Targets(tokens), saved)
    trace.phase = "done"
    return trace


def _dry_scheme(name: str, ranks: int, grid: tuple[int, ...] | None, rank: int, block: int,
                options: dict[str, Any] | None) -> tuple[Scheme, Trace]:
    """Create a scheme without ranks, and the new trace of its arrays."""
    backend = backends.get(DryBackend())
    backend.reset(block)
    scheme = make_scheme(name, DryCommunicator(ranks, rank), grid, backend, **(options or {}))
    return scheme, backend.trace


@contextmanager
def _traced_phase(axes: GridAxes, trace: Trace, phase: str) -> Iterator[None]:
    """Add the traffic of what is done in this context to the trace, as that of a phase."""
    axes.reset_traffic()
    yield
    trace.traffic[phase] = axes.traffic()


def extrapolate_step(name: str, ranks: int, grid: tuple[int, ...] | None = None, rank: int = 0, *,
                     layers: int, **rest: Any) -> Trace:
    """Return the trace of `trace_step` for any number of layers, in the time of five layers.

    All layers are alike, so each layer beyond the third adds what the third adds to two.  Where
    recomputation keeps the input of every n-th layer, or every n-th layer has experts, groups of
    n layers are alike.  Only the timeline is that of three layers.

    Parameters
    ----------
    name, ranks, grid, rank, **rest
        As in `trace_step`.
    layers : int
        Number of layers.
    """
    experts = rest.get("experts")
    period = math.lcm(parse_policy(rest.get("recompute", "none")).period,
                      experts.every if experts else 1)
    groups, left = divmod(layers, period)
    if groups <= 3:
        return trace_step(name, ranks, grid, rank, layers=layers, **rest)
    two, three = (trace_step(name, ranks, grid, rank, layers=n * period + left, **rest)
                  for n in (2, 3))

    def extrapolate(second: int, third: int) -> int:
        return third + (groups - 3) * (third - second)

    for key, times in three.events.items():
        three.events[key] = extrapolate(two.events[key], times)
    for phase, moved in three.traffic.items():
        for key, traffic in moved.items():
            before = two.traffic[phase][key]
            for field, value in vars(traffic).items():
                setattr(traffic, field, extrapolate(getattr(before, field), value))
    for field in ("parameters", "divided", "saved", "operands", "peak", "held", "pool_peak"):
        setattr(three, field, extrapolate(getattr(two, field), getattr(three, field)))
    three.layers = layers
    return three
