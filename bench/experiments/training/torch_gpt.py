"""Train a GPT by PyTorch, in a process and an interpreter of its own.

``python torch_gpt.py FOLDER THREADS`` reads ``case.npz`` (parameters, the tokens of every step and
of the validation) and ``case.json`` (settings), prints a line about the library, then a JSON
object a line for each step and each validation.  It does not need mm3d.
"""

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np


class Model:
    """The model of `mm3d.GPT` by autograd, from its parameters by name."""

    def __init__(self, torch: Any, state: dict[str, Any], heads: int) -> None:
        self.torch, self.heads = torch, heads
        self.p = {name: torch.from_numpy(a.copy()).requires_grad_() for name, a in state.items()}
        self.layers = sum(name.endswith("ln1.weight") for name in state)

    def loss(self, tokens: Any, targets: Any) -> Any:
        """Compute the mean cross entropy."""
        F, p = self.torch.nn.functional, self.p
        batch, seq = tokens.shape
        x = F.embedding(tokens, p["embedding.weight"]) + p["positions.weight"]
        hidden = x.shape[-1]

        def linear(a, name):
            return self.torch.addmm(p[f"{name}.bias"], a.reshape(batch * seq, -1),
                                    p[f"{name}.weight"])

        def norm(a, name):
            return F.layer_norm(a, (hidden,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)

        for n in range(self.layers):
            layer = f"layers.{n}."
            qkv = linear(norm(x, layer + "ln1"), layer + "attention.qkv")
            q, k, v = qkv.view(batch, seq, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + linear(mixed.transpose(1, 2), layer + "attention.proj").view(x.shape)
            wide = linear(norm(x, layer + "ln2"), layer + "mlp.up")
            x = x + linear(F.gelu(wide, approximate="tanh"), layer + "mlp.down").view(x.shape)
        x = norm(x, "norm").view(batch * seq, hidden)
        head = p["head.weight"] if "head.weight" in p else p["embedding.weight"].T
        return F.cross_entropy(x @ head, targets.reshape(-1))


def make_optimizer(torch: Any, model: Model, case: dict[str, Any]) -> Any:
    """Create AdamW, where matrices decay and vectors do not, or SGD, whose decay `change` does."""
    if case["optimizer"] == "sgd":
        return torch.optim.SGD(model.p.values(), lr=case["lr"], momentum=case["momentum"])
    groups = [{"params": [a for a in model.p.values() if (a.dim() > 1) == decays],
               "weight_decay": case["weight_decay"] if decays else 0.0}
              for decays in (True, False)]
    return torch.optim.AdamW(groups, lr=case["lr"], betas=(0.9, 0.95), eps=1e-8, fused=True)


def change(torch: Any, model: Model, optimizer: Any, case: dict[str, Any], rate: float) -> None:
    """Change the parameters by their gradients, with this learning rate.

    PyTorch's SGD would add the decay to the gradient, and so to the momentum; mm3d multiplies
    matrices by 1 - rate * decay apart from it, as AdamW does on both sides.
    """
    if case["optimizer"] == "sgd":
        with torch.no_grad():
            for a in model.p.values():
                if a.dim() > 1:
                    a.mul_(1 - rate * case["weight_decay"])
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def main(folder: str, threads: str) -> None:
    """Train, and print what is measured."""
    import torch
    torch.set_num_threads(int(threads))
    case = json.loads((Path(folder) / "case.json").read_text())
    with np.load(Path(folder) / "case.npz") as found:
        arrays = dict(found)
    steps, held_out = (torch.from_numpy(arrays.pop(name).astype(np.int64))
                       for name in ("tokens of steps", "tokens of validation"))
    model = Model(torch, arrays, case["heads"])
    optimizer = make_optimizer(torch, model, case)
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, "
          f"{torch.backends.cpu.get_cpu_capability()}", flush=True)

    def validate(step):
        with torch.no_grad():
            losses = [model.loss(one[:, :-1], one[:, 1:]).item() for one in held_out]
        print(json.dumps({"step": step, "validation": sum(losses) / len(losses)}), flush=True)

    for step, (batch, rate) in enumerate(zip(steps, case["rates"])):
        if step in case["validated"]:
            validate(step)
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = model.loss(batch[:, :-1], batch[:, 1:])
        loss.backward()
        if case["clip"]:
            torch.nn.utils.clip_grad_norm_(model.p.values(), case["clip"])
        change(torch, model, optimizer, case, rate)
        seconds = time.perf_counter() - start
        print(json.dumps({"step": step, "loss": loss.item(), "seconds": seconds}), flush=True)
    if len(steps) in case["validated"]:
        validate(len(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
