"""Steps of a small GPT-2 in PyTorch, right ones and some with a fault, each written as a dump.

    python tests/tools/torch_steps.py FOLDER CASE ...
    python -m torch.distributed.run --nproc-per-node 2 tests/tools/torch_steps.py FOLDER CASE ...

A case is words joined by hyphens: ddp, fsdp, tp or pp; bf16, f64, auto (autocast) or mixed; micro,
uneven (ignored targets), rows (5 and 3 sequences), math (attention in plain sums), nocast (loss in
bfloat16), dropout, sgd; and faults: eps, erf, means, alltargets, twice, nobias, nostep.  The names
of tensors are nanoGPT's: python -m bench measure dump FOLDER/* --names nanogpt.
"""
import contextlib
import math
import os
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "mm3d" / "examples"))
from dump_from_torch import Dump  # noqa: E402

VOCAB, SEQ, HIDDEN, HEADS, LAYERS, BATCH = 65, 24, 32, 4, 3, 8
CONFIG = {"model_type": "gpt2", "n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS,
          "vocab_size": VOCAB, "n_positions": SEQ, "activation_function": "gelu_new"}
ADAMW = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}
SGD = {"lr": 0.1, "momentum": 0.9}


class Block(nn.Module):
    def __init__(self, words):
        super().__init__()
        epsilon, drop = 1e-6 if "eps" in words else 1e-5, 0.1 if "dropout" in words else 0.0
        self.ln_1, self.ln_2 = (nn.LayerNorm(HIDDEN, eps=epsilon) for _ in range(2))
        self.attn = nn.ModuleDict({"c_attn": nn.Linear(HIDDEN, 3 * HIDDEN), "c_proj": nn.Linear(
            HIDDEN, HIDDEN), "resid_dropout": nn.Dropout(drop)})
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(HIDDEN, 4 * HIDDEN), "c_proj": nn.Linear(
            4 * HIDDEN, HIDDEN), "dropout": nn.Dropout(drop)})
        self.plain, self.gelu = "math" in words, "none" if "erf" in words else "tanh"

    def forward(self, x):
        q, k, v = (a.unflatten(-1, (HEADS, -1)).transpose(1, 2)
                   for a in self.attn.c_attn(self.ln_1(x)).chunk(3, -1))
        if self.plain:
            seen = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            scores = q @ k.transpose(-2, -1) / math.sqrt(q.shape[-1])
            y = scores.masked_fill(~seen, -math.inf).softmax(-1) @ v
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn.resid_dropout(self.attn.c_proj(y.transpose(1, 2).flatten(2)))
        up = F.gelu(self.mlp.c_fc(self.ln_2(x)), approximate=self.gelu)
        return x + self.mlp.dropout(self.mlp.c_proj(up))


class Model(nn.Module):
    """The whole model, or the stage of two that `part` says, without a tied table."""

    def __init__(self, words, part=None):
        super().__init__()
        generator = torch.Generator().manual_seed(3)
        inside = {str(n): Block(words) for n in range(LAYERS)}
        self.transformer = nn.ModuleDict({
            "wte": nn.Embedding(VOCAB, HIDDEN), "wpe": nn.Embedding(SEQ, HIDDEN),
            "drop": nn.Dropout(0.1 if "dropout" in words else 0.0), "h": nn.ModuleDict(inside),
            "ln_f": nn.LayerNorm(HIDDEN, eps=1e-6 if "eps" in words else 1e-5)})
        self.lm_head = nn.Linear(HIDDEN, VOCAB, bias=False)
        if part is None:
            self.lm_head.weight = self.transformer.wte.weight
        for name, p in sorted(self.named_parameters()):
            one = "ln_" in name and name.endswith("weight")
            p.data = 0.15 * torch.randn(p.shape, generator=generator) + one
        for name in {None: [], 0: ["ln_f"], 1: ["wte", "wpe", "drop"]}[part]:
            del self.transformer[name]
        for number in {None: [], 0: [2], 1: [0, 1]}[part]:
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


def divided(model, words, ranks):
    """The model on the ranks."""
    if "ddp" in words:
        return nn.parallel.DistributedDataParallel(model)
    if "fsdp" in words:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if "mixed" in words else (
            MixedPrecisionPolicy())
        for part in (*model.transformer.h.values(), model):
            fully_shard(part, mp_policy=policy)
    if "tp" in words:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                                       parallelize_module)
        mesh = init_device_mesh("cpu", (ranks,))
        for block in model.transformer.h.values():
            parallelize_module(block, mesh, {"mlp.c_fc": ColwiseParallel(),
                                             "mlp.c_proj": RowwiseParallel()})
    return model


def step(folder, case):
    """One step of a case."""
    words = case.split("-")
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    dtype = torch.bfloat16 if "bf16" in words else torch.float64 if "f64" in words else (
        torch.float32)
    torch.manual_seed(rank)
    model = Model(words, rank if "pp" in words else None).to(dtype)
    text = torch.randint(0, VOCAB, (BATCH, SEQ + 1), generator=torch.Generator().manual_seed(1))
    x, y = text[:, :-1].contiguous(), text[:, 1:].clone()
    if "uneven" in words:
        y[0, :15], y[1, 3:], y[6, :2] = -100, -100, -100
    replicas = ranks if {"ddp", "fsdp"} & {*words} else 1
    count = (y != -100).sum() if "alltargets" not in words else y.numel()
    cuts = [0, 5, BATCH] if "rows" in words else [BATCH * n // replicas for n in range(
        replicas + 1)]
    if replicas > 1:
        x, y = (a[cuts[rank]:cuts[rank + 1]] for a in (x, y))
    if "means" in words:
        count = (y != -100).sum() * replicas
    model = divided(model, words, ranks)
    narrow = "bfloat16" if {"auto", "mixed"} & {*words} else None
    dump = Dump(f"{folder}/{case}", model, CONFIG | {"tie_word_embeddings": "pp" not in words}, x,
                y, ranks={"data" if replicas > 1 else "tensor": ranks},
                batch_group=dist.group.WORLD if replicas > 1 else None,
                **({"dtype": narrow} if narrow else {}))

    def mean(logits, targets):
        logits = logits if "nocast" in words or dtype == torch.float64 else logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum") / count
    if "pp" in words:
        losses = pipeline_step(model, rank, ranks, x, y, mean)
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
    dump.after_backward(loss.to(dtype if "nocast" in words or dtype != torch.bfloat16
                                else torch.float32))
    norm = clip(model, {"tp", "pp"} & {*words})
    settings = SGD if "sgd" in words else ADAMW
    optimizer = torch.optim.SGD(model.parameters(), **SGD) if "sgd" in words else (
        torch.optim.AdamW(model.parameters(), foreach=False, **ADAMW))
    if "nostep" not in words:
        optimizer.step()
    dump.after_step({"name": "sgd" if "sgd" in words else "adamw", "clip": 1.0, **settings}, norm)


def pipeline_step(model, rank, ranks, x, y, mean):
    """Forward and backward of two stages with four micro-batches."""
    from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
    rows = BATCH // 4
    middle = torch.zeros(rows, SEQ, HIDDEN, requires_grad=True)
    ends = (x[:rows],), torch.zeros(rows, SEQ, VOCAB)    # without them it would compute once more
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
    if "ln_f" not in model.transformer or "wte" not in model.transformer:
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
