"""Price the elementwise work and the attention of a step as the kernels of a machine do them.

A dry run counts the passes of NumPy: whole arrays, one operation after another.  With
`Machine.kernels` "numpy" they are priced as they are.  With "own" the functions for which this
library has kernels of a GPU are priced as the launches of these kernels
(`bench.prediction.device_kernels`); all else is a kernel of CuPy for each operation of NumPy.
With "fused" each layer without weights is one kernel, which reads and writes what the layer is
given and returns; biases are added, and gradients of weights accumulated, within products.
`Machine.attention` says how scores are computed:

- "flash" (Dao et al., arXiv 2205.14135): scores stay in registers.  Backward computes them again,
  so it has five products for the two of forward.
- "softmax": products write and read scores, which fused softmax and dropout read and write, as
  in Megatron-LM before 2022: `SOFTMAX` arrays of scores in forward and in backward; backward has
  four products.  This library's own kernels make scores of 32 bits, and five products.

This library's own attention is "softmax" in types of more than 16 bits.
"""

from collections import Counter
from copy import copy

from bench.cases.variants import itemsize
from bench.prediction.device_kernels import events_of_call
from bench.prediction.machine_model import Machine
from bench.prediction.seconds import Flash
from mm3d.arrays.cupy_kernels import GpuKernels
from mm3d.model.stack import Stack
from mm3d.tracing.events import Boundary, Call, Gemm, Pass
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
    """Return the trace of a step with the events of other kernels.

    Parameters
    ----------
    trace : Trace
        A step as this library computes it.
    kernels, attention : str
        As of `bench.prediction.machine_model.Machine`, and of `attention_of`.
    dtype : str
        The dtype of activations, in which scores are multiplied too.
    head : int
        Features of a head.
    masked : float
        The share of its scores that a rank of a context multiplies in the trace; fused kernels
        are priced without regard to a mask, with a context as without.

    Returns
    -------
    Trace
        The same trace with "numpy"; else one whose `events` are those of other kernels.
    """
    if kernels == "numpy":
        return trace
    found = copy(trace)
    found.events = Counter()
    if kernels == "own":
        return _with_own(found, trace, attention == "flash", dtype, masked)
    with_weights = {part for (_, part, event) in trace.events
                    if isinstance(event, Gemm) and _plain(part) != ATTENTION}
    scores: Counter = Counter()    # operations by phase and part
    for (phase, part, event), times in trace.events.items():
        if isinstance(event, Gemm) and _plain(part) == ATTENTION:
            scores[phase, part] += times * event.flops / masked
        elif isinstance(event, Boundary):
            if moved := boundary_bytes(event, phase, part, part in with_weights):
                found.events[phase, part, Pass("fused", moved)] += times
        elif not isinstance(event, Pass):
            found.events[phase, part, event] += times
    for (phase, part), flops in scores.items():
        way = "forward" if phase == "forward" or part.endswith(RECOMPUTED_SUFFIX) else "backward"
        if attention == "flash":
            found.events[phase, part, Flash(flops, dtype)] += 1
        else:
            _add_softmax(found, (phase, part), way, (flops, masked), (dtype, head), trace)
    return found


def _with_own(found: Trace, trace: Trace, flash: bool, dtype: str, masked: float) -> Trace:
    """Add the events of `trace` to `found`, those of calls as kernels of a GPU; return `found`.

    With `flash` attention is one kernel.
    """
    attention = {(phase, part) for (phase, part, event) in trace.events
                 if isinstance(event, Call) and event.function.startswith("attention_")}
    scores: Counter = Counter()    # operations by phase and part
    for (phase, part, event), times in trace.events.items():
        where, made = (phase, part), {event: 1}
        if isinstance(event, Gemm) and where in attention:
            scores[where] += times * event.flops / masked
            continue
        if isinstance(event, Boundary):
            moved = boundary_bytes(event, phase, part, False)
            made = {Pass("flash", moved): 1} if flash and where in attention else {}
        elif isinstance(event, Pass) and hasattr(GpuKernels, event.within):
            continue
        elif isinstance(event, Call):
            one_kernel = flash and where in attention
            made = {} if one_kernel else events_of_call(event) or {}
        for one, count in made.items():
            found.events[*where, one] += times * count
    for where, flops in scores.items():
        if flash:
            found.events[*where, Flash(flops, dtype)] += 1
    return found


def boundary_bytes(event: Boundary, phase: str, part: str, weighted: bool) -> int:
    """Return the bytes that one kernel of a call of a layer moves.

    Parameters
    ----------
    event, phase, part
        The call, in its phase and part of a block.
    weighted : bool
        Whether the layer is a product with weights, which moves its operands itself: backward
        reads the gradient once more, for the bias.
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
    found.events[(*where, Pass("softmax", SOFTMAX[way] * elements * itemsize(dtype)))] += 1
