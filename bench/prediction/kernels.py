"""Price the elementwise work and the attention of a step as the kernels of a machine do them.

A dry run counts the passes of NumPy: whole arrays, one operation after another.  With
`Machine.kernels` "numpy" they are priced as they are.  With "own" the functions for which this
library has kernels of a GPU are priced as the launches of these kernels, by the bytes of the
arrays that each is given; all else is a kernel of CuPy for each operation of NumPy.  With
"fused" each layer without weights is one kernel, which reads and writes what the layer is
given and returns; biases are added, and gradients of weights accumulated, within products.
`Machine.attention` says how scores are computed:

- "flash" (Dao et al., arXiv 2205.14135): scores stay in registers.  Backward computes them again,
  so it has five products for the two of forward.
- "softmax": products write and read scores, which fused softmax and dropout read and write, as
  in Megatron-LM before 2022: `SOFTMAX` arrays of scores in forward and in backward; backward has
  four products.  This library's own kernels make scores of 32 bits, and five products.

This library's own attention is "softmax" in types of more than 16 bits, and leaves out what a mask
hides from whole blocks of queries.
"""

import sys
from collections import Counter
from copy import copy
from functools import cache
from typing import Any

from bench.cases.variants import itemsize
from bench.prediction.machine_model import Machine
from bench.prediction.seconds import Flash
from mm3d.arrays.backend import device_kernels
from mm3d.model.stack import Stack
from mm3d.tracing.dry_arrays import DryArray, DryBackend
from mm3d.tracing.events import Boundary, Call, Gemm, MemoryPass
from mm3d.tracing.trace import RECOMPUTED_SUFFIX, Trace

ATTENTION = "attention"    # the part whose products are of scores
RESIDUAL = "residual"
ROTARY = "rotary"       # saves nothing, so that backward reads no input again
OWN_PRODUCTS = {"forward": 2, "backward": 5}    # of scores, in the dry run
SOFTMAX_PRODUCTS = {"forward": 2, "backward": 4}
# Arrays of scores that kernels read and write.  Forward: softmax and dropout one each way;
# backward: dropout one each way, softmax two read and one written.
SOFTMAX = {"forward": 4, "backward": 5}


def priced(trace: Trace, machine: Machine, stack: Stack, masked: float = 1.0) -> Trace:
    """Return the trace of a step of `stack` with the events of the kernels of `machine`."""
    return with_kernels(trace, machine.kernels, attention_of(machine, stack.dtype), stack.dtype,
                        stack.sizes.head, masked)


def attention_of(machine: Machine, dtype: str) -> str:
    """Return how the kernels of a machine compute scores in a type, "flash" or "softmax"."""
    narrow = machine.kernels == "own" and itemsize(dtype) == 2
    return machine.attention if machine.kernels == "fused" or narrow else "softmax"


def with_kernels(trace: Trace, kernels: str, attention: str, dtype: str, head: int,
                 masked: float = 1.0) -> Trace:
    """Return the same trace of a step with "numpy", else one with the events of other `kernels`.

    `attention` is as of `attention_of`; `dtype` is that of activations, and of products of scores.
    `masked` is the share of its scores that a rank of a context multiplies in the trace; fused
    kernels are priced without regard to a mask, with a context as without.
    """
    if kernels == "numpy":
        return trace
    found = copy(trace)
    found.events = Counter()
    own, flash = kernels == "own", attention == "flash"
    with_weights = {part for (_, part, event) in trace.events
                    if isinstance(event, Gemm) and _plain(part) != ATTENTION}
    called = {(phase, part) for (phase, part, event) in trace.events
              if isinstance(event, Call) and "attention_" in event.function}
    scores: Counter = Counter()    # operations by phase and part
    for (*where, event), times in trace.events.items():
        here = tuple(where) in called if own else _plain(where[1]) == ATTENTION
        one_kernel, made = not own or here and flash, {event: 1}
        if isinstance(event, Gemm) and here:
            scores[*where] += times * event.flops / masked
            made = {}
        elif isinstance(event, Boundary):
            moved = one_kernel and _boundary_bytes(event, *where, where[1] in with_weights)
            made = {MemoryPass("fused", moved): 1} if moved else {}
        elif isinstance(event, Call):
            made = {} if one_kernel else events_of_call(event)
        elif isinstance(event, MemoryPass) and (not own
                                                or hasattr(device_kernels(), event.within)):
            made = {}
        for one, count in made.items():
            found.events[*where, one] += times * count
    for (phase, part), flops in scores.items():
        way = "forward" if phase == "forward" or part.endswith(RECOMPUTED_SUFFIX) else "backward"
        if flash:
            found.events[phase, part, Flash(flops, dtype)] += 1
        elif not own:
            _add_softmax(found, (phase, part), way, (flops, masked), (dtype, head), trace)
    return found


class _DeviceBackend(DryBackend):
    """Count in `trace` the products and the launches of the kernels of a GPU, without one."""

    def reset(self, block: int = sys.maxsize) -> None:
        super().reset(block)
        self.kernels = device_kernels()(self)
        self.kernels._launch = self._count_launch
        self.kernels.flash = None    # `attention_of` says whether it is flash

    def gemms(self, a: DryArray, b: DryArray, out: DryArray, add: bool = False) -> None:
        """Count products of stacks of matrices."""
        self.trace.count_event(Gemm(*a.shape, b.shape[-1], str(a.dtype), str(out.dtype)))

    def _count_launch(self, name: str, like: DryArray, blocks: tuple, *given: Any,
                      threads: int = 0) -> None:
        if 0 not in blocks:
            moved = sum(a.nbytes for a in given if isinstance(a, DryArray))
            self.trace.count_event(MemoryPass(name, moved))


@cache
def events_of_call(call: Call) -> Counter:
    """Count products and passes of a call on a GPU, none if no kernel of a GPU computes it.

    Arrays are taken to be contiguous.
    """
    library = _DeviceBackend()

    def argument(told: Any) -> Any:
        if told == "sum":
            return lambda sums: sums    # over ranks, which are collectives apart
        return library.empty(*told) if isinstance(told, tuple) else told
    if work := getattr(library.kernels, call.function, None):
        work(*map(argument, call.given), **{name: argument(told) for name, told in call.named})
    return Counter({event: times for (*_, event), times in library.trace.events.items()})


def _boundary_bytes(event: Boundary, phase: str, part: str, weighted: bool) -> int:
    """Return the bytes that one kernel of a call of a layer moves.

    A product with weights moves its operands itself: backward reads the gradient once more, for
    the bias.
    """
    backward = phase != "forward" and not part.endswith(RECOMPUTED_SUFFIX)
    if weighted:
        return event.given * backward
    if part == RESIDUAL:
        return 2 * event.made + event.given    # the sum of two arrays
    again = backward and _plain(part) != ROTARY
    return event.given + event.made + event.made * again    # backward reads the input again


def _plain(part: str) -> str:
    """Return the name of a part without the mark of its recomputation."""
    return part.removesuffix(RECOMPUTED_SUFFIX)


def _add_softmax(found: Trace, where: tuple[str, str], way: str, work: tuple[float, float],
                 kind: tuple[str, int], trace: Trace) -> None:
    """Add products of scores in memory, and the passes of a fused softmax and dropout.

    `work` is the operations of all scores, and the share of them in the trace.
    """
    (dtype, head), (flops, masked) = kind, work
    share = SOFTMAX_PRODUCTS[way] / OWN_PRODUCTS[way] / masked
    for (phase, part, event), times in trace.events.items():
        if (phase, part) == where and isinstance(event, Gemm):
            found.events[phase, part, event._replace(dtype=dtype)] += times * share
    elements = flops / (2 * head * OWN_PRODUCTS[way])
    found.events[(*where, MemoryPass("softmax", SOFTMAX[way] * elements * itemsize(dtype)))] += 1
