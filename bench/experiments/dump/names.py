"""Translate names of tensors of other programs into those of Hugging Face.

A rule is a pattern, in which {} is a number, the name that it stands for, and how the tensor's
elements are arranged there:

- "transposed": the first two dimensions are in the opposite order,
- "heads": queries, keys and values of each head are neighbours, as in Megatron-Core's GPT,
- "pairs": rotary embeddings turn neighbours, and not the two halves of a head, as in torchtitan,
- "experts": the first dimension counts experts, for which the name has [],
- "groups": queries, a key and a value of each group are neighbours, as in Megatron-Core.

A rule may have several names: their rows are one after another in the tensor.
"""

import json
import re
from dataclasses import dataclass
from typing import Any, Iterator, Mapping

import numpy as np

from bench.errors import UsageError
from bench.text_files import read_text, read_toml

ARRANGEMENTS = ("transposed", "heads", "pairs", "experts", "groups")
# What wrappers of PyTorch put into names.
WRAPPERS = re.compile(r"(?:^|(?<=\.))(?:module|_orig_mod|_fsdp_wrapped_module|"
                      r"_checkpoint_wrapped_module)\.")
# nanoGPT's names are GPT-2's; its linear layers are those of PyTorch, (out, in).
NANOGPT = {f"transformer.h.{{}}.{part}.weight": (f"transformer.h.{{}}.{part}.weight", "transposed")
           for part in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")}
MEGATRON = {
    "embedding.word_embeddings.weight": "transformer.wte.weight",
    "embedding.position_embeddings.weight": "transformer.wpe.weight",
    "embedding": ("transformer.drop", "transposed"),
    "decoder.layers.{}": ("transformer.h.{}", "transposed"),
    "decoder.final_layernorm": ("transformer.ln_f", "transposed"),
    "output_layer": ("lm_head", "transposed"), "output_layer.weight": "lm_head.weight",
    **{f"decoder.{there}.{what}": f"transformer.{here}.{what}" for what in ("weight", "bias")
       for there, here in {
           "layers.{}.input_layernorm": "h.{}.ln_1", "layers.{}.pre_mlp_layernorm": "h.{}.ln_2",
           "final_layernorm": "ln_f"}.items()},
    **{f"decoder.layers.{{}}.{there}.layer_norm_{what}": f"transformer.h.{{}}.{here}.{what}"
       for what in ("weight", "bias") for there, here in {
           "self_attention.linear_qkv": "ln_1", "mlp.linear_fc1": "ln_2"}.items()},
    **{f"decoder.layers.{{}}.{there}.{what}": (f"transformer.h.{{}}.{here}.{what}", how[index])
       for index, what in enumerate(("weight", "bias")) for there, here, how in (
           ("self_attention.linear_qkv", "attn.c_attn", ("heads transposed", "heads")),
           ("self_attention.linear_proj", "attn.c_proj", ("transposed", "")),
           ("mlp.linear_fc1", "mlp.c_fc", ("transposed", "")),
           ("mlp.linear_fc2", "mlp.c_proj", ("transposed", "")))}}
MEGATRON_LLAMA = {    # also of Mistral and Qwen 2
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "embedding": ("model.embed_tokens", "transposed"),
    "decoder.layers.{}": ("model.layers.{}", "transposed"),
    "decoder.final_layernorm": ("model.norm", "transposed"),
    "decoder.final_layernorm.weight": "model.norm.weight",
    "output_layer": ("lm_head", "transposed"), "output_layer.weight": "lm_head.weight",
    **{f"decoder.layers.{{}}.{there}": (" ".join(f"model.layers.{{}}.{one}" for one in here), how)
       for there, here, how in (
           *((f"self_attention.linear_qkv.{what}", [f"self_attn.{one}_proj.{what}" for one in (
               "q", "k", "v")], "groups") for what in ("weight", "bias")),
           ("self_attention.linear_proj.weight", ["self_attn.o_proj.weight"], ""),
           ("mlp.linear_fc1.weight", ["mlp.gate_proj.weight", "mlp.up_proj.weight"], ""),
           ("mlp.linear_fc2.weight", ["mlp.down_proj.weight"], ""),
           *((one, [f"{norm}.weight"], "") for norm, names in (
               ("input_layernorm", ("input_layernorm.weight",
                                    "self_attention.linear_qkv.layer_norm_weight")),
               ("post_attention_layernorm", ("pre_mlp_layernorm.weight",
                                             "mlp.linear_fc1.layer_norm_weight")))
             for one in names))}}
TORCHTITAN = {
    "tok_embeddings": "model.embed_tokens", "layers.{}": "model.layers.{}",
    "norm": "model.norm", "output": "lm_head",
    "tok_embeddings.weight": "model.embed_tokens.weight", "norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
    **{f"layers.{{}}.{there}.weight": (f"model.layers.{{}}.{here}.weight", how)
       for there, here, how in (
           ("attention.wq", "self_attn.q_proj", "pairs"),
           ("attention.wk", "self_attn.k_proj", "pairs"),
           ("attention.wv", "self_attn.v_proj", ""), ("attention.wo", "self_attn.o_proj", ""),
           ("feed_forward.w1", "mlp.gate_proj", ""), ("feed_forward.w2", "mlp.down_proj", ""),
           ("feed_forward.w3", "mlp.up_proj", ""), ("attention_norm", "input_layernorm", ""),
           ("ffn_norm", "post_attention_layernorm", ""))}}
EXPERT = "model.layers.{}.block_sparse_moe.experts.[]"
TRANSFORMERS = {    # version 5, while it runs; its files have Mixtral's own names
    "model.layers.{}.mlp.gate.weight": "model.layers.{}.block_sparse_moe.gate.weight",
    "model.layers.{}.mlp.experts.gate_up_proj": (f"{EXPERT}.w1.weight {EXPERT}.w3.weight",
                                                 "experts"),
    "model.layers.{}.mlp.experts.down_proj": (f"{EXPERT}.w2.weight", "experts")}
TABLES: dict[str, Mapping[str, Any]] = {
    "huggingface": {}, "transformers": TRANSFORMERS, "nanogpt": NANOGPT,
    "megatron-core": MEGATRON, "torchtitan": TORCHTITAN}
LLAMA_TABLES = {"megatron-core": MEGATRON_LLAMA}


@dataclass(frozen=True)
class NameRule:
    """State what a pattern of whole names, with a group for each number, stands for.

    The name has {} for each number, and may be several; for the arrangement see the module.
    """

    pattern: re.Pattern[str]
    name: str
    arranged: tuple[str, ...]


def find_rules(names: str, family: str = "gpt2") -> list[NameRule]:
    """Return the rules of a table of this module for a family, or of a file in TOML or JSON.

    Raises UsageError when there is neither, or a rule makes no sense.
    """
    if names in TABLES:
        table = TABLES[names] if family == "gpt2" else LLAMA_TABLES.get(names, TABLES[names])
        return [_rule(names, *one) for one in table.items()]
    text = read_text(names, f"--names {names}", f"a table, {', '.join(TABLES)}, or a file of TOML "
                                                f"or JSON,")
    try:
        found = json.loads(text) if names.endswith(".json") else read_toml(text)
        return [_rule(names, *one) for one in found.items()]
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise error if isinstance(error, UsageError) else UsageError(
            f"--names {names} is no object of names in TOML or JSON: {error}") from error


def _rule(source: str, pattern: str, meaning: Any) -> NameRule:
    """Return a rule; `meaning` is a name, or a name and an arrangement."""
    name, arranged = (meaning, "") if isinstance(meaning, str) else meaning
    how = tuple(arranged.split())
    counts = {one.count("{}") for one in name.split() or [name]}
    if counts != {pattern.count("{}")} or not {*how} <= {*ARRANGEMENTS}:
        raise UsageError(f"--names {source}: {pattern!r} = {meaning!r}: as many {{}} on both "
                         f"sides would do, and {', '.join(ARRANGEMENTS)} as arrangements")
    return NameRule(re.compile(r"(\d+)".join(map(re.escape, pattern.split("{}")))), name, how)


def translate(name: str, a: np.ndarray, rules: list[NameRule], sizes: tuple[int, int],
              shapes: Mapping[str, tuple[int, ...]] | None = None
              ) -> Iterator[tuple[str, tuple[str, ...], np.ndarray]]:
    """Yield the names that a tensor has in Hugging Face's files, and how each part is arranged.

    `sizes` are the numbers of heads of keys, and of features of each; `shapes` tell how many rows
    each of several names has, which else have equally many.

    Raises ValueError when its shape does not fit.
    """
    name = WRAPPERS.sub("", name)
    for rule in rules:
        if found := rule.pattern.fullmatch(name):
            names = [one.format(*found.groups()) for one in rule.name.split()]
            how = tuple(one for one in rule.arranged if one not in ("experts", "groups"))
            for number, block in enumerate(a) if "experts" in rule.arranged else [(0, a)]:
                if "groups" in rule.arranged:
                    by_head = block.reshape(sizes[0], -1, sizes[1], *block.shape[1:])
                    parts = [one.reshape(-1, *block.shape[1:]) for one in np.split(
                        by_head, [by_head.shape[1] - 2, by_head.shape[1] - 1], axis=1)]
                else:
                    rows = [(shapes or {}).get(one, (0,))[0] for one in names]
                    parts = [block] if len(names) == 1 else np.split(
                        block, np.cumsum(rows)[:-1] if sum(rows) == len(block) else len(names))
                for one, part in zip(names, parts):
                    yield one.replace("[]", str(number)), how, part
            return
    yield name, (), a


def arrange(a: np.ndarray, how: tuple[str, ...], heads: int, head: int) -> np.ndarray:
    """Return a tensor with its elements in the order of Hugging Face's files.

    It is arranged as `how` says, see the module, by `heads` heads of `head` features.

    Raises ValueError when its shape does not fit.
    """
    for one in how:
        if one == "transposed":
            a = np.swapaxes(a, 0, 1)
        elif one == "heads":
            rows = a.reshape(heads, 3, head, *a.shape[1:])
            a = np.swapaxes(rows, 0, 1).reshape(a.shape)
        else:
            rows = a.reshape(-1, head // 2, 2, *a.shape[1:])
            a = np.swapaxes(rows, 1, 2).reshape(a.shape)
    return a
