"""Train a model of the library transformers: the steps of `learn.py`, which starts this program.

It needs torch, transformers and safetensors, and nothing else.  The folder in its argument has the
``model``, ``batches.npy`` and ``adamw.json``; it gets ``losses.json``.
"""

import json
import sys
from pathlib import Path

import numpy as np
import torch
import transformers


def main(folder: Path) -> None:
    """Train in float64, norms, angles and softmax too, which transformers computes in float32."""
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    how = json.loads((folder / "adamw.json").read_text("utf-8"))
    clip = how.pop("clip")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "model", dtype=torch.float64, attn_implementation="eager").train()
    optimizer = torch.optim.AdamW(model.parameters(), **how)
    losses = []
    for rows in torch.from_numpy(np.load(folder / "batches.npy")):
        optimizer.zero_grad()
        logits = model(rows[:, :-1], use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        losses.append(loss.item())
    (folder / "losses.json").write_text(json.dumps(losses), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
