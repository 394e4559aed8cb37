"""Compute a layer of experts by PyTorch, in a process and an interpreter of its own.

``python torch_experts.py FOLDER THREADS`` reads ``case.npz`` and runs a step of each way and
routing; it writes their results to ``result.npz`` and prints a line about the library.  Then, for
each line "WAY ROUTING" on its standard input, it runs such a step and prints its seconds.  Between
two lines it sleeps.  It does not need mm3d.
"""

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

WAYS = ("loop", "padded")
TRAINED = ("router.weight", "up.weight", "up.bias", "down.weight", "down.bias")


class Layer:
    """A layer of experts, by autograd, with balance loss and z-loss.

    Its ways: "loop", products of the rows of one expert after the other; and "padded", batched
    products of all experts, with as many rows for each as the fullest has, or as its capacity.
    """

    def __init__(self, torch: Any, case: dict[str, np.ndarray]) -> None:
        self.torch, self.F = torch, torch.nn.functional
        self.top, self.capacity = int(case["top"]), int(case["capacity"])
        self.gate, self.by_choice = str(case["gate"]), bool(case["by choice"])
        self.balance, self.z = float(case["balance"]), float(case["z"])
        self.counted, self.divisor = int(case["counted choices"]), float(case["share divisor"])
        self.routers = {str(name): torch.from_numpy(case[f"router.weight {name}"])
                        for name in case["routings"]}
        hidden = case["input"].shape[-1]
        self.x, self.dy = (torch.from_numpy(case[name].reshape(-1, hidden))
                           for name in ("input", "output gradient"))
        self.p = {name: torch.from_numpy(case[name]).requires_grad_() for name in TRAINED[1:]}
        self.x.requires_grad_()

    def route(self, weight: Any) -> tuple[Any, Any, Any]:
        """Return experts and gates, (tokens, k), and the losses of the router."""
        F, torch = self.F, self.torch
        logits = F.linear(self.x, weight)
        scores = logits.sigmoid() if self.gate == "sigmoid-bias" else logits.softmax(-1)
        gates, chosen = scores.topk(self.top, -1)
        if self.gate != "switch":
            gates = gates / gates.sum(-1, keepdim=True)
        probabilities = scores / scores.sum(-1, keepdim=True)
        count = logits.shape[1]
        share = torch.bincount(chosen[:, :self.counted].flatten(), minlength=count) / (
            self.divisor * len(chosen))
        loss = self.balance * count * (share * probabilities.mean(0)).sum()
        return chosen, gates, loss + self.z * logits.logsumexp(-1).square().mean()

    def places(self, chosen: Any, count: int) -> Any:
        """Return the place of each (token, choice) pair in its expert."""
        if self.by_choice:
            chosen = chosen.T
        pairs = self.F.one_hot(chosen.flatten(), count)
        places = ((pairs.cumsum(0) - 1) * pairs).sum(1).view(chosen.shape)
        return places.T if self.by_choice else places

    def forward(self, way: str, weight: Any) -> tuple[Any, Any]:
        """Compute the output and the losses of the router."""
        chosen, gates, losses = self.route(weight)
        kept = None
        if self.capacity or way == "padded":
            places = self.places(chosen, weight.shape[0])
            kept = places < self.capacity if self.capacity else None
        if way == "loop":
            return self._loop(chosen, gates, kept), losses
        return self._padded(chosen, gates, places, kept), losses

    def _loop(self, chosen: Any, gates: Any, kept: Any) -> Any:
        torch, F, p = self.torch, self.F, self.p
        y = torch.zeros_like(self.x)
        for e in range(p["up.weight"].shape[0]):
            tokens, choice = torch.where(chosen == e if kept is None else (chosen == e) & kept)
            wide = F.gelu(torch.addmm(p["up.bias"][e], self.x[tokens], p["up.weight"][e]),
                          approximate="tanh")
            rows = torch.addmm(p["down.bias"][e], wide, p["down.weight"][e])
            y = y.index_add(0, tokens, rows * gates[tokens, choice, None])
        return y

    def _padded(self, chosen: Any, gates: Any, places: Any, kept: Any) -> Any:
        torch, F, p = self.torch, self.F, self.p
        count, hidden = p["up.weight"].shape[0], self.x.shape[1]
        full = self.capacity or int(places.max()) + 1
        tokens = torch.arange(len(self.x))[:, None].expand_as(chosen)
        slots = chosen * full + places
        if kept is not None:
            tokens, slots, gates = tokens[kept], slots[kept], gates[kept]
        tokens, slots = tokens.flatten(), slots.flatten()
        rows = self.x.new_zeros(count * full, hidden).index_copy(0, slots, self.x[tokens])
        wide = F.gelu(torch.baddbmm(p["up.bias"][:, None], rows.view(count, full, hidden),
                                    p["up.weight"]), approximate="tanh")
        found = torch.baddbmm(p["down.bias"][:, None], wide, p["down.weight"])
        back = found.view(count * full, hidden)[slots] * gates.flatten()[:, None]
        return torch.zeros_like(self.x).index_add(0, tokens, back)

    def step(self, way: str, routing: str) -> tuple[float, dict[str, np.ndarray]]:
        """Run forward and backward from no gradients; return the seconds and the results."""
        weight = self.routers[routing].detach().requires_grad_()
        for leaf in (self.x, *self.p.values()):
            leaf.grad = None
        start = time.perf_counter()
        y, losses = self.forward(way, weight)
        self.torch.autograd.backward((y, losses), (self.dy, self.torch.ones_like(losses)))
        seconds = time.perf_counter() - start
        leaves = {"router.weight": weight, **self.p}
        found = {"output": y.detach(), "input gradient": self.x.grad}
        found |= {f"gradient of {name}": leaf.grad for name, leaf in leaves.items()}
        return seconds, {name: a.numpy() for name, a in found.items()}


def main(folder: str, threads: str) -> None:
    """Run a step for each line of standard input, until it ends."""
    import torch
    torch.set_num_threads(int(threads))
    with np.load(Path(folder) / "case.npz") as case:
        layer = Layer(torch, dict(case))
    results = {}
    for routing in layer.routers:
        for way in WAYS:
            results |= {f"{way} {routing}: {name}": a.copy()
                        for name, a in layer.step(way, routing)[1].items()}
    np.savez(Path(folder) / "result.npz", **results)
    print(f"PyTorch {torch.__version__}, {torch.get_num_threads()} threads, "
          f"{torch.backends.cpu.get_cpu_capability()}", flush=True)
    for line in sys.stdin:
        print(repr(layer.step(*line.split())[0]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
