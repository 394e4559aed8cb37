"""Run a step of the model dry: trace any one rank of any grid, in one process, without data.

The unchanged model runs on arrays without contents (`mm3d.tracing.dry_arrays`) and on a
`mm3d.transport.silent.DryCommunicator`.  The `Trace` holds every matrix product, every
elementwise pass, every collective, and the memory over time, exactly.

>>> trace = mm3d.tracing.dry_run.step("3d", 4096, grid=(16, 16, 16), layers=2, hidden=1024,
...                                   heads=16, batch=32, seq=128)
>>> trace.flops("forward"), trace.peak
"""

import sys
from typing import Any

from mm3d.arrays import backend as backends
from mm3d.model.recomputation import parse_policy
from mm3d.model.transformer import Transformer
from mm3d.schemes import scheme as make_scheme
from mm3d.tracing.dry_arrays import DryBackend
from mm3d.tracing.events import Collective, Gemm, PHASES, Pass
from mm3d.tracing.observe import observed
from mm3d.tracing.trace import Trace
from mm3d.transport.silent import DryCommunicator

__all__ = ["PHASES", "Collective", "Gemm", "Pass", "Trace", "extended", "step"]


def step(name: str, ranks: int, grid: tuple[int, ...] | None = None, rank: int = 0,
         block: int = sys.maxsize, options: dict[str, Any] | None = None,
         **sizes: Any) -> Trace:
    """The trace of a forward and a backward pass of rank `rank` of `ranks`.

    Parameters
    ----------
    name, grid, options
        Of `mm3d.scheme`.
    ranks, rank : int
        How many ranks there would be, and which is traced; rank 0 has the largest blocks.
    block : int
        Elements that elementwise work handles at a time; ``Backend.block`` for what NumPy
        does, by default everything at once, as on a GPU.
    **sizes
        Of `mm3d.Transformer`.
    """
    backend = backends.get(DryBackend())
    backend.begin(block)
    trace = backend.trace
    scheme = make_scheme(name, DryCommunicator(ranks, rank), grid, backend, **(options or {}))
    model = Transformer(scheme, **sizes)
    trace.layers = sizes["layers"]
    trace.parameters = sum(p.nbytes for p in model.parameters)
    x, dy = model.random("input"), model.random("output gradient")
    with observed(scheme.grid, trace, model):
        scheme.grid.reset_traffic()
        y, saved = model.forward(x)
        trace.traffic["forward"] = scheme.grid.traffic()
        trace.saved = model.saved_bytes(saved)
        scheme.grid.reset_traffic()
        model.backward(dy, saved)
        trace.traffic["backward"] = scheme.grid.traffic()
    trace.phase = "done"
    return trace


def extended(name: str, ranks: int, grid: tuple[int, ...] | None = None, rank: int = 0, *,
             layers: int, **rest: Any) -> Trace:
    """What `step` gives, in the time of five layers.

    All layers do the same, so what the third adds to two is what every further one adds; where
    the inputs of every n-th layer are kept, all groups of n layers do.  The timeline is that of
    three.
    """
    period = parse_policy(rest.get("recompute", "none")).period
    groups, left = divmod(layers, period)
    if groups <= 3:
        return step(name, ranks, grid, rank, layers=layers, **rest)
    two, three = (step(name, ranks, grid, rank, layers=n * period + left, **rest)
                  for n in (2, 3))

    def more(a: int, b: int) -> int:
        return b + (groups - 3) * (b - a)

    for key, times in three.events.items():
        three.events[key] = more(two.events[key], times)
    for phase, moved in three.traffic.items():
        for key, traffic in moved.items():
            before = two.traffic[phase][key]
            for field, value in vars(traffic).items():
                setattr(traffic, field, more(getattr(before, field), value))
    for field in ("parameters", "saved", "peak", "held", "pool_peak"):
        setattr(three, field, more(getattr(two, field), getattr(three, field)))
    three.layers = layers
    return three
