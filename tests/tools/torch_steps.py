"""Steps of small models in PyTorch, right ones and some with a fault, each written as a dump.

    python tests/tools/torch_steps.py FOLDER CASE ...
    python -m torch.distributed.run --nproc-per-node 2 tests/tools/torch_steps.py FOLDER CASE ...

A case is words joined by hyphens: ddp, fsdp, tp or pp; bf16, f16, f64, auto (autocast) or mixed;
micro, uneven (ignored targets), rows (of two replicas one has fewer sequences), math (attention in
plain sums), ops (norms and GELU, too), nocast (loss in 16 bits), dropout, again (recomputed in
backward), sgd; sizes such as l4, h48, n6 (heads), k2 (of keys), v101, t33, b6, s7 (seed); faults:
eps, erf, means, alltargets, twice, nobias, nostep.  llama, mistral, qwen2 and mixtral are models
of transformers, whose names are --names transformers; else it is a GPT-2 with nanoGPT's names.
"""
import contextlib
import json
import math
import os
import re
import sys
import traceback
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).parents[2] / "mm3d" / "examples"))
from dump_from_torch import Dump  # noqa: E402

SIZES = {"v": 65, "t": 24, "h": 32, "n": 4, "k": 2, "l": 3, "b": 8, "s": 3}
OF_TRANSFORMERS = {"llama", "mistral", "qwen2", "mixtral"}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
SGD = {"lr": 0.1, "momentum": 0.9}


class Norm(nn.LayerNorm):
    """A layer norm in single operations."""

    def forward(self, x):
        x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.eps) * self.weight + self.bias


def norm(words, size):
    return (Norm if "ops" in words else nn.LayerNorm)(size.h, 1e-6 if "eps" in words else 1e-5)


def sizes(words):
    """The sizes of a case."""
    found = [re.fullmatch(r"([vthnklbs])(\d+)", word) for word in words]
    return SimpleNamespace(**SIZES | {one[1]: int(one[2]) for one in found if one})


def configuration(words, size):
    """The keys of config.json."""
    kind = next(iter(OF_TRANSFORMERS & {*words}), None)
    if kind is None:
        return {"model_type": "gpt2", "n_layer": size.l, "n_embd": size.h, "n_head": size.n,
                "vocab_size": size.v, "n_positions": size.t, "activation_function": "gelu_new",
                "tie_word_embeddings": "pp" not in words}
    return {"model_type": kind, "num_hidden_layers": size.l, "hidden_size": size.h,
            "num_attention_heads": size.n, "num_key_value_heads": size.k, "vocab_size": size.v,
            "intermediate_size": 2 * size.h + 8, "max_position_embeddings": 64,
            "tie_word_embeddings": False, "rms_norm_eps": 1e-6} | (
        {"num_local_experts": 4, "num_experts_per_tok": 2} if kind == "mixtral" else {})


class Block(nn.Module):
    def __init__(self, words, size):
        super().__init__()
        self.size, hidden = size, size.h
        drop = 0.1 if "dropout" in words else 0.0
        self.ln_1, self.ln_2 = (norm(words, size) for _ in range(2))
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(hidden, 3 * hidden), "c_proj": nn.Linear(
            hidden, hidden), "resid_dropout": nn.Dropout(drop)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(hidden, 4 * hidden), "c_proj": nn.Linear(
            4 * hidden, hidden), "dropout": nn.Dropout(drop)})
        self.plain, self.ops = {"math", "ops"} & {*words}, "ops" in words
        self.gelu, self.again = "none" if "erf" in words else "tanh", "again" in words

    def forward(self, x):
        if self.again and self.training:
            return checkpoint(self.compute, x, use_reentrant=False)
        return self.compute(x)

    def compute(self, x):
        q, k, v = (a.unflatten(-1, (self.size.n, -1)).transpose(1, 2)
                   for a in self.attn.c_attn(self.ln_1(x)).chunk(3, -1))
        if self.plain:
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            y = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn.resid_dropout(self.attn.c_proj(y.transpose(1, 2).flatten(2)))
        up = self.mlp.c_fc(self.ln_2(x))
        up = (0.5 * up * (1 + torch.tanh(math.sqrt(2 / math.pi) * (up + 0.044715 * up ** 3)))
              if self.ops else F.gelu(up, approximate=self.gelu))
        return x + self.mlp.dropout(self.mlp.c_proj(up))


class Model(nn.Module):
    """The whole model, or the stage of two that `part` says, without a tied table."""

    def __init__(self, words, size, part=None):
        super().__init__()
        inside = {str(n): Block(words, size) for n in range(size.l)}
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(size.v, size.h), "wpe": nn.Embedding(size.t, size.h),
            "drop": nn.Dropout(0.1 if "dropout" in words else 0.0), "h": nn.ModuleDict(inside),
            "ln_f": norm(words, size)})
        self.lm_head = nn.Linear(size.h, size.v, bias=False)
        if part is None:
            self.lm_head.weight = self.transformer.wte.weight
        draw(self, size.s)
        for name in {None: [], 0: ["ln_f"], 1: ["wte", "wpe", "drop"]}[part]:
            del self.transformer[name]
        last = size.l - 1
        for number in {None: [], 0: [last], 1: range(last)}[part]:
            del self.transformer.h[str(number)]
        if part == 0:
            del self.lm_head

    def forward(self, x):
        parts = self.transformer
        if "wte" in parts:
            x = parts.drop(parts.wte(x) + parts.wpe(torch.arange(x.shape[1])))
        for block in parts.h.values():
            x = block(x)
        return self.lm_head(parts.ln_f(x)) if "ln_f" in parts else x


def draw(model, seed):
    """Draw the weights."""
    generator = torch.Generator().manual_seed(seed)
    for name, p in sorted(model.named_parameters()):
        one = ("ln_" in name or "norm" in name) and name.endswith("weight")
        p.data = 0.15 * torch.randn(p.shape, generator=generator) + one


class Logits(nn.Module):
    """A model of transformers that returns its logits."""

    def __init__(self, words, size):
        super().__init__()
        from transformers import AutoConfig, AutoModelForCausalLM
        config = AutoConfig.for_model(**configuration(words, size))
        how = "eager" if {"math", "ops"} & {*words} else "sdpa"
        self.module = AutoModelForCausalLM.from_config(config, attn_implementation=how)
        self.keys = json.loads(config.to_json_string())
        draw(self, size.s)

    def forward(self, x):
        return self.module(x, use_cache=False).logits


def divided(model, words, ranks):
    """The model on the ranks."""
    blocks = (model.module.model.layers if isinstance(model, Logits) else
              model.transformer.h.values())
    if "ddp" in words:
        return nn.parallel.DistributedDataParallel(model)
    if "fsdp" in words:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "mixed" in words else (
            MixedPrecisionPolicy())
        for part in (*blocks, model):
            fully_shard(part, mp_policy=policy)
    if "tp" in words:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                                       parallelize_module)
        mesh = init_device_mesh("cpu", (ranks,))
        for block in blocks:
            parallelize_module(block, mesh, {
                **{f"self_attn.{one}_proj": ColwiseParallel() for one in "qkv"},
                "self_attn.o_proj": RowwiseParallel(), "mlp.gate_proj": ColwiseParallel(),
                "mlp.up_proj": ColwiseParallel(), "mlp.down_proj": RowwiseParallel()
            } if hasattr(block, "self_attn") else {
                "mlp.c_fc": ColwiseParallel(), "mlp.c_proj": RowwiseParallel()})
    return model


def step(folder, case):
    """One step of a case."""
    words = case.split("-")
    size = sizes(words)
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    dtype = {"bf16": torch.bfloat16, "f16": torch.float16, "f64": torch.float64}.get(
        next(iter({"bf16", "f16", "f64"} & {*words}), ""), torch.float32)
    torch.manual_seed(rank)
    model = Logits(words, size) if OF_TRANSFORMERS & {*words} else Model(
        words, size, rank if "pp" in words else None)
    keys = getattr(model, "keys", None) or configuration(words, size)
    model = model.to(dtype)
    text = torch.randint(0, size.v, (size.b, size.t + 1),
                         generator=torch.Generator().manual_seed(size.s - 2))
    x, y = text[:, :-1].contiguous(), text[:, 1:].clone()
    if "uneven" in words:
        y[0, :15], y[1, 3:], y[-2, :2] = -100, -100, -100
    replicas = ranks if {"ddp", "fsdp"} & {*words} else 1
    count = (y != -100).sum() if "alltargets" not in words else y.numel()
    cuts = [0, size.b // 2 + 1, size.b] if "rows" in words else [
        size.b * n // replicas for n in range(replicas + 1)]
    if replicas > 1:
        x, y = (a[cuts[rank]:cuts[rank + 1]] for a in (x, y))
    if "means" in words:
        count = (y != -100).sum() * replicas
    model = divided(model, words, ranks)
    narrow = "bfloat16" if {"auto", "mixed"} & {*words} else None
    dump = Dump(f"{folder}/{case}", model, keys, x, y,
                ranks={"data" if replicas > 1 else "tensor": ranks},
                batch_group=dist.group.WORLD if replicas > 1 else None,
                **({"dtype": narrow} if narrow else {}))

    def mean(logits, targets):
        logits = logits if "nocast" in words or dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count
    if "pp" in words:
        losses = pipeline_step(model, rank, ranks, x, y, mean, size)
    else:
        losses = []
        for a, b in zip(*(whole.chunk(4 if "micro" in words else 1) for whole in (x, y))):
            with torch.autocast("cpu", torch.bfloat16) if narrow == "bfloat16" and (
                    "auto" in words) else contextlib.nullcontext():
                losses.append(mean(model(a), b))
            (losses[-1] * (1 if "twice" in words else replicas)).backward()
    loss = losses[0].detach() if len(losses) == 1 else sum(one.detach().double()
                                                           for one in losses)
    loss = torch.as_tensor(loss)
    if ranks > 1 and "tp" not in words:
        loss = loss.double()
        dist.all_reduce(loss)
    if "nobias" in words and rank == 0:
        for hook in dump.hooks:
            hook.remove()
        bias = model.module.transformer.h["1"].mlp.c_fc.bias
        bias.grad = torch.autograd.grad(mean(model.module(x), y) * replicas, bias)[0]
    dump.after_backward(loss.to(dtype if "nocast" in words or dtype.itemsize > 2
                                else torch.float32))
    norm = clip(model, {"tp", "pp"} & {*words})
    settings = SGD if "sgd" in words else ADAMW
    optimizer = torch.optim.SGD(model.parameters(), **SGD) if "sgd" in words else (
        torch.optim.AdamW(model.parameters(), foreach=False, **ADAMW))
    if "nostep" not in words:
        optimizer.step()
    dump.after_step({"name": "sgd" if "sgd" in words else "adamw", "clip": 1.0, **settings}, norm)


def pipeline_step(model, rank, ranks, x, y, mean, size):
    """Forward and backward of two stages with four micro-batches."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    rows = size.b // 4
    middle = torch.zeros(rows, size.t, size.h, requires_grad=True)
    # Without them it would compute once more.
    ends = (x[:rows],), torch.zeros(rows, size.t, size.v)
    stage = PipelineStage(model, rank, ranks, torch.device("cpu"),
                          ends[0] if rank == 0 else (middle,), middle if rank == 0 else ends[1])
    schedule, losses = ScheduleGPipe(stage, 4, loss_fn=mean, scale_grads=False), []
    schedule.step(*([x] if rank == 0 else []), **(
        {} if rank == 0 else {"target": y, "losses": losses}))
    return losses or [torch.zeros(())]


def clip(model, by_hand):
    """Clip the gradients; return their norm."""
    if not by_hand:
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm
    own = [p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
           for p in model.parameters()]
    square = sum(a.double().square().sum() for a in own)
    if isinstance(model, Model) and not {"ln_f", "wte"} <= {*model.transformer}:
        dist.all_reduce(square)
    for p in model.parameters():
        p.grad.mul_(min(1.0, 1.0 / (float(square.sqrt()) + 1e-6)))
    return square.sqrt().to(own[0].dtype)


if __name__ == "__main__":
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    for name in sys.argv[2:]:
        try:
            step(sys.argv[1], name)
        except Exception:
            print("failed:", name, flush=True)
            traceback.print_exc(limit=-4)
