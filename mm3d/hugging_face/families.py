"""State the families of models whose configurations are known, by the keys of ``config.json``.

The facts are those of the library transformers, whose defaults hold for keys that a file leaves
out.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

# Keys of any family that do not change what a model computes: what files are named after, the
# tokenizer's numbers, generation, initial values, and dropout, which belongs to a training.
NEUTRAL = frozenset((
    "_name_or_path", "architectures", "attention_dropout", "attn_pdrop", "bos_token_id",
    "chunk_size_feed_forward", "dtype", "embd_pdrop", "eos_token_id", "id2label",
    "initializer_range", "label2id", "model_type", "n_ctx", "output_attentions",
    "output_hidden_states", "pad_token_id", "pretraining_tp", "problem_type",
    "reorder_and_upcast_attn", "resid_pdrop", "return_dict", "summary_activation",
    "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "task_specific_params", "torch_dtype", "transformers_version", "use_cache"))
SILU = {"hidden_act": ("silu", "swish")}
DECODER = {"is_encoder_decoder": (False,)}    # of any family


@dataclass(frozen=True)
class Family:
    """State what the keys of a family's configuration mean."""

    name: str    # the class of transformers
    # The keys of the sizes, by field of `mm3d.Model`; "positions" is the longest sequence.
    sizes: Mapping[str, str]
    # Fields of `mm3d.Architecture` that all models of the family have.
    architecture: Mapping[str, Any]
    keys: Mapping[str, str]    # the keys of further fields of it, by field
    defaults: Mapping[str, Any]    # what keys mean that a file leaves out
    # Keys that change what a model computes, with the values that are computed here; the first is
    # also the default.
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    # Whether there are keys of rotary embeddings, and of a window.
    rotary: bool = True
    window: bool = False
    # The keys of experts: how many there are, how many are chosen, whether there is a balance
    # loss, its coefficient, and those of Qwen's alone; () without experts.
    experts: tuple[str, ...] = ()

    @property
    def known(self) -> frozenset[str]:
        """Return the keys that are read or have one value."""
        more = [*self.sizes.values(), *self.keys.values(), *self.only, *DECODER,
                "tie_word_embeddings"]
        more += ROTARY * self.rotary + WINDOW * self.window
        return NEUTRAL | {*more, *self.experts}


ROTARY = ["rope_theta", "rope_scaling", "rope_parameters"]
WINDOW = ["sliding_window", "use_sliding_window", "max_window_layers", "layer_types"]
EXPERTS = ("num_local_experts", "num_experts_per_tok", "output_router_logits",
           "router_aux_loss_coef")
QWEN_EXPERTS = ("num_experts", *EXPERTS[1:], "decoder_sparse_step", "norm_topk_prob",
                "moe_intermediate_size", "shared_expert_intermediate_size")
LLAMA_SIZES = {"layers": "num_hidden_layers", "hidden": "hidden_size",
               "heads": "num_attention_heads", "vocab": "vocab_size",
               "positions": "max_position_embeddings"}
LLAMA_KEYS = {"epsilon": "rms_norm_eps", "kv_heads": "num_key_value_heads", "head": "head_dim",
              "inner": "intermediate_size"}
LLAMA = {"norm": "rms", "positions": "rotary", "perceptron": "swiglu", "biases": "none"}
LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "num_key_value_heads": None, "head_dim": None,
                  "rope_theta": 10000.0, "tie_word_embeddings": False}

FAMILIES = {
    "gpt2": Family(
        "GPT2LMHeadModel",
        {"layers": "n_layer", "hidden": "n_embd", "heads": "n_head", "vocab": "vocab_size",
         "positions": "n_positions"},
        {}, {"epsilon": "layer_norm_epsilon", "inner": "n_inner"},
        {"layer_norm_epsilon": 1e-5, "n_inner": None, "tie_word_embeddings": True},
        {"activation_function": ("gelu_new", "gelu_pytorch_tanh"), "scale_attn_weights": (True,),
         "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
        rotary=False),
    "llama": Family(
        "LlamaForCausalLM", LLAMA_SIZES, LLAMA, LLAMA_KEYS, LLAMA_DEFAULTS,
        SILU | {"attention_bias": (False,), "mlp_bias": (False,)}),
    "mistral": Family(
        "MistralForCausalLM", LLAMA_SIZES, LLAMA, LLAMA_KEYS,
        LLAMA_DEFAULTS | {"num_key_value_heads": 8, "sliding_window": 4096}, SILU, window=True),
    "mixtral": Family(
        "MixtralForCausalLM", LLAMA_SIZES, LLAMA, LLAMA_KEYS,
        LLAMA_DEFAULTS | {
            "rms_norm_eps": 1e-5, "num_key_value_heads": 8, "rope_theta": 1e6,
            "num_local_experts": 8, "num_experts_per_tok": 2, "router_aux_loss_coef": 0.001},
        SILU | {"router_jitter_noise": (0.0,)}, window=True, experts=EXPERTS),
    "qwen2": Family(
        "Qwen2ForCausalLM", LLAMA_SIZES, LLAMA | {"biases": "qkv"}, LLAMA_KEYS,
        LLAMA_DEFAULTS | {
            "num_key_value_heads": 32, "sliding_window": 4096, "use_sliding_window": False,
            "max_window_layers": 28}, SILU, window=True),
    "qwen2_moe": Family(
        "Qwen2MoeForCausalLM", LLAMA_SIZES, LLAMA | {"biases": "qkv"}, LLAMA_KEYS,
        LLAMA_DEFAULTS | {
            "num_key_value_heads": 16, "sliding_window": 4096, "use_sliding_window": False,
            "max_window_layers": 28, "router_aux_loss_coef": 0.001, **dict(zip(
                (*QWEN_EXPERTS[:2], *QWEN_EXPERTS[4:]), (60, 4, 1, False, 1408, 5632)))},
        SILU | {"qkv_bias": (True,), "mlp_only_layers": ([], None)}, window=True,
        experts=QWEN_EXPERTS)}
