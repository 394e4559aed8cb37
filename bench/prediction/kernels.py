"""Price the elementwise work and the attention of a step as the kernels of a machine do them.

A dry run counts the passes of this library: whole arrays, one operation after another.  With
`Machine.kernels` "own" they are priced as they are.  With "fused" each layer without weights is
one kernel, which reads and writes what the layer is given and returns; biases are added, and
gradients of weights accumulated, within products.  `Machine.attention` says how scores are
computed:

- "flash" (Dao et al., arXiv 2205.14135): scores stay in registers.  Backward computes them again,
  so it has five products for the two of forward.
- "softmax": products write and read scores, which fused softmax and dropout read and write, as
  in Megatron-LM before 2022: `SOFTMAX` arrays of scores in forward and in backward; backward has
  four products.
"""

from collections import Counter
from copy import copy

from bench.cases.variants import itemsize
from bench.prediction.machine_model import Machine
from bench.prediction.seconds import Flash
from mm3d.model.stack import Stack
from mm3d.tracing.events import Boundary, Gemm, Pass
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
    return with_kernels(trace, machine.kernels, machine.attention, stack.dtype,
                        stack.sizes.head, masked)


def with_kernels(trace: Trace, kernels: str, attention: str, dtype: str, head: int,
                 masked: float = 1.0) -> Trace:
    """Return the trace of a step with the events of other kernels.

    Parameters
    ----------
    trace : Trace
        A step as this library computes it.
    kernels, attention : str
        As of `bench.prediction.machine_model.Machine`.
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
        The same trace with "own"; else one whose `events` are those of fused kernels.
    """
    if kernels == "own":
        return trace
    found = copy(trace)
    found.events = Counter()
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
