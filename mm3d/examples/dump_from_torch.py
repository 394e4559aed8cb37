"""Dump one training step of any PyTorch program, for ``python -m bench judge``.

Copy this file into the program.  It needs torch, the package safetensors and nothing else.
Every rank calls it; rank 0 writes.

>>> dump = Dump("step-tp8", model, config, tokens, targets, ranks={"tensor": 8})
>>> loss = compute_loss(model(tokens), targets)    # the program's own step
>>> loss.backward()
>>> dump.after_backward(loss)                      # of the whole batch; before clipping
>>> norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
>>> optimizer.step()
>>> dump.after_step({"name": "adamw", "lr": 3e-4, "clip": 1.0}, norm)

`config` are the keys of a config.json of Hugging Face: ``model.config.to_diff_dict()`` of
transformers, or as for nanoGPT: model_type "gpt2", n_layer, n_head, n_embd, vocab_size,
n_positions, and activation_function "gelu" for ``nn.GELU()``.  The step has to be the first of its
optimizer.  Ranks that have different sequences, of DDP or FSDP, say so::

    Dump("step-ddp", model, config, tokens, targets, ranks={"data": 2},
         batch_group=dist.group.WORLD)
"""

import json
import re
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|"
                      r"_checkpoint_wrapped_module)\.")
# The modules whose outputs are dumped: borders of layers of GPT-2, Llama, Megatron-Core and
# torchtitan.
BORDERS = re.compile(r"(?:(?:transformer|model|decoder)\.)?(?:drop|(?:h|layers)\.\d+|ln_f|norm|"
                     r"lm_head|output|output_layer|embed_tokens|tok_embeddings|embedding|"
                     r"final_layernorm)")
DROPOUTS = re.compile(r"(?:transformer\.)?(?:drop|h\.\d+\.(?:attn\.resid_dropout|mlp\.dropout))")


class Dump:
    r"""Keep the tensors of the next step of a model, and write them.

    Parameters
    ----------
    folder : str
        The folder, which rank 0 makes.
    model : torch.nn.Module
        The model, or this rank's part of it.
    config : dict
        The keys of Hugging Face's config.json, of the whole model.
    tokens, targets : torch.Tensor
        The batch, (batch, seq); with `batch_group` this rank's sequences.
    batch_group : ProcessGroup, optional
        The ranks that have different sequences, in the order of the batch; `dist.group.WORLD` for
        all.
    **about
        ignored: the target that does not count, -100.  dtype: the type of computation, such as
        "bfloat16" under autocast; by default that of weights.  ranks: among how many ranks what is
        divided, such as {"data": 2}: data, tensor, sequence, stages.  borders: a regular
        expression of the modules whose outputs are dumped, for names of your own:
        r"blocks\.\d+|norm|head".
    """

    def __init__(self, folder: str, model: torch.nn.Module, config: dict[str, Any],
                 tokens: torch.Tensor, targets: torch.Tensor, *, batch_group: Any = None,
                 **about: Any) -> None:
        self.folder, self.model, self.group = Path(folder), model, batch_group
        self.sequences = len(tokens)
        self.lead = not dist.is_initialized() or dist.get_rank() == 0
        if about.keys() - {"ignored", "dtype", "ranks", "borders"}:
            raise TypeError(f"{', '.join(about)}: ignored, dtype, ranks and borders would do")
        self.borders = re.compile(about.pop("borders", BORDERS))
        self.about: dict[str, Any] = {"ignored": -100, **about, "unseen": []}
        self.outputs: dict[str, list] = {}
        self.gradients: dict[str, dict[int, torch.Tensor]] = {}
        self.masks: dict[str, list] = {}
        self.states: dict[str, list[torch.Tensor]] = {}    # of generators, before dropout
        if self.lead:
            self.folder.mkdir(parents=True)
            (self.folder / "config.json").write_text(json.dumps(config, indent=2),
                                                     encoding="utf-8")
        self._save("weights", self._parameters(lambda p: p))
        self._save("batch", {"tokens": self._rows(tokens), "targets": self._rows(targets)})
        self.hooks = [module.register_forward_pre_hook(self._remember(_plain(name)))
                      for name, module in model.named_modules()
                      if isinstance(module, torch.nn.Dropout) and DROPOUTS.fullmatch(_plain(name))]
        self.hooks += [module.register_forward_hook(self._keep(_plain(name), module))
                       for name, module in model.named_modules()
                       if self.borders.fullmatch(_plain(name))
                       or DROPOUTS.fullmatch(_plain(name))]
        if not self.hooks:
            self._unseen("activations: no module has the name of a layer's border, see borders")
        if any(isinstance(module, torch.nn.Dropout) and module.p and model.training
               and not DROPOUTS.fullmatch(_plain(name))
               for name, module in model.named_modules()):
            self._unseen("masks of dropout elsewhere than in GPT-2's residual branches")

    def after_backward(self, loss: torch.Tensor | float) -> None:
        """Write the gradients and activations; call it before anything changes the gradients.

        `loss` is what the program reports: of the whole batch.
        """
        for hook in self.hooks:
            hook.remove()
        self.loss = torch.as_tensor(loss).detach()
        without = [_plain(name) for name, p in self.model.named_parameters() if p.grad is None]
        if without:
            self._unseen(f"gradients that are None: {', '.join(without)}")
        self._save("gradients", self._parameters(lambda p: p.grad))
        for kept in (self.outputs, self.masks):
            for name in [*kept]:
                if self.sequences not in torch.cat(kept[name]).shape[:2]:
                    self._unseen(f"{name}, which was computed another time, not of this batch")
                    del kept[name]
                    self.gradients.pop(name, None)
        self._save("activations", {name: self._rows(torch.cat(parts))
                                   for name, parts in self.outputs.items()})
        if self.masks:
            self._save("masks", {name: self._rows(torch.cat(parts))
                                 for name, parts in self.masks.items()})
        if self.group is None and self.gradients:
            self._save("activation_gradients", {name: torch.cat([
                parts[n] for n in sorted(parts)]) for name, parts in self.gradients.items()})
        else:
            self._unseen("gradients of activations: each rank has those of its own mean")

    def after_step(self, optimizer: dict[str, Any] | None = None,
                   norm: torch.Tensor | float | None = None) -> None:
        """Write the norm before clipping, and the weights; call it after the optimizer's step.

        `optimizer` has the keys name (adamw or sgd), lr, betas, eps, weight_decay, momentum, clip,
        decayed ("all" or "matrices"); without it the weights afterwards are not written.
        """
        scalars = {"loss": _whole(self.loss)}
        if norm is not None:
            scalars["norm"] = _whole(torch.as_tensor(norm))
        self._save("scalars", scalars)
        if optimizer is not None:
            self.about["optimizer"] = optimizer
            self._save("weights_after", self._parameters(lambda p: p))
        if self.lead:
            (self.folder / "dump.json").write_text(json.dumps(self.about, indent=2),
                                                   encoding="utf-8")

    def _parameters(self, of: Any) -> dict[str, torch.Tensor]:
        """Return something of each parameter, whole; every rank takes part in gathering it."""
        return {_plain(name): _whole(of(p)) for name, p in self.model.named_parameters()
                if of(p) is not None}

    def _keep(self, name: str, module: torch.nn.Module) -> Any:
        """Return a hook that keeps a module's output, and the gradient of it."""
        def hook(_: Any, inputs: Any, output: Any) -> None:
            if torch._C._current_graph_task_id() != -1:    # recomputed, in backward
                return
            output = output[0] if isinstance(output, tuple) else output
            if isinstance(module, torch.nn.Dropout) and module.p and module.training:
                self.about["dropout"] = module.p
                self.masks.setdefault(name, []).append(self._mask(name, inputs[0], module.p))
            if not self.borders.fullmatch(name):
                return
            parts = self.outputs.setdefault(name, [])
            number = len(parts)
            parts.append(_whole(output))
            if output.requires_grad:
                output.register_hook(lambda gradient: self.gradients.setdefault(
                    name, {}).__setitem__(number, _whole(gradient)))
        return hook

    def _remember(self, name: str) -> Any:
        """Return a hook that keeps the states of the generators."""
        def hook(_: Any, inputs: Any) -> None:
            if torch._C._current_graph_task_id() == -1:
                self.states[name] = [torch.get_rng_state()] + (
                    [torch.cuda.get_rng_state(inputs[0].device)] if inputs[0].is_cuda else [])
        return hook

    def _mask(self, name: str, x: torch.Tensor, p: float) -> torch.Tensor:
        """Return what dropout keeps, drawn again: what it puts out is 0 also where `x` is."""
        host, *device = self.states[name]
        with torch.random.fork_rng([x.device] if device else []), torch.no_grad():
            torch.set_rng_state(host)
            if device:
                torch.cuda.set_rng_state(*device, x.device)
            return _whole(torch.nn.functional.dropout(torch.ones_like(x), p)) != 0

    def _rows(self, a: torch.Tensor) -> torch.Tensor:
        """Return the rows of all ranks that have different sequences, also different numbers."""
        a = _whole(a)
        if self.group is None:
            return a
        parts: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(parts, a, group=self.group)
        return torch.cat(parts)

    def _save(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write tensors that any rank has; say which are not the same on all that have them."""
        every = [tensors]
        if dist.is_initialized():
            every = [None] * dist.get_world_size()    # type: ignore[list-item]
            dist.all_gather_object(every, tensors)
        found: dict[str, torch.Tensor] = {}
        for rank, own in enumerate(every):
            for name, a in own.items():
                if name in found and not torch.equal(found[name], a):
                    self._unseen(f"{file}: {name} of rank {rank}, which differs from an earlier "
                                 f"rank's")
                found.setdefault(name, a)
        if self.lead:
            save_file({name: a.contiguous() for name, a in found.items()},
                      self.folder / f"{file}.safetensors")

    def _unseen(self, what: str) -> None:
        """Note what is not in the dump."""
        self.about["unseen"].append(what)


def _plain(name: str) -> str:
    """Return a name without those of wrappers."""
    return WRAPPERS.sub("", name)


def _whole(a: torch.Tensor) -> torch.Tensor:
    """Return a copy of the whole tensor on the host, gathered if it is sharded."""
    a = a.detach()
    a = a.full_tensor() if hasattr(a, "full_tensor") else a
    return a.cpu().clone()
