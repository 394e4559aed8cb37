"""Train a GPT by PyTorch's own parallelism: one of its processes.

All steps have the same batch.  Nothing here needs mm3d.
"""

import contextlib
import time
from typing import Any, Callable

import numpy as np

PARALLELS = {"ddp": "DistributedDataParallel", "fsdp2": "fully_shard (FSDP2)",
             "tp": "parallelize_module (tensor parallelism)", "one": "one process"}
LINEAR = {"qkv": "attention.qkv", "proj": "attention.proj", "up": "mlp.up", "down": "mlp.down"}


def _model_class(torch: Any) -> type:
    """Define the module of the model, which needs the library's own classes."""
    from torch import nn
    F = nn.functional

    class Layer(nn.Module):
        """A pre-LN Transformer layer; its heads are those of the rows of ``qkv`` that it has."""

        def __init__(self, hidden: int, head: int) -> None:
            super().__init__()
            self.head = head
            self.ln1, self.ln2 = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
            self.qkv, self.proj = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
            self.up, self.down = nn.Linear(hidden, 4 * hidden), nn.Linear(4 * hidden, hidden)

        def forward(self, x):
            qkv = self.qkv(self.ln1(x)).unflatten(-1, (3, -1, self.head))
            q, k, v = qkv.permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.proj(mixed.transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.ln2(x)), approximate="tanh"))

    class Model(nn.Module):
        """The model of `mm3d.GPT` with tied weights; `spread` prepares the input of the head."""

        def __init__(self, case: dict[str, Any], spread: Callable = lambda x: x) -> None:
            super().__init__()
            hidden, self.spread = case["hidden"], spread
            self.embedding = nn.Embedding(case["vocab"], hidden)
            self.positions = nn.Parameter(torch.empty(case["seq"], hidden))
            self.layers = nn.ModuleList(Layer(hidden, hidden // case["heads"])
                                        for _ in range(case["layers"]))
            self.norm = nn.LayerNorm(hidden)

        def forward(self, tokens, targets):
            x = self.embedding(tokens) + self.positions
            for layer in self.layers:
                x = layer(x)
            x = self.spread(self.norm(x).flatten(0, 1))
            return F.cross_entropy(F.linear(x, self.embedding.weight), targets.flatten())

    return Model


def _load_parameters(torch: Any, model: Any, state: dict[str, np.ndarray], heads: int,
                     parts: int) -> None:
    """Load parameters named as `mm3d.GPT.state`; columns of qkv in the order of `parts` ranks."""
    def by_rank(a: np.ndarray) -> np.ndarray:
        dealt = a.reshape(*a.shape[:-1], 3, parts, heads // parts, -1)
        return np.moveaxis(dealt, -4, -3).reshape(a.shape)

    found = {"embedding.weight": state["embedding.weight"], "positions": state["positions.weight"],
             "norm.weight": state["norm.weight"], "norm.bias": state["norm.bias"]}
    for n in range(len(model.layers)):
        for kind in ("weight", "bias"):
            for name in ("ln1", "ln2"):
                found[f"layers.{n}.{name}.{kind}"] = state[f"layers.{n}.{name}.{kind}"]
            for name, own in LINEAR.items():
                a = state[f"layers.{n}.{own}.{kind}"]
                found[f"layers.{n}.{name}.{kind}"] = (by_rank(a) if name == "qkv" else a).T
    model.load_state_dict({name: torch.from_numpy(np.ascontiguousarray(a))
                           for name, a in found.items()})


class ParallelTraining:
    """One rank of a training.

    `case` has sizes, the optimizer, "kind", one of `PARALLELS`, and "rank" and "ranks"; `arrays`
    parameters, "tokens" and "targets" of the whole batch.
    """

    def __init__(self, torch: Any, case: dict[str, Any], arrays: dict[str, np.ndarray]) -> None:
        kind, rank, self.ranks = (case[name] for name in ("kind", "rank", "ranks"))
        self.torch, rows = torch, slice(None)
        if kind in ("ddp", "fsdp2"):
            share = case["batch"] // self.ranks
            rows = slice(rank * share, (rank + 1) * share)
        self.batch = [torch.from_numpy(arrays.pop(name)[rows].astype(np.int64))
                      for name in ("tokens", "targets")]
        self.context: Callable = contextlib.nullcontext
        self.model = getattr(self, f"_make_{kind}")(case, arrays)
        groups: dict[tuple[bool, bool], list] = {}
        for p in self.model.parameters():    # a kernel takes tensors of one kind
            groups.setdefault((p.dim() > 1, hasattr(p, "placements")), []).append(p)
        self.optimizer = torch.optim.AdamW(
            [{"params": found, "weight_decay": case["weight_decay"] if matrices else 0.0}
             for (matrices, _), found in groups.items()],
            lr=case["lr"], betas=tuple(case["betas"]), eps=case["eps"], fused=True)

    def _make_one(self, case: dict[str, Any], state: dict[str, np.ndarray], parts: int = 1,
                  **options: Any) -> Any:
        model = _model_class(self.torch)(case, **options)
        _load_parameters(self.torch, model, state, case["heads"], parts)
        return model

    def _make_ddp(self, case: dict[str, Any], state: dict[str, np.ndarray]) -> Any:
        return self.torch.nn.parallel.DistributedDataParallel(
            self._make_one(case, state), gradient_as_bucket_view=True)

    def _mesh(self) -> Any:
        return self.torch.distributed.device_mesh.init_device_mesh("cpu", (self.ranks,))

    def _make_fsdp2(self, case: dict[str, Any], state: dict[str, np.ndarray]) -> Any:
        from torch.distributed.fsdp import fully_shard
        model, mesh = self._make_one(case, state), self._mesh()
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model

    def _make_tp(self, case: dict[str, Any], state: dict[str, np.ndarray]) -> Any:
        from torch.distributed.tensor import DTensor, Replicate
        from torch.distributed.tensor.parallel import (
            ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module)
        mesh, self.context = self._mesh(), loss_parallel
        model = self._make_one(case, state, self.ranks, spread=lambda x: DTensor.from_local(
            x, mesh, [Replicate()], run_check=False))
        plan = {"embedding": RowwiseParallel(input_layouts=Replicate())}
        for n in range(len(model.layers)):
            plan |= {f"layers.{n}.{name}": style() for name, style in (
                ("qkv", ColwiseParallel), ("proj", RowwiseParallel), ("up", ColwiseParallel),
                ("down", RowwiseParallel))}
        return parallelize_module(model, mesh, plan)

    def step(self, check: bool = False) -> dict[str, float]:
        """Take a step; return its loss, begin and end, and with `check` its gradient norm."""
        if self.ranks > 1:
            self.torch.distributed.barrier()
        found = {"begin": time.perf_counter()}
        self.optimizer.zero_grad(set_to_none=True)
        with self.context():
            loss = self.model(*self.batch)
            loss.backward()
        if check:
            found["norm"] = self._norm()
        self.optimizer.step()
        found["end"] = time.perf_counter()
        loss = loss.detach()
        if hasattr(loss, "full_tensor"):
            loss = loss.full_tensor()
        return {**found, "loss": loss.item()}

    def check(self) -> dict[str, float]:
        """Take a step as `step`, with the norm of its gradients."""
        return self.step(True)

    def _norm(self) -> float:
        """Compute the norm of all gradients; every rank must call it."""
        total = 0.0
        for p in self.model.parameters():
            grad = p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
            total += float(grad.double().square().sum())
        return total ** 0.5
