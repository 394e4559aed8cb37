"""Translate names of tensors of other programs into those of Hugging Face.

A rule is a pattern, in which {} is a number, the name that it stands for, and how the tensor's
elements are arranged there:

- "transposed": the first two dimensions are in the opposite order,
- "heads": queries, keys and values of each head are neighbours, as in Megatron-Core,
- "pairs": rotary embeddings turn neighbours, and not the two halves of a head, as in torchtitan.
"""

import json
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Mapping

import numpy as np

from bench.errors import UsageError

ARRANGEMENTS = ("transposed", "heads", "pairs")
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
TABLES: dict[str, Mapping[str, Any]] = {
    "huggingface": {}, "nanogpt": NANOGPT, "megatron-core": MEGATRON, "torchtitan": TORCHTITAN}


@dataclass(frozen=True)
class Rule:
    """State what a pattern of names stands for.

    Attributes
    ----------
    pattern : re.Pattern
        Of a whole name, with a group for each number.
    name : str
        The name, with {} for each number.
    arranged : tuple of str
        How the elements are arranged, see the module.
    """

    pattern: re.Pattern[str]
    name: str
    arranged: tuple[str, ...]


def find_rules(names: str) -> list[Rule]:
    """Return the rules of a table of this module, or of a file in TOML or JSON.

    Raises
    ------
    UsageError
        When there is neither, or a rule makes no sense.
    """
    if names in TABLES:
        return [_rule(names, *one) for one in TABLES[names].items()]
    path = Path(names)
    if not path.is_file():
        raise UsageError(f"--names {names}: no such file, and no table: {', '.join(TABLES)} "
                         f"would do, or a file of TOML or JSON")
    try:
        text = path.read_text("utf-8")
        found = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
        return [_rule(names, *one) for one in found.items()]
    except (ValueError, AttributeError, TypeError) as error:
        raise error if isinstance(error, UsageError) else UsageError(
            f"--names {names} is no object of names in TOML or JSON: {error}") from error


def _rule(source: str, pattern: str, meaning: Any) -> Rule:
    """Return a rule; `meaning` is a name, or a name and an arrangement."""
    name, arranged = (meaning, "") if isinstance(meaning, str) else meaning
    how = tuple(arranged.split())
    if pattern.count("{}") != name.count("{}") or not {*how} <= {*ARRANGEMENTS}:
        raise UsageError(f"--names {source}: {pattern!r} = {meaning!r}: as many {{}} on both "
                         f"sides would do, and {', '.join(ARRANGEMENTS)} as arrangements")
    return Rule(re.compile(r"(\d+)".join(map(re.escape, pattern.split("{}")))), name, how)


def translate(name: str, rules: list[Rule]) -> tuple[str, tuple[str, ...]]:
    """Return the name that a tensor has in Hugging Face's files, and how it is arranged."""
    name = WRAPPERS.sub("", name)
    for rule in rules:
        if found := rule.pattern.fullmatch(name):
            return rule.name.format(*found.groups()), rule.arranged
    return name, ()


def arrange(a: np.ndarray, how: tuple[str, ...], heads: int, head: int) -> np.ndarray:
    """Return a tensor with its elements in the order of Hugging Face's files.

    Parameters
    ----------
    a : ndarray
        The tensor.
    how : tuple of str
        How it is arranged, see the module.
    heads, head : int
        Number of heads, and features of each.

    Raises
    ------
    ValueError
        When its shape does not fit.
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
