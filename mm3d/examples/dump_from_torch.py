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
optimizer.  Ranks that have different sequences, of DDP or FSDP, say so, and ranks whose layers
have parts of the sequences, of sequence or context parallelism, with the whole batch on each::

    Dump("step-ddp", model, config, tokens, targets, ranks={"data": 2},
         batch_group=dist.group.WORLD)
    Dump("step-sp", model, config, tokens, targets, ranks={"tensor": 2, "sequence": 2},
         sequence_group=dist.group.WORLD)
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
        r"blocks\.\d+|norm|head".  sequence_group: the ranks that have parts of the sequences, in
        the order of positions.

    Raises
    ------
    ValueError
        On all ranks, where they have other tokens and no `batch_group`.
    TypeError
        For other names in `about`, and a model in the shards of FSDP 1.
    """

    def __init__(self, folder: str, model: torch.nn.Module, config: dict[str, Any],
                 tokens: torch.Tensor, targets: torch.Tensor, *, batch_group: Any = None,
                 **about: Any) -> None:
        if any(type(one).__name__ == "FullyShardedDataParallel" for one in model.modules()):
            raise TypeError("the shards of FSDP 1 are not gathered: fully_shard would do")
        self.folder, self.model, self.group = Path(folder), model, batch_group
        self.sequences, self.length = tokens.shape
        self.positions_group = about.pop("sequence_group", None)
        self.lead = not dist.is_initialized() or dist.get_rank() == 0
        if unknown := about.keys() - {"ignored", "dtype", "ranks", "borders"}:
            raise TypeError(f"{', '.join(sorted(unknown))}: ignored, dtype, ranks, borders and "
                            f"sequence_group would do")
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
        self.names = [name for name in self._save("weights", self._parameters(lambda p: p))
                      if "@" not in name]
        batch = self._save("batch", {"tokens": self._rows(tokens), "targets": self._rows(
            targets, self.about["ignored"])})
        if len(batch) > 2:
            raise ValueError(f"{[*batch][-1].replace('@', ' of rank ')} are not those of rank 0: "
                             f"batch_group would do, or the whole batch on each rank")
        self.hooks = [module.register_forward_pre_hook(self._remember(_plain(name)))
                      for name, module in model.named_modules()
                      if isinstance(module, torch.nn.Dropout) and DROPOUTS.fullmatch(_plain(name))]
        self.hooks += [module.register_forward_hook(self._keep(_plain(name), module))
                       for name, module in model.named_modules()
                       if self.borders.fullmatch(_plain(name))
                       or DROPOUTS.fullmatch(_plain(name))]
        if not self.hooks:
            self._unseen("activations: no module has the name of a layer's border, see borders")
        self.elsewhere = [module.p for name, module in model.named_modules() if isinstance(
            module, torch.nn.Dropout) and module.p and module.training
            and not DROPOUTS.fullmatch(_plain(name))]
        if self.elsewhere:    # without masks nobody can compute the step again
            self.about["dropout"] = self.elsewhere[0]
            self._unseen("masks of dropout elsewhere than in GPT-2's residual branches")

    def after_backward(self, loss: torch.Tensor | float | None) -> None:
        """Write the gradients and activations; call it before anything changes the gradients.

        `loss` is what the program reports: of the whole batch; None on a rank that has none.
        """
        for hook in self.hooks:
            hook.remove()
        self.loss = None if loss is None else torch.as_tensor(loss).detach()
        found = _merged(self._parameters(lambda p: p.grad))
        self.about["skipped"] = skipped = [name for name in self.names if name not in found]
        # What should have a gradient, and has none on any rank, has lost it.
        self._write("gradients", found | _merged({
            _plain(name): _whole(torch.zeros_like(p)) for name, p in self.model.named_parameters()
            if _plain(name) in skipped and p.requires_grad}))
        outputs, masks, gradients = ({name: self._together(parts) for name, parts in kept.items()}
                                     for kept in (self.outputs, self.masks, {
                                         name: [parts[n] for n in sorted(parts)]
                                         for name, parts in self.gradients.items()}))
        for name, a in {**outputs, **masks}.items():
            if sorted(a.shape[:2]) != sorted((self.sequences, self.length)):
                self._unseen(f"{name}, whose outputs have together the shape {tuple(a.shape)}")
                for kept in (outputs, masks, gradients):
                    kept.pop(name, None)
        self._save("activations", {name: self._rows(a) for name, a in outputs.items()})
        if self.masks and not self.elsewhere:
            self._save("masks", {name: self._rows(a) for name, a in masks.items()})
        if self.group is None and self.gradients:
            self._save("activation_gradients", gradients)
        else:
            self._unseen("gradients of activations: each rank has those of its own mean")

    def after_step(self, optimizer: dict[str, Any] | None = None,
                   norm: torch.Tensor | float | None = None) -> None:
        """Write the norm before clipping, and the weights; call it after the optimizer's step.

        `optimizer` has the keys name (adamw or sgd), lr, betas, eps, weight_decay, momentum, clip,
        decayed ("all", "matrices", or a list of names of weights); what is missing is as PyTorch
        has it.  Without it the weights afterwards are not written.
        """
        scalars = {} if self.loss is None else {"loss": _whole(self.loss)}
        if norm is not None:
            scalars["norm"] = _whole(torch.as_tensor(norm))
        self._save("scalars", scalars)
        if optimizer is not None:
            self.about["optimizer"] = optimizer
            self._save("weights_after", self._parameters(lambda p: p))
        every = _gathered(self.about)
        merged = {key: value for about in every for key, value in about.items()}
        merged["unseen"] = [*dict.fromkeys(one for about in every for one in about["unseen"])]
        if self.lead:
            (self.folder / "dump.json").write_text(json.dumps(merged, indent=2), encoding="utf-8")

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

    def _together(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return what the micro-batches, and all ranks' parts of the sequences, put out."""
        a = torch.cat(parts)
        dim = int(len(a) == self.sequences)
        if self.positions_group is None or a.ndim < 2 or a.shape[dim] == self.length:
            return a
        return torch.cat(_gathered(a, self.positions_group), dim)

    def _rows(self, a: torch.Tensor, fill: int = 0) -> torch.Tensor:
        """Return the rows of all ranks that have different sequences, also different numbers.

        Shorter sequences of a rank are filled up.
        """
        a = _whole(a)
        if self.group is None:
            return a
        parts = _gathered(a, self.group)
        length = max(part.shape[1] for part in parts)
        return torch.cat([torch.nn.functional.pad(part, (0, 0) * (part.ndim - 2) + (
            0, length - part.shape[1]), value=fill) for part in parts])

    def _save(self, file: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Write tensors that any rank has, and return them, see `_merged`."""
        found = _merged(tensors)
        self._write(file, found)
        return found

    def _write(self, file: str, tensors: dict[str, torch.Tensor]) -> None:
        """Write tensors that every rank has."""
        if self.lead:
            save_file({name: a.contiguous() for name, a in tensors.items()},
                      self.folder / f"{file}.safetensors")

    def _unseen(self, what: str) -> None:
        """Note what is not in the dump."""
        self.about["unseen"].append(what)


def _plain(name: str) -> str:
    """Return a name without those of wrappers."""
    return WRAPPERS.sub("", name)


def _gathered(one: Any, group: Any = None) -> list:
    """Return what each rank of a group has."""
    if not dist.is_initialized():
        return [one]
    every: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(every, one, group=group)
    return every


def _merged(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the tensors of all ranks, and as NAME@RANK copies that differ from earlier ones."""
    found: dict[str, torch.Tensor] = {}
    copies: dict[str, list[torch.Tensor]] = {}
    for rank, own in enumerate(_gathered(tensors)):
        for name, a in own.items():
            if not any(torch.equal(a, b) for b in copies.get(name, ())):
                found[f"{name}@{rank}" if name in copies else name] = a
                copies.setdefault(name, []).append(a)
    return found


def _whole(a: torch.Tensor) -> torch.Tensor:
    """Return a copy of the whole tensor on the host, gathered if it is sharded."""
    a = a.detach()
    a = a.full_tensor() if hasattr(a, "full_tensor") else a
    return a.cpu().clone()
