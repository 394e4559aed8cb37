"""Define the cases of ``measure gpu``: sizes, modes, calls of kernels, and PyTorch's layer."""

import time
from dataclasses import dataclass
from typing import Any, Callable

from bench.experiments.layer.layer import global_arrays
from bench.experiments.torch.models import Layer
from mm3d import ModelSizes
from mm3d.arrays.backend import Array, Backend
from mm3d.model import functional


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
    """

    gemm: list[int]
    elementwise: tuple[int, int]
    hidden: list[int]
    tokens: tuple[int, int]
    preset: str


SCALES = {"paper": Scale([1024, 2048, 4096, 8192], (24 * 512, 8192), [3072, 8192], (24, 512),
                         "paper"),
          "tiny": Scale([32, 64], (48, 64), [32], (2, 16), "tiny")}


@dataclass(frozen=True)
class Mode:
    """A dtype, with or without TensorFloat-32 in products; `with` puts it in force."""

    backend: Backend
    dtype: str
    tf32: bool = False
    itemsize: int = 0

    def __str__(self) -> str:
        return "tf32" if self.tf32 else self.dtype

    def __enter__(self) -> None:
        self.backend.tf32 = self.tf32

    def __exit__(self, *_: object) -> None:
        self.backend.tf32 = False


def list_modes(backend: Backend) -> list[Mode]:
    """List the dtypes of the backend, float32 first; on a GPU also TensorFloat-32."""
    found = [Mode(backend, "float32", itemsize=4)]
    if not backend.host_buffers:
        found.append(Mode(backend, "float32", tf32=True, itemsize=4))
    return found + [Mode(backend, name, itemsize=2)
                    for name in ("float16", *map(str, backend.more_dtypes))]


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


def torch_layer_step(backend: Backend, sizes: ModelSizes,
                     mode: Mode) -> Callable[[], float] | None:
    """Return a step of PyTorch's layer in eager mode on the backend's device.

    The step returns its seconds.  None where PyTorch is not installed or sees no GPU.
    """
    try:
        import torch
    except ImportError:
        return None
    where = "cpu" if backend.host_buffers else "cuda"
    if where == "cuda" and not torch.cuda.is_available():
        return None
    torch.backends.cuda.matmul.allow_tf32 = mode.tf32
    layer = Layer(torch, {"heads": sizes.heads}, global_arrays(sizes, 0, "float32"))

    def there(a: Any, trained: bool) -> Any:
        moved = a.detach().to(where, getattr(torch, mode.dtype))
        return moved.requires_grad_() if trained else moved
    layer.x, layer.dy = there(layer.x, True), there(layer.dy, False)
    layer.p = {name: there(a, True) for name, a in layer.p.items()}

    def step() -> float:
        begun = time.perf_counter()
        layer.step()
        if where == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begun
    return step


def describe_device(backend: Backend) -> dict[str, Any]:
    """Describe the device, for the record."""
    return backend.describe_device() | {"peak_device_bytes": backend.memory()["peak"]}
