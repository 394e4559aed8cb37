"""Configurations of Hugging Face: what is read, what is refused, and the way back."""
import json

import pytest

import mm3d
from mm3d.hugging_face.config_file import config_of, model_fields
from mm3d.model.experts.options import ExpertDesign

# As published; what is left out has the defaults of transformers.
GPT2 = dict(model_type="gpt2", n_layer=12, n_embd=768, n_head=12, vocab_size=50257,
            n_positions=1024, n_ctx=1024, layer_norm_epsilon=1e-5, activation_function="gelu_new",
            resid_pdrop=0.1, architectures=["GPT2LMHeadModel"], task_specific_params={"a": 1})
LLAMA = dict(model_type="llama", num_hidden_layers=32, hidden_size=4096, num_attention_heads=32,
             num_key_value_heads=8, intermediate_size=14336, vocab_size=128256,
             max_position_embeddings=131072, rms_norm_eps=1e-5, hidden_act="silu",
             rope_theta=500000.0, attention_bias=False, pretraining_tp=1)
SCALED = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192, "rope_type": "llama3"}
MISTRAL = LLAMA | dict(model_type="mistral", sliding_window=4096, rope_theta=10000.0)
del MISTRAL["attention_bias"]
MIXTRAL = MISTRAL | dict(model_type="mixtral", sliding_window=None, num_local_experts=8,
                         num_experts_per_tok=2, output_router_logits=False, rope_theta=1e6,
                         router_aux_loss_coef=0.02)
QWEN2 = MISTRAL | dict(model_type="qwen2", use_sliding_window=False, sliding_window=131072,
                       max_window_layers=24, tie_word_embeddings=True)
QWEN2_MOE = QWEN2 | dict(model_type="qwen2_moe", num_experts=60, num_experts_per_tok=4,
                         decoder_sparse_step=2, moe_intermediate_size=1408, norm_topk_prob=True,
                         shared_expert_intermediate_size=5632, mlp_only_layers=[], qkv_bias=True)
ALL = (GPT2, LLAMA, LLAMA | {"rope_scaling": SCALED}, MISTRAL, MIXTRAL, QWEN2, QWEN2_MOE,
       QWEN2_MOE | {"norm_topk_prob": False})
DEEPSEEK = LLAMA | dict(model_type="deepseek_v3", q_lora_rank=1536, kv_lora_rank=512)


def read(config, folder, **fields):
    (folder / "config.json").write_text(json.dumps(config))
    return mm3d.model_from_config(folder / "config.json", batch=2, seq=8, **fields)


def test_gpt2(tmp_path):
    assert read(GPT2, tmp_path, seed=3) == mm3d.Model(
        layers=12, hidden=768, heads=12, batch=2, seq=8, vocab=50257, tied=True, seed=3)
    assert mm3d.model_from_config(tmp_path, batch=2, seq=1024).seq == 1024
    with pytest.raises(ValueError, match="seq=1025: the table of positions .* ends at 1024"):
        mm3d.model_from_config(tmp_path, batch=2, seq=1025)


def test_llama_and_its_relatives(tmp_path):
    llama = dict(norm="rms", positions="rotary", perceptron="swiglu", biases="none", inner=14336,
                 kv_heads=8)
    for config, own in (
            (LLAMA, dict(rotary_base=5e5)), (MISTRAL, dict(window=4096)),
            (LLAMA | {"rope_scaling": SCALED},
             dict(rotary_base=5e5, rotary_scaling=(8.0, 1.0, 4.0, 8192))),
            (LLAMA | {"rope_parameters": SCALED | {"rope_theta": 10.0}},
             dict(rotary_base=10.0, rotary_scaling=(8.0, 1.0, 4.0, 8192))),
            (LLAMA | {"head_dim": 64}, dict(rotary_base=5e5, head=64)),
            (LLAMA | {"head_dim": 128}, dict(rotary_base=5e5)),
            (MIXTRAL, dict(rotary_base=1e6)), (QWEN2, dict(biases="qkv")),
            (QWEN2 | dict(use_sliding_window=True, max_window_layers=0, sliding_window=5),
             dict(biases="qkv", window=5)),
            (QWEN2 | dict(use_sliding_window=True, max_window_layers=32), dict(biases="qkv"))):
        found = read(config, tmp_path)
        assert found.architecture == mm3d.Architecture(**llama | own), config
        assert found.tied == (config["model_type"] == "qwen2")
    experts = read(MIXTRAL, tmp_path).experts
    assert experts == mm3d.Experts(8, 2, every=1, capacity=None, gate="mixtral", balance=0.0,
                                   z=0.0, convention="huggingface")
    of_qwen = read(QWEN2_MOE, tmp_path).experts
    assert of_qwen == mm3d.Experts(60, 4, every=2, capacity=None, gate="mixtral", balance=0.0,
                                   z=0.0, convention="huggingface",
                                   design=ExpertDesign(1408, 5632, True))
    assert read(QWEN2_MOE | {"norm_topk_prob": False}, tmp_path).experts.gate == "switch"


@pytest.mark.parametrize("config, named", [
    (DEEPSEEK, ["model_type='deepseek_v3'", "q_lora_rank", "kv_lora_rank", "gpt2, llama"]),
    (LLAMA | dict(hidden_act="gelu", attention_bias=True, quantization_config={}),
     ["hidden_act='gelu'", "attention_bias=True", "quantization_config={}"]),
    (LLAMA | dict(rope_scaling={"type": "linear", "factor": 2.0}), ["rope_type='linear'"]),
    (LLAMA | dict(rope_scaling=SCALED | {"attention_factor": 2.0}), ["attention_factor"]),
    (LLAMA | dict(rope_scaling={"rope_type": "llama3", "factor": 2.0}),
     ["without low_freq_factor", "without high_freq_factor"]),
    (LLAMA | dict(rope_parameters={"rope_type": "default", "partial_rotary_factor": 0.5}),
     ["partial_rotary_factor"]),
    (QWEN2 | dict(use_sliding_window=True), ["max_window_layers=24, so that layers"]),
    (QWEN2 | dict(use_sliding_window=True, max_window_layers="x"), ["layers='x' of 32 layers"]),
    (QWEN2 | dict(use_sliding_window=True, num_hidden_layers="x"), ["layers=24 of 'x' layers"]),
    (QWEN2 | dict(layer_types=["full_attention", "sliding_attention"]), ["layer_types"]),
    (QWEN2 | dict(layer_types=["chunked_attention"]), ["chunked_attention"]),
    (QWEN2 | dict(layer_types=5), ["layer_types=5"]),
    (LLAMA | dict(rope_scaling="linear", tie_word_embeddings="no"),
     ["rope_scaling='linear' (an object", "tie_word_embeddings='no' (true or false"]),
    (QWEN2_MOE | dict(use_sliding_window="no", norm_topk_prob="false", output_router_logits=2),
     ["use_sliding_window='no' (true", "norm_topk_prob='false' (true", "output_router_logits=2 "]),
    (MIXTRAL | dict(router_jitter_noise=0.1), ["router_jitter_noise=0.1"]),
    (QWEN2_MOE | dict(mlp_only_layers=[0], qkv_bias=False), ["mlp_only_layers=[0]", "qkv_bias"]),
    (LLAMA | dict(return_dict=True, output_attentions=False, is_encoder_decoder=True),
     ["computes: is_encoder_decoder=True"]),
    (GPT2 | dict(activation_function="relu", scale_attn_by_inverse_layer_idx=True),
     ["activation_function='relu'", "scale_attn_by_inverse_layer_idx=True"]),
    ({}, ["model_type=None"])], ids=str)
def test_what_nothing_computes_is_named_in_one_line(config, named):
    with pytest.raises(ValueError, match="nothing here computes") as error:
        model_fields(config)
    assert [word for word in named if word not in str(error.value)] == []
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("change, said", [
    ({"hidden_size": None}, "hidden_size"), ({"vocab_size": "many"}, "vocab_size"),
    ({"num_hidden_layers": 0}, "num_hidden_layers"), ({"hidden_size": True}, "hidden_size"),
    ({"intermediate_size": None}, "intermediate_size"), ({"head_dim": {}}, "head"),
    ({"rms_norm_eps": "x"}, "epsilon"), ({"rope_theta": -1}, "base"),
    ({"num_experts_per_tok": 9}, "top"), ({"router_aux_loss_coef": "x"}, "balance")])
def test_numbers_that_are_none(change, said):
    with pytest.raises(ValueError, match=f"{said}=.* (should be a (whole )?number|at most)"):
        model_fields(MIXTRAL | {"output_router_logits": True} | change)


def test_experts_that_no_layer_has():
    with pytest.raises(ValueError, match="every=2 layers are in none of layers=1"):
        model_fields(QWEN2_MOE | {"num_hidden_layers": 1, "sliding_window": None})


def test_files_that_are_no_configuration(tmp_path):
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match=f"^{path}.* is not there: give a config.json"):
            mm3d.model_from_config(path, batch=1, seq=1)
    for text, said in (("{", "no JSON"), ("[]", "no configuration"), ("[" * 99999, "no JSON")):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ValueError, match=said):
            mm3d.model_from_config(tmp_path, batch=1, seq=1)


@pytest.mark.parametrize("config", ALL, ids=lambda config: config["model_type"])
def test_the_way_back(config, tmp_path):
    found = read(config, tmp_path)
    back = config_of(found)
    assert back["model_type"] in (config["model_type"], "llama")
    assert read(back, tmp_path) == found


def test_no_family_has_it():
    model = mm3d.Model(2, 8, 2, 1, 4, architecture=mm3d.Architecture(norm="rms"))
    with pytest.raises(ValueError, match="no family of Hugging Face has .*'norm': 'rms'"):
        config_of(model)
