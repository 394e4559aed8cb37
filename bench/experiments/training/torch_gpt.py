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


class Experts:
    """The layers of experts of a model by autograd: a loop over experts, as many tokens each.

    Parameters
    ----------
    torch : module
        PyTorch.
    p : dict
        The model's parameters by name.
    routing : dict
        See `bench.experiments.experts.problem.routing_settings`.

    Attributes
    ----------
    losses : Tensor or float
        Losses of the routers since it was set to 0.
    """

    def __init__(self, torch: Any, p: dict[str, Any], routing: dict[str, Any]) -> None:
        self.torch, self.p, self.routing, self.losses = torch, p, routing, 0.0
        self._got: dict[str, Any] = {}

    def compute(self, name: str, x: Any) -> Any:
        """Compute the layer of this name for the rows of x, (tokens, hidden)."""
        torch, F, p = self.torch, self.torch.nn.functional, self.p
        chosen, gates = self._route(name, x)
        kept = self._kept(chosen, p[f"{name}.router.weight"].shape[0])
        weights = [p[f"{name}.{part}"].unbind() for part in (
            "up.bias", "up.weight", "down.bias", "down.weight")]
        y = torch.zeros_like(x)
        for e, (b, W, c, V) in enumerate(zip(*weights)):
            tokens, choice = torch.where((chosen == e) & kept)
            wide = F.gelu(torch.addmm(b, x[tokens], W), approximate="tanh")
            y = y.index_add(0, tokens, torch.addmm(c, wide, V) * gates[tokens, choice, None])
        return y

    def _route(self, name: str, x: Any) -> tuple[Any, Any]:
        """Return experts and gates of each token, (tokens, k); add the losses of the router."""
        torch, F, told = self.torch, self.torch.nn.functional, self.routing
        logits = F.linear(x, self.p[f"{name}.router.weight"])
        count, bias = logits.shape[1], self.p.get(f"{name}.router.bias", 0.0)
        scores = logits.sigmoid() if told["gate"] == "sigmoid-bias" else logits.softmax(-1)
        chosen = (scores + bias).topk(told["top"], -1).indices
        gates = scores.gather(1, chosen)
        if told["gate"] != "switch":
            gates = gates / gates.sum(-1, keepdim=True)
        mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
        counted = chosen[:, :told["counted choices"]].flatten()
        share = torch.bincount(counted, minlength=count) / (told["share divisor"] * len(chosen))
        self.losses = self.losses + told["balance"] * count * (share * mean).sum()
        self.losses = self.losses + told["z"] * logits.logsumexp(-1).square().mean()
        if torch.is_grad_enabled():
            self._got[name] = (self._got.get(name, 0)
                               + torch.bincount(chosen.flatten(), minlength=count))
        return chosen, gates

    def _kept(self, chosen: Any, count: int) -> Any:
        """Return which pairs of a token and a choice their experts take."""
        torch, told = self.torch, self.routing
        if not told["capacity"]:
            return torch.ones_like(chosen, dtype=torch.bool)
        ordered = chosen.T if told["by choice"] else chosen
        pairs = torch.nn.functional.one_hot(ordered.flatten(), count)
        places = ((pairs.cumsum(0) - 1) * pairs).sum(1).view(ordered.shape)
        return (places.T if told["by choice"] else places) < told["capacity"]

    def change_biases(self) -> None:
        """Move the biases that choose towards balance, by what the experts got in this step."""
        for name, got in self._got.items():
            if f"{name}.router.bias" in self.p:
                apart = self.torch.sign(got.sum() - len(got) * got)
                self.p[f"{name}.router.bias"] += self.routing["bias rate"] * apart
        self._got.clear()


class Model:
    """The model of `mm3d.GPT` by autograd, from its parameters by name.

    `routing` is for a model with experts, see `Experts`.
    """

    def __init__(self, torch: Any, state: dict[str, Any], heads: int,
                 routing: dict[str, Any] | None = None) -> None:
        self.torch, self.heads = torch, heads
        self.p = {name: torch.from_numpy(a.copy()).requires_grad_(
            not name.endswith("router.bias")) for name, a in state.items()}
        self.layers = sum(name.endswith("ln1.weight") for name in state)
        self.experts = Experts(torch, self.p, routing) if routing else None

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
            normed = norm(x, layer + "ln2")
            if layer + "experts.router.weight" in p:
                x = x + self.experts.compute(layer + "experts", normed.view(-1, hidden)).view(
                    x.shape)
                continue
            wide = linear(normed, layer + "mlp.up")
            x = x + linear(F.gelu(wide, approximate="tanh"), layer + "mlp.down").view(x.shape)
        x = norm(x, "norm").view(batch * seq, hidden)
        head = p["head.weight"] if "head.weight" in p else p["embedding.weight"].T
        return F.cross_entropy(x @ head, targets.reshape(-1))


def decays(name: str, a: Any) -> bool:
    """Return whether a parameter decays: matrices do; the biases of experts are none."""
    return a.dim() > 1 and name.endswith("weight")


def compute_gradients(model: Model, batch: Any, microbatches: int) -> float:
    """Compute loss and gradients of a batch, whose micro-batches are routed apart."""
    total = 0.0
    for part in batch.chunk(microbatches):
        loss = model.loss(part[:, :-1], part[:, 1:])
        if model.experts:
            loss, model.experts.losses = loss + model.experts.losses, 0.0
        (loss / microbatches).backward()
        total += loss.item() / microbatches
    return total


def make_optimizer(torch: Any, model: Model, case: dict[str, Any]) -> Any:
    """Create AdamW, where matrices decay and vectors do not, or SGD, whose decay `change` does."""
    if case["optimizer"] == "sgd":
        return torch.optim.SGD(model.p.values(), lr=case["lr"], momentum=case["momentum"])
    groups = [{"params": [a for name, a in model.p.items() if decays(name, a) == decaying],
               "weight_decay": case["weight_decay"] if decaying else 0.0}
              for decaying in (True, False)]
    return torch.optim.AdamW(groups, lr=case["lr"], betas=(0.9, 0.95), eps=1e-8, fused=True)


def change(torch: Any, model: Model, optimizer: Any, case: dict[str, Any], rate: float) -> None:
    """Change the parameters by their gradients, with this learning rate.

    PyTorch's SGD would add the decay to the gradient, and so to the momentum; mm3d multiplies
    matrices by 1 - rate * decay apart from it, as AdamW does on both sides.
    """
    if case["optimizer"] == "sgd":
        with torch.no_grad():
            for name, a in model.p.items():
                if decays(name, a):
                    a.mul_(1 - rate * case["weight_decay"])
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


def main(folder: str, threads: str) -> None:
    """Train, and print what is measured."""
    import torch
    torch.set_num_threads(int(threads))
    case = json.loads((Path(folder) / "case.json").read_text(encoding="utf-8"))
    with np.load(Path(folder) / "case.npz") as found:
        arrays = dict(found)
    steps, held_out = (torch.from_numpy(arrays.pop(name).astype(np.int64))
                       for name in ("tokens of steps", "tokens of validation"))
    model = Model(torch, arrays, case["heads"], case["routing"])
    microbatches = case["microbatches"]
    optimizer = make_optimizer(torch, model, case)
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, "
          f"{torch.backends.cpu.get_cpu_capability()}", flush=True)

    def validate(step):
        with torch.no_grad():
            losses = [model.loss(part[:, :-1], part[:, 1:]).item()
                      for one in held_out for part in one.chunk(microbatches)]
        if model.experts:
            model.experts.losses = 0.0
        print(json.dumps({"step": step, "validation": sum(losses) / len(losses)}), flush=True)

    for step, (batch, rate) in enumerate(zip(steps, case["rates"])):
        if step in case["validated"]:
            validate(step)
        start = time.perf_counter()
        optimizer.zero_grad(set_to_none=True)
        loss = compute_gradients(model, batch, microbatches)
        if case["clip"]:
            torch.nn.utils.clip_grad_norm_(model.p.values(), case["clip"])
        change(torch, model, optimizer, case, rate)
        if model.experts:
            model.experts.change_biases()
        seconds = time.perf_counter() - start
        print(json.dumps({"step": step, "loss": loss, "seconds": seconds}), flush=True)
    if len(steps) in case["validated"]:
        validate(len(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
