"""Define the cases of ``measure gpu``: sizes, modes, calls of kernels, and layers."""

import math
import time
from dataclasses import dataclass, field
from typing import Any, Callable, Sequence

import numpy as np

import mm3d
from bench.errors import UsageError
from bench.experiments.products import operands
from bench.experiments.torch.models import TorchLayer
from mm3d.arrays.backend import Array, Backend
from mm3d.model import functional
from mm3d.model.draws import varied_values

# How many numbers the host draws for an array: an odd number, so that rows differ when repeated.
DRAWN = 2 ** 22 - 3


@dataclass(frozen=True)
class Scale:
    """The sizes of all cases.

    Attributes
    ----------
    gemm : list of int
        Edges of square matrices.
    elementwise : tuple of int
        Rows and columns of the kernels' arrays.
    hidden : list of int
        Features of the layers.
    tokens : tuple of int
        Sequences of the layers, and tokens in each.
    preset : str
        The preset of the rows of the tables.
    gpt : dict of str to Any
        The GPT that is trained: fields of `mm3d.config.Model`.
    """

    gemm: list[int]
    elementwise: tuple[int, int]
    hidden: list[int]
    tokens: tuple[int, int]
    preset: str
    gpt: dict[str, Any]


SCALES = {
    "paper": Scale([1024, 2048, 4096, 8192], (24 * 512, 8192), [3072, 8192], (24, 512), "paper",
                   dict(layers=8, hidden=2048, heads=16, batch=8, seq=1024, vocab=51200)),
    "tiny": Scale([32, 64], (48, 64), [32], (2, 16), "tiny",
                  dict(layers=2, hidden=32, heads=4, batch=2, seq=16, vocab=64))}


@dataclass(frozen=True)
class Mode:
    """A dtype, with or without TensorFloat-32 in products; `with` puts it in force, also again."""

    backend: Backend
    dtype: str
    tf32: bool = False
    before: list[bool] = field(default_factory=list, repr=False, compare=False)

    def __str__(self) -> str:
        return "tf32" if self.tf32 else self.dtype

    def __enter__(self) -> None:
        self.before.append(getattr(self.backend, "tf32", False))
        self.backend.tf32 = self.tf32

    def __exit__(self, *_: object) -> None:
        self.backend.tf32 = self.before.pop()


def list_modes(backend: Backend, names: Sequence[str] = ()) -> list[Mode]:
    """List the dtypes of the backend, float32 first; on a GPU also TensorFloat-32.

    Only those of some `names`, if there are any; UsageError for one that it does not have.
    """
    found = [Mode(backend, "float32")]
    if not backend.host_buffers:
        found.append(Mode(backend, "float32", tf32=True))
    found += [Mode(backend, name) for name in ("float16", *map(str, backend.more_dtypes))]
    known = [*map(str, found)]
    for name in names:
        if name not in known:
            raise UsageError(f"--mode {name}: {', '.join(known)} would do here")
    return [one for one in found if not names or str(one) in names]


def elementwise_calls(backend: Backend, a: Array, b: Array,
                      c: Array) -> dict[str, tuple[int, Callable[[], object]]]:
    """Return, by kernel, the number of arrays it reads and writes, each counted once, and a call.

    The array `b` is overwritten by `c` normalized; the calls write their results into `c`.
    """
    row, features = backend.contiguous(a[0, :]), a.shape[1]
    _, rstd = functional.normalize_forward(c, features, 1e-5, lambda s: s, b)

    def copy() -> None:
        c[...] = a
    return {
        "copy": (2, copy),
        "bias_gelu_forward": (2, lambda: functional.bias_gelu_forward(a, row, c)),
        "bias_gelu_backward": (3, lambda: functional.bias_gelu_backward(b, a, row, c)),
        "add_rows": (2, lambda: functional.add_rows(a, row, c)),
        "scale_rows": (2, lambda: functional.scale_rows(a, row, c)),
        "sum_rows": (1, lambda: functional.sum_rows(a)),
        "sum_products": (2, lambda: functional.sum_products(a, b)),
        "normalize_forward": (2, lambda: functional.normalize_forward(
            a, features, 1e-5, lambda s: s, c)),
        "normalize_backward": (3, lambda: functional.normalize_backward(
            a, b, rstd, features, lambda s: s, c))}


def draw_array(backend: Backend, shape: tuple[int, ...], dtype: Any, seed: int, name: str,
               mean: float = 0.0, divisor: float = 1.0) -> Array:
    """Draw normally distributed numbers, divided by `divisor`, around `mean`.

    The host draws at most `DRAWN` of them, which are repeated: drawing the weights of a large
    layer would take it minutes.
    """
    size = math.prod(shape)
    drawn = operands.fill(backend.empty((min(size, DRAWN),), "float32"), backend, seed, name)
    drawn /= divisor
    drawn += mean
    a = backend.empty((size,), dtype)
    drawn = backend.xp.astype(drawn, a.dtype, copy=False)
    for start in range(0, size, DRAWN):
        a[start:start + DRAWN] = drawn[:min(DRAWN, size - start)]
    return backend.xp.reshape(a, shape)


class LayerStep:
    """Forward and backward of one layer, on this rank's blocks of random numbers.

    Gradients are added to those of earlier calls.

    Parameters
    ----------
    scheme : Scheme
        Its ranks and array library.
    sizes : ModelSizes
        Those of a model with one layer.
    """

    def __init__(self, scheme: mm3d.Scheme, sizes: mm3d.ModelSizes, dtype: str, seed: int) -> None:
        self.model = mm3d.Transformer(scheme, **sizes, seed=seed, dtype=dtype,
                                      initial_values=lambda name, shape: (0, math.inf))
        self.library, self.seed = scheme.grid.backend, seed
        for p in self.model.parameters:
            p.master[...] = self._draw(p.name, p.master, *varied_values(p.name, p.shape))
            p.refresh()
        block = self.model.outer.local_shape(sizes.hidden)
        like = self.library.empty(block, self.model.parameters[0].value.dtype)
        self.x, self.dy = (self._draw(name, like) for name in ("input", "output gradient"))

    def _draw(self, name: str, like: Array, *distribution: float) -> Array:
        return draw_array(self.library, tuple(like.shape), like.dtype, self.seed, name,
                          *distribution)

    def __call__(self) -> tuple[Array, Array]:
        """Return the output and the gradient of the input."""
        y, saved = self.model.forward(self.x)
        return y, self.model.backward(self.dy, saved)

    def operands(self) -> dict[str, np.ndarray]:
        """Return what a call reads, in float32, by name."""
        read = {p.name: self.library.xp.reshape(p.value, p.public_shape)
                for p in self.model.parameters}
        read |= {"input": self.x, "output gradient": self.dy}
        return {name: self.library.to_host(a).astype(np.float32) for name, a in read.items()}

    def check(self) -> dict[str, Array]:
        """Return the results of a call, by the names that checks use."""
        self.model.zero_gradients()
        y, dx = self()
        return {"output": y, "input gradient": dx} | {
            f"gradient of {p.name}": self.library.xp.reshape(p.grad, p.public_shape)
            for p in self.model.parameters}


class TorchClock:
    """Measure seconds in PyTorch's stream of a device.

    Attributes
    ----------
    torch, where : module, str
        PyTorch, and its name of the device.
    """

    torch: Any
    where: str

    def record_mark(self) -> Any:
        """Mark this place in PyTorch's stream, as `Backend.record_mark` does in the backend's."""
        if self.where == "cpu":
            return time.perf_counter()
        mark = self.torch.cuda.Event(enable_timing=True)
        mark.record()
        return mark

    def seconds_between(self, start: Any, end: Any) -> float:
        """Wait for `end`; return the seconds since `start`."""
        if self.where == "cpu":
            return end - start
        end.synchronize()
        return 1e-3 * start.elapsed_time(end)


class TorchLayerStep(TorchClock):
    """PyTorch's layer in eager mode, on the device of a backend.

    Parameters
    ----------
    operands : dict of str to ndarray
        See `LayerStep.operands`.
    """

    def __init__(self, torch: Any, where: str, heads: int, operands: dict[str, np.ndarray],
                 mode: Mode) -> None:
        torch.backends.cuda.matmul.allow_tf32 = mode.tf32
        self.torch, self.where = torch, where
        self.layer = TorchLayer(torch, {"heads": heads}, operands)

        def there(a: Any, trained: bool) -> Any:
            moved = a.detach().to(where, getattr(torch, mode.dtype))
            return moved.requires_grad_() if trained else moved
        self.layer.x, self.layer.dy = there(self.layer.x, True), there(self.layer.dy, False)
        self.layer.p = {name: there(a, True) for name, a in self.layer.p.items()}

    def __call__(self) -> None:
        """Run forward and backward."""
        self.layer.step()

    def check(self) -> dict[str, Any]:
        """Return the results of a call, by the names that checks use."""
        self()
        return self.layer.results()


def find_torch(backend: Backend) -> tuple[Any, str] | None:
    """Return PyTorch and its name of the backend's device; None if it is missing or sees none."""
    try:
        import torch
    except ImportError:
        return None
    where = "cpu" if backend.host_buffers else "cuda"
    return (torch, where) if where == "cpu" or torch.cuda.is_available() else None
