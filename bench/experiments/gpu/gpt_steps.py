"""Take whole steps of training a GPT on one device, by mm3d and by PyTorch.

A step is forward and backward of embedding, layers, head and loss, and AdamW.  Both take the same
tokens from the host in each step, begin from no gradients, and bring the loss to the host.  In 16
bits both compute with values of 16 bits and change masters of 32.  mm3d sums gradients in 32 bits;
PyTorch rounds them to 16, and copies them to 32 for the masters.
"""

import gc
from typing import Any

import numpy as np
from mpi4py import MPI

import mm3d
from bench.experiments.gpu.gpu_cases import Mode, TorchClock, draw_array
from bench.experiments.torch.models import TorchGPT, make_torch_optimizer
from bench.experiments.training.timed_step import ADAMW_OPTIONS, draw_batch
from mm3d.arrays.backend import Array
from mm3d.model.draws import gpt2_values

FEW = 3    # steps whose losses are compared: the second and the third depend on AdamW


def make_gpt(library: Any, dtype: str, sizes: dict[str, Any], **options: Any) -> mm3d.GPT:
    """Make a GPT on this rank alone; in 16 bits it has masters in float32.

    `sizes` are fields of `mm3d.config.Model`.
    """
    narrow = dtype.endswith("16")
    return mm3d.GPT(mm3d.Mesh(MPI.COMM_SELF, scheme="serial", backend=library), **sizes,
                    dtype=dtype, master="float32" if narrow else None, **options)


def gradients_of(model: mm3d.GPT) -> dict[str, Array]:
    """Return the gradients of a model by the names that checks use."""
    xp = model.mesh.scheme.grid.backend.xp
    return {f"gradient of {p.name}": xp.reshape(p.grad, p.public_shape) for p in model.trained}


class GptStep:
    """mm3d's step, on initial values that the device repeats (`draw_array`).

    Parameters
    ----------
    sizes : dict of str to Any
        See `bench.experiments.gpu.gpu_cases.Scale.gpt`.
    """

    def __init__(self, mode: Mode, sizes: dict[str, Any], seed: int) -> None:
        self.library = mode.backend
        gc.collect()    # what models before have left is no longer in use
        self.before = self.library.memory()["in_use"]
        self.model = make_gpt(mode.backend, mode.dtype, sizes, seed=seed, drawn=False)
        values = gpt2_values(sizes["layers"])
        for p in self.model.trained:
            p.master[...] = draw_array(self.library, tuple(p.master.shape), p.master.dtype, seed,
                                       p.name, *values(p.name, p.shape))
            p.refresh()
        self.batch = draw_batch(self.model.config.model)
        self.optimizer = mm3d.AdamW(self.model, **ADAMW_OPTIONS)

    def masters(self) -> dict[str, np.ndarray]:
        """Return the masters on the host, in float32, by name."""
        return {p.name: self.library.to_host(p.master).astype(np.float32).reshape(p.public_shape)
                for p in self.model.trained}

    def __call__(self) -> float:
        """Take a step; return the loss before it."""
        loss = self.model.step(*self.batch)
        self.optimizer.step()
        return loss

    def peak(self) -> int:
        """Take two steps; return the most bytes of its arrays at a time in the second."""
        self()
        self.library.reset_peak()
        self()
        return self.library.memory()["peak"] - self.before

    def check(self) -> dict[str, Array]:
        """Return the gradients of a step that changes nothing, by the names that checks use."""
        self.model.step(*self.batch)
        return gradients_of(self.model)


class TorchGptStep(TorchClock):
    """PyTorch's step in eager mode, with its fused AdamW, on the device of a backend.

    Parameters
    ----------
    torch, where
        As of `TorchClock`.
    ours : GptStep
        Whose initial values, sizes and tokens it takes.
    """

    def __init__(self, torch: Any, where: str, ours: GptStep, mode: Mode) -> None:
        torch.backends.cuda.matmul.allow_tf32 = mode.tf32
        self.torch, self.where = torch, where
        self.batch = [torch.from_numpy(np.ascontiguousarray(a, np.int64)) for a in ours.batch]
        self.model = TorchGPT(torch, {}, ours.model.config.model.heads)
        self.model.use({name: torch.from_numpy(a).to(where).requires_grad_()
                        for name, a in ours.masters().items()})
        self.optimizer = make_torch_optimizer(torch, self.model,
                                              {**ADAMW_OPTIONS, "optimizer": "adamw"})
        self.masters: list[Any] = []
        if mode.dtype.endswith("16"):
            self.masters = list(self.model.p.values())
            for a in self.masters:
                a.grad = torch.empty_like(a)
            self.model.use({name: a.detach().to(getattr(torch, mode.dtype)).requires_grad_()
                            for name, a in self.model.p.items()})

    def _backward(self) -> Any:
        """Compute loss and gradients, from no gradients; return the loss on the device."""
        for a in self.model.p.values():
            a.grad = None
        loss = self.model.loss(*(a.to(self.where) for a in self.batch))
        loss.backward()
        return loss

    def __call__(self) -> float:
        """Take a step; return the loss before it."""
        loss, copy, values = self._backward(), self.torch._foreach_copy_, self.model.p.values()
        with self.torch.no_grad():
            if self.masters:
                copy([a.grad for a in self.masters], [a.grad for a in values])
            self.optimizer.step()
            if self.masters:
                copy(list(values), self.masters)
        return loss.item()

    def check(self) -> dict[str, Any]:
        """Return the gradients of a step that changes nothing, by the names that checks use."""
        self._backward()
        return {f"gradient of {name}": a.grad for name, a in self.model.p.items()}
