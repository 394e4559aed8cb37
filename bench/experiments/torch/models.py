"""Compute a layer, a layer of experts and a GPT by PyTorch's autograd, in one process.

``serve.py`` calls the methods of a subject by name.  Nothing here needs mm3d.
"""

import time
from typing import Any

import numpy as np

Arrays = dict[str, np.ndarray]
EXPERT_PARTS = ("up.bias", "up.weight", "down.bias", "down.weight")


def transformer_layer(torch: Any, x: Any, p: dict[str, Any], heads: int, causal: bool = False,
                      experts: "TorchExperts | None" = None) -> Any:
    """Compute the output of a layer from its input and its parameters by name.

    x + Attention(LN(x)), then y + MLP(LN(y)), as in `mm3d.Transformer`; the layer that has
    parameters of experts needs `experts` in the place of the MLP.
    """
    F, (batch, seq, hidden) = torch.nn.functional, x.shape

    def linear(a, name):
        return torch.addmm(p[f"{name}.bias"], a.reshape(batch * seq, -1), p[f"{name}.weight"])

    def norm(a, name):
        return F.layer_norm(a, (hidden,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-5)

    qkv = linear(norm(x, "ln1"), "attention.qkv").view(batch, seq, 3, heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2)
    y = x + linear(mixed, "attention.proj").view(x.shape)
    normed = norm(y, "ln2")
    if "experts.router.weight" in p:
        own = named_below("experts.", p)
        return y + experts.compute(own, normed.view(-1, hidden)).view(x.shape)
    wide = F.gelu(linear(normed, "mlp.up"), approximate="tanh")
    return y + linear(wide, "mlp.down").view(x.shape)


def named_below(prefix: str, found: dict[str, Any]) -> dict[str, Any]:
    """Return the entries whose name begins with `prefix`, by the rest of the name."""
    return {name.removeprefix(prefix): a for name, a in found.items() if name.startswith(prefix)}


class TorchLayer:
    """A Transformer layer, from an input and the gradient of the output."""

    def __init__(self, torch: Any, case: dict[str, Any], arrays: Arrays) -> None:
        self.torch, self.heads = torch, case["heads"]
        self.x, self.dy = (torch.from_numpy(arrays[name]) for name in ("input", "output gradient"))
        self.p = {name: torch.from_numpy(a).requires_grad_()
                  for name, a in named_below("layers.0.", arrays).items()}
        self.x.requires_grad_()
        self.y: Any = None

    def step(self) -> dict[str, float]:
        """Run forward and backward from no gradients; return begin and end."""
        for leaf in (self.x, *self.p.values()):
            leaf.grad = None
        begin = time.perf_counter()
        self.y = transformer_layer(self.torch, self.x, self.p, self.heads)
        self.y.backward(self.dy)
        return {"begin": begin, "end": time.perf_counter()}

    def check(self) -> Arrays:
        """Return the results of a step, by the names that checks use."""
        self.step()
        return {name: a.numpy() for name, a in self.results().items()}

    def results(self, prefix: str = "layers.0.") -> dict[str, Any]:
        """Return the results of the last step, by the names that checks use."""
        found = {"output": self.y.detach(), "input gradient": self.x.grad}
        return found | {f"gradient of {prefix}{name}": leaf.grad for name, leaf in self.p.items()}


class TorchExperts:
    """Layers of experts by autograd, with the balance loss and the z-loss of their routers.

    Their ways: "loop", products of the rows of one expert after the other; "padded", batched
    products of all experts, with as many rows for each as the fullest has, or as its capacity;
    "grouped", PyTorch's own grouped products of the rows in the order of their experts.

    Parameters
    ----------
    routing : dict
        See `bench.experiments.experts.problem.routing_settings`.

    Attributes
    ----------
    losses : Tensor or float
        Losses of the routers since it was set to 0.
    got : dict of Tensor to Tensor
        In training: the tokens that experts got, by the bias of their router.
    """

    def __init__(self, torch: Any, routing: dict[str, Any], way: str = "loop") -> None:
        self.torch, self.routing, self.way, self.losses = torch, routing, way, 0.0
        self.got: dict[Any, Any] = {}

    def compute(self, p: dict[str, Any], x: Any) -> Any:
        """Compute the layer of these parameters for the rows of x, (tokens, hidden)."""
        chosen, gates = self._route(p, x)
        places = kept = None
        if self.routing["capacity"] or self.way == "padded":
            places = self._places(chosen, p["router.weight"].shape[0])
        if self.routing["capacity"]:
            kept = places < self.routing["capacity"]
        if self.way == "padded":
            return self._padded(p, x, chosen, gates, places, kept)
        return getattr(self, f"_{self.way}")(p, x, chosen, gates, kept)

    def _route(self, p: dict[str, Any], x: Any) -> tuple[Any, Any]:
        """Return experts and gates of each token, (tokens, k); add the losses of the router."""
        torch, told = self.torch, self.routing
        logits = torch.nn.functional.linear(x, p["router.weight"])
        count, bias = logits.shape[1], p.get("router.bias")
        scores = logits.sigmoid() if told["gate"] == "sigmoid-bias" else logits.softmax(-1)
        chosen = (scores if bias is None else scores + bias).topk(told["top"], -1).indices
        gates = scores.gather(1, chosen)
        if told["gate"] != "switch":
            gates = gates / gates.sum(-1, keepdim=True)
        mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
        counted = chosen[:, :told["counted choices"]].flatten()
        share = torch.bincount(counted, minlength=count) / (told["share divisor"] * len(chosen))
        self.losses = self.losses + told["balance"] * count * (share * mean).sum()
        self.losses = self.losses + told["z"] * logits.logsumexp(-1).square().mean()
        if bias is not None and torch.is_grad_enabled():
            self.got[bias] = self.got.get(bias, 0) + torch.bincount(
                chosen.flatten(), minlength=count)
        return chosen, gates

    def _places(self, chosen: Any, count: int) -> Any:
        """Return the place of each (token, choice) pair in its expert."""
        ordered = chosen.T if self.routing["by choice"] else chosen
        pairs = self.torch.nn.functional.one_hot(ordered.flatten(), count)
        places = ((pairs.cumsum(0) - 1) * pairs).sum(1).view(ordered.shape)
        return places.T if self.routing["by choice"] else places

    def _loop(self, p: dict[str, Any], x: Any, chosen: Any, gates: Any, kept: Any) -> Any:
        torch, y = self.torch, self.torch.zeros_like(x)
        for e, (b, W, c, V) in enumerate(zip(*(p[part].unbind() for part in EXPERT_PARTS))):
            tokens, choice = torch.where(chosen == e if kept is None else (chosen == e) & kept)
            wide = torch.nn.functional.gelu(torch.addmm(b, x[tokens], W), approximate="tanh")
            y = y.index_add(0, tokens, torch.addmm(c, wide, V) * gates[tokens, choice, None])
        return y

    def _padded(self, p: dict[str, Any], x: Any, chosen: Any, gates: Any, places: Any,
                kept: Any) -> Any:
        torch, (b, W, c, V) = self.torch, (p[part] for part in EXPERT_PARTS)
        count, hidden = b.shape[0], x.shape[1]
        full = self.routing["capacity"] or int(places.max()) + 1
        tokens = torch.arange(len(x))[:, None].expand_as(chosen)
        slots = chosen * full + places
        if kept is not None:
            tokens, slots, gates = tokens[kept], slots[kept], gates[kept]
        tokens, slots = tokens.flatten(), slots.flatten()
        rows = x.new_zeros(count * full, hidden).index_copy(0, slots, x[tokens])
        wide = torch.nn.functional.gelu(
            torch.baddbmm(b[:, None], rows.view(count, full, hidden), W), approximate="tanh")
        found = torch.baddbmm(c[:, None], wide, V)
        back = found.view(count * full, hidden)[slots] * gates.flatten()[:, None]
        return torch.zeros_like(x).index_add(0, tokens, back)

    def _grouped(self, p: dict[str, Any], x: Any, chosen: Any, gates: Any, kept: Any) -> Any:
        torch, F, (b, W, c, V) = (self.torch, self.torch.nn.functional,
                                  (p[part] for part in EXPERT_PARTS))
        tokens = torch.arange(len(x))[:, None].expand_as(chosen)
        if kept is None:
            kept = torch.ones_like(chosen, dtype=torch.bool)
        experts, order = chosen[kept].sort(stable=True)
        tokens, gates = tokens[kept][order], gates[kept][order]
        ends = torch.bincount(experts, minlength=b.shape[0]).cumsum(0).to(torch.int32)
        wide = F.gelu(F.grouped_mm(x[tokens], W, offs=ends) + b[experts], approximate="tanh")
        rows = F.grouped_mm(wide, V, offs=ends) + c[experts]
        return torch.zeros_like(x).index_add(0, tokens, rows * gates[:, None])

    def change_biases(self) -> None:
        """Move the biases of the choice towards balance, by the tokens experts got in a step."""
        for bias, got in self.got.items():
            bias += self.routing["bias rate"] * self.torch.sign(got.sum() - len(got) * got)
        self.got.clear()


class TorchExpertsLayer(TorchLayer):
    """One layer of experts, by each way and with each router."""

    def __init__(self, torch: Any, case: dict[str, Any], arrays: Arrays) -> None:
        self.torch, self.case = torch, case
        self.routers = named_below("router.weight ", arrays)
        hidden = arrays["input"].shape[-1]
        self.x, self.dy = (torch.from_numpy(arrays[name].reshape(-1, hidden))
                           for name in ("input", "output gradient"))
        self.p = {name: torch.from_numpy(arrays[name]).requires_grad_() for name in EXPERT_PARTS}
        self.x.requires_grad_()
        self.y: Any = None

    def ways(self) -> dict[str, str]:
        """Return why this version of PyTorch lacks each way; "" if it has it."""
        torch, found = self.torch, {"loop": "", "padded": "", "grouped": ""}
        rows = self.x.detach()[:1].requires_grad_()
        weights = self.x.new_ones(1, rows.shape[1], 16).requires_grad_()
        try:
            out = torch.nn.functional.grouped_mm(
                rows, weights, offs=torch.ones(1, dtype=torch.int32))
            out.backward(torch.ones_like(out))
        except (AttributeError, NotImplementedError, RuntimeError, ValueError) as error:
            why = next(iter(str(error).splitlines()), "")
            found["grouped"] = f"torch.nn.functional.grouped_mm cannot do it: {why}"
        return found

    def step(self, way: str, routing: str) -> dict[str, float]:
        """Run forward and backward from no gradients; return begin and end."""
        self.p["router.weight"] = self.torch.from_numpy(self.routers[routing]).requires_grad_()
        for leaf in (self.x, *self.p.values()):
            leaf.grad = None
        experts = TorchExperts(self.torch, self.case["routing"], way)
        begin = time.perf_counter()
        self.y = experts.compute(self.p, self.x)
        self.torch.autograd.backward((self.y, experts.losses),
                                     (self.dy, self.torch.ones_like(experts.losses)))
        return {"begin": begin, "end": time.perf_counter()}

    def check(self, way: str, routing: str) -> Arrays:
        """Return the results of a step, by the names that checks use."""
        self.step(way, routing)
        return {name: a.numpy() for name, a in self.results("").items()}


class TorchGPT:
    """The model of `mm3d.GPT` by autograd, from its parameters by name.

    `routing` is for a model with experts, see `TorchExperts`.
    """

    def __init__(self, torch: Any, state: dict[str, Any], heads: int,
                 routing: dict[str, Any] | None = None) -> None:
        self.torch, self.heads = torch, heads
        self.use({name: torch.from_numpy(a.copy()).requires_grad_(
            not name.endswith("router.bias")) for name, a in state.items()})
        self.experts = TorchExperts(torch, routing) if routing else None

    def use(self, p: dict[str, Any]) -> None:
        """Compute with these parameters, tensors by name."""
        self.p = p
        self.layers = [named_below(f"layers.{n}.", p)
                       for n in range(sum(name.endswith("ln1.weight") for name in p))]

    def loss(self, tokens: Any, targets: Any) -> Any:
        """Compute the mean cross entropy, from logits of 32 bits at least."""
        F, p = self.torch.nn.functional, self.p
        x = F.embedding(tokens, p["embedding.weight"]) + p["positions.weight"]
        hidden = x.shape[-1]
        for own in self.layers:
            x = transformer_layer(self.torch, x, own, self.heads, True, self.experts)
        x = F.layer_norm(x, (hidden,), p["norm.weight"], p["norm.bias"], 1e-5).view(-1, hidden)
        head = p["head.weight"] if "head.weight" in p else p["embedding.weight"].T
        logits = x @ head
        wide = self.torch.promote_types(logits.dtype, self.torch.float32)
        return F.cross_entropy(logits.to(wide), targets.reshape(-1))


def _has_decay(name: str, a: Any) -> bool:
    """Return whether a parameter decays: weights of two dimensions or more, no biases."""
    return a.dim() > 1 and name.endswith("weight")


def _compute_gradients(model: TorchGPT, batch: Any, microbatches: int) -> float:
    """Compute loss and gradients of a batch, whose micro-batches are routed apart."""
    total = 0.0
    for part in batch.chunk(microbatches):
        loss = model.loss(part[:, :-1], part[:, 1:])
        if model.experts:
            loss, model.experts.losses = loss + model.experts.losses, 0.0
        (loss / microbatches).backward()
        total += loss.item() / microbatches
    return total


def make_torch_optimizer(torch: Any, model: TorchGPT, case: dict[str, Any]) -> Any:
    """Create AdamW, where matrices decay and vectors do not, or SGD, whose decay `change` does."""
    if case["optimizer"] == "sgd":
        return torch.optim.SGD(model.p.values(), lr=case["lr"], momentum=case["momentum"])
    groups = [{"params": [a for name, a in model.p.items() if _has_decay(name, a) == decaying],
               "weight_decay": case["weight_decay"] if decaying else 0.0}
              for decaying in (True, False)]
    return torch.optim.AdamW(groups, lr=case["lr"], betas=(0.9, 0.95), eps=1e-8, fused=True)


def change(torch: Any, model: TorchGPT, optimizer: Any, case: dict[str, Any], rate: float) -> None:
    """Change the parameters by their gradients, with this learning rate.

    PyTorch's SGD would add the decay to the gradient, and so to the momentum; mm3d multiplies
    matrices by 1 - rate * decay apart from it, as AdamW does on both sides.
    """
    if case["optimizer"] == "sgd":
        with torch.no_grad():
            for name, a in model.p.items():
                if _has_decay(name, a):
                    a.mul_(1 - rate * case["weight_decay"])
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


class TorchSteps:
    """The training of a GPT, step by step."""

    def __init__(self, torch: Any, case: dict[str, Any], arrays: Arrays) -> None:
        self.torch, self.case = torch, case
        self.steps, self.held_out = (torch.from_numpy(arrays.pop(name).astype(np.int64))
                                     for name in ("tokens of steps", "tokens of validation"))
        self.model = TorchGPT(torch, arrays, case["heads"], case["routing"])
        self.optimizer = make_torch_optimizer(torch, self.model, case)

    def step(self, number: str) -> dict[str, float]:
        """Take a step; return its loss, begin and end."""
        torch, model, case = self.torch, self.model, self.case
        begin = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=True)
        loss = _compute_gradients(model, self.steps[int(number)], case["microbatches"])
        if case["clip"]:
            torch.nn.utils.clip_grad_norm_(model.p.values(), case["clip"])
        change(torch, model, self.optimizer, case, case["rates"][int(number)])
        if model.experts:
            model.experts.change_biases()
        return {"loss": loss, "begin": begin, "end": time.perf_counter()}

    def validate(self) -> dict[str, float]:
        """Compute the mean loss of the held-out tokens."""
        with self.torch.no_grad():
            losses = [self.model.loss(part[:, :-1], part[:, 1:]).item()
                      for one in self.held_out for part in one.chunk(self.case["microbatches"])]
        if self.model.experts:
            self.model.experts.losses = 0.0
        return {"validation": sum(losses) / len(losses)}
