"""Count what this library's kernels of a GPU move, by running their own launches dry."""

from collections import Counter
from functools import cache
from typing import Any, Callable

from bench.cases.variants import itemsize
from mm3d import ModelSizes
from mm3d.arrays.cupy_kernels import GpuKernels
from mm3d.model import cost
from mm3d.model.transformer import Transformer
from mm3d.schemes.creation import scheme as make_scheme
from mm3d.tracing import dry_run
from mm3d.tracing.dry_arrays import DryArray, DryBackend
from mm3d.tracing.events import Call, Gemm, Pass
from mm3d.tracing.trace import Trace
from mm3d.training.optimizers import AdamW

OPTIMIZER = "optimizer"    # the phase of a dry run


class CountedKernels(GpuKernels):
    """Count each launch: the bytes of the arrays that a kernel is given, once each."""

    def _launch(self, name: str, like: Any, blocks: tuple[int, ...], *arguments: Any) -> None:
        if 0 not in blocks:
            self.library.trace.count_event(Pass(name, sum(
                a.nbytes for a in arguments if isinstance(a, DryArray))))


class DeviceBackend(DryBackend):
    """Provide arrays without contents as a GPU's backend does, for `CountedKernels`."""

    def gemms(self, a: DryArray, b: DryArray, out: DryArray, add: bool = False) -> None:
        """Count products of stacks of matrices."""
        self.trace.count_event(Gemm(*a.shape, b.shape[-1], str(a.dtype), str(out.dtype)))


@cache
def events_of_call(call: Call) -> Counter | None:
    """Return products and passes of a call on a GPU; None if no kernel of a GPU computes it.

    Arrays are taken to be contiguous.
    """
    if not hasattr(GpuKernels, call.function):
        return None
    library = DeviceBackend()
    work: Callable = getattr(CountedKernels(library), call.function)

    def argument(described: Any) -> Any:
        if described is None:
            return lambda sums: sums    # over ranks, which are collectives apart
        return library.empty(*described) if isinstance(described, tuple) else described
    work(*map(argument, call.given), **{name: argument(one) for name, one in call.named})
    found: Counter = Counter()
    for (*_, event), times in library.trace.events.items():
        found[event] += times
    return found


@cache
def adamw_passes(dtype: str) -> tuple[float, float]:
    """Return the bytes and the starts, a parameter, of the passes of AdamW on a GPU.

    Setting gradients to zero and rounding masters to `dtype` are among them.  They are those of a
    layer of 2048 features: what arrays are small matters little.
    """
    def step(model: Transformer, trace: Trace) -> None:
        optimizer = AdamW(model, 1e-3)
        trace.begin_phase(OPTIMIZER)
        model.zero_gradients()
        optimizer.step()
        trace.begin_phase("done")
    sizes = ModelSizes(1, 2048, 16, 1, 1)
    master = "float32" if itemsize(dtype) == 2 else None
    trace = dry_run.trace(lambda comm, backend: Transformer(
        make_scheme("serial", comm, None, backend), **sizes, dtype=dtype, master=master), 1,
        step=step)
    found = trace.count(Pass, OPTIMIZER)
    moved = sum(times * event.bytes for event, times in found.items())
    return moved / cost.parameters(sizes), found.total() / cost.parameters(sizes)
