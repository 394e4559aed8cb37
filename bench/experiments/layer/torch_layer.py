"""Compute one Transformer layer by PyTorch, in a process and an interpreter of its own.

``python torch_layer.py FOLDER THREADS`` reads ``case.npz``, runs a step, writes its results to
``result.npz`` and prints a line about the library; then, for each line on its standard input, it
runs another step and prints its seconds.  Between two lines it sleeps.  It does not need mm3d.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


def transformer_layer(torch: Any, x: Any, p: dict[str, Any], heads: int) -> Any:
    """Compute the output of a layer from its input and its parameters by name."""
    F, (batch, seq, hidden) = torch.nn.functional, x.shape

    def linear(a, name):
        return torch.addmm(p[f"{name}.bias"], a.reshape(batch * seq, -1), p[f"{name}.weight"])

    def norm(a, name):
        return F.layer_norm(a, (hidden,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)

    qkv = linear(norm(x, "ln1"), "attention.qkv").view(batch, seq, 3, heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(batch, seq, hidden)
    y = x + linear(mixed, "attention.proj").view(batch, seq, hidden)
    wide = F.gelu(linear(norm(y, "ln2"), "mlp.up"), approximate="tanh")
    return y + linear(wide, "mlp.down").view(batch, seq, hidden)


class Layer:
    """x + Attention(LN(x)), then y + MLP(LN(y)), as in `mm3d.Transformer`, by autograd."""

    def __init__(self, torch: Any, case: dict[str, np.ndarray]) -> None:
        self.torch, self.heads = torch, int(case["heads"])
        self.x, self.dy = (torch.from_numpy(case[name]) for name in ("input", "output gradient"))
        self.p = {name.split(".", 2)[2]: torch.from_numpy(a).requires_grad_()
                  for name, a in case.items() if name.startswith("layers.")}
        self.x.requires_grad_()

    def forward(self) -> Any:
        """Compute the output."""
        return transformer_layer(self.torch, self.x, self.p, self.heads)

    def step(self) -> tuple[float, Any]:
        """Run forward and backward from no gradients; return the seconds and the output."""
        for leaf in (self.x, *self.p.values()):
            leaf.grad = None
        start = time.perf_counter()
        y = self.forward()
        y.backward(self.dy)
        return time.perf_counter() - start, y

    def results(self, y: Any) -> dict[str, np.ndarray]:
        """Return the results of the step, by the names that checks use."""
        found = {"output": y.detach(), "input gradient": self.x.grad}
        found |= {f"gradient of layers.0.{name}": leaf.grad for name, leaf in self.p.items()}
        return {name: a.numpy() for name, a in found.items()}


def main(folder: str, threads: str) -> None:
    """Run a step for each line of standard input, until it ends."""
    import torch
    torch.set_num_threads(int(threads))
    with np.load(Path(folder) / "case.npz") as case:
        layer = Layer(torch, dict(case))
    np.savez(Path(folder) / "result.npz", **layer.results(layer.step()[1]))
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, "
          f"{torch.backends.cpu.get_cpu_capability()}", flush=True)
    for _ in sys.stdin:
        print(repr(layer.step()[0]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
