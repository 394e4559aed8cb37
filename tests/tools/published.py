"""Models in the format of Hugging Face: files of random numbers, and what they mean in NumPy."""
import json
from pathlib import Path

import numpy as np

# Sizes of which nothing divides, with 3 groups of 2 heads of 4 features.
LLAMA = dict(model_type="llama", num_hidden_layers=2, hidden_size=18, num_attention_heads=6,
             num_key_value_heads=3, head_dim=4, intermediate_size=13, vocab_size=17,
             max_position_embeddings=64, rms_norm_eps=1e-5, rope_theta=100.0, hidden_act="silu",
             tie_word_embeddings=False)
MIXTRAL = LLAMA | dict(model_type="mixtral", num_local_experts=4, num_experts_per_tok=2)
QWEN2 = LLAMA | dict(model_type="qwen2", tie_word_embeddings=True)
QWEN2_MOE = LLAMA | dict(model_type="qwen2_moe", num_experts=5, num_experts_per_tok=3,
                         decoder_sparse_step=2, moe_intermediate_size=7, norm_topk_prob=False,
                         shared_expert_intermediate_size=11)
GPT2 = dict(model_type="gpt2", n_layer=2, n_embd=12, n_head=2, vocab_size=17, n_positions=9)
CONFIGS = {one["model_type"]: one for one in (GPT2, LLAMA, MIXTRAL, QWEN2, QWEN2_MOE)}
BATCH, SEQ = 4, 5
# By ranks: the mesh, and the division.
MESHES = {1: [(dict(scheme="serial"), {})], 2: [(dict(scheme="1d"), {})],
          4: [(dict(scheme="1d"), {}), (dict(scheme="1d-sp"), {}), (dict(scheme="2d"), {}),
              (dict(scheme="3d", grid=(2, 1, 2)), {}), (dict(scheme="3d", grid=(1, 2, 2)), {}),
              (dict(scheme="3d", grid=(2, 1, 1), stages=2), dict(microbatches=2)),
              (dict(scheme="serial", data=4), dict(zero=3)),
              (dict(scheme="1d", data=2), dict(zero=2))],
          8: [(dict(scheme="3d"), {}), (dict(scheme="3d", grid=(1, 2, 1), stages=2, data=2),
                                        dict(zero=1, microbatches=2))]}


def shapes(config) -> dict[str, tuple[int, ...]]:
    """The tensors of a file, as transformers names and shapes them."""
    if config["model_type"] == "gpt2":
        h = config["n_embd"]
        found = {"wte.weight": (config["vocab_size"], h), "wpe.weight": (config["n_positions"], h)}
        for n in range(config["n_layer"]):
            for name, sides in (("attn.c_attn", (h, 3 * h)), ("attn.c_proj", (h, h)),
                                ("mlp.c_fc", (h, 4 * h)), ("mlp.c_proj", (4 * h, h)),
                                ("ln_1", (h,)), ("ln_2", (h,))):
                found[f"h.{n}.{name}.weight"] = sides
                found[f"h.{n}.{name}.bias"] = sides[-1:]
        return {f"transformer.{name}": shape for name, shape in (
            found | {"ln_f.weight": (h,), "ln_f.bias": (h,)}).items()}
    h, inner, head = (config[key] for key in ("hidden_size", "intermediate_size", "head_dim"))
    q, kv = (config[f"num_{key}_heads"] * head for key in ("attention", "key_value"))
    found = {"model.embed_tokens.weight": (config["vocab_size"], h), "model.norm.weight": (h,)}
    if not config["tie_word_embeddings"]:
        found["lm_head.weight"] = (config["vocab_size"], h)
    for n in range(config["num_hidden_layers"]):
        own = {"input_layernorm": (h,), "post_attention_layernorm": (h,),
               "self_attn.q_proj": (q, h), "self_attn.k_proj": (kv, h),
               "self_attn.v_proj": (kv, h), "self_attn.o_proj": (h, q)}
        three = (inner, h), (h, inner), (inner, h)

        def perceptron(name, width):
            return {f"{name}.{one}_proj": (h, width) if one == "down" else (width, h)
                    for one in ("gate", "down", "up")}
        if "num_experts" in config and (n + 1) % config["decoder_sparse_step"] == 0:
            own["mlp.gate"], own["mlp.shared_expert_gate"] = (config["num_experts"], h), (1, h)
            own |= perceptron("mlp.shared_expert", config["shared_expert_intermediate_size"])
            for e in range(config["num_experts"]):
                own |= perceptron(f"mlp.experts.{e}", config["moe_intermediate_size"])
        elif experts := config.get("num_local_experts"):
            own |= {f"block_sparse_moe.experts.{e}.w{k}": three[k - 1]
                    for e in range(experts) for k in (1, 2, 3)}
            own["block_sparse_moe.gate"] = experts, h
        else:
            own |= perceptron("mlp", inner)
        found |= {f"model.layers.{n}.{name}.weight": sides for name, sides in own.items()}
        if config["model_type"].startswith("qwen2"):
            found |= {f"model.layers.{n}.self_attn.{one}_proj.bias": (rows,)
                      for one, rows in (("q", q), ("k", kv), ("v", kv))}
    return found


def tensors(config, dtype="float64") -> dict[str, np.ndarray]:
    """Random numbers for all tensors."""
    rng = np.random.default_rng(0)
    return {name: (0.3 * rng.standard_normal(shape) + 0.5 * (len(shape) == 1)).astype(dtype)
            for name, shape in shapes(config).items()}


def write(folder: Path, config, arrays, **files: list[str]) -> Path:
    """Write a folder; with names of tensors by file, several files with an index."""
    from safetensors.numpy import save_file
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    if not files:
        save_file(arrays, folder / "model.safetensors")
        return folder
    for file, names in files.items():
        save_file({name: arrays[name] for name in names}, folder / f"{file}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {
        name: f"{file}.safetensors" for file, names in files.items() for name in names}}))
    return folder


def plain_logits(config, p, tokens) -> np.ndarray:
    """The logits of a Llama or one of its relatives, from the tensors as they are named there."""
    head, heads = config["head_dim"], config["num_attention_heads"]
    group, seq = heads // config["num_key_value_heads"], tokens.shape[1]

    def norm(x, name):
        return p[name] * x / np.sqrt((x * x).mean(-1, keepdims=True) + config["rms_norm_eps"])

    def linear(x, name):
        return x @ p[f"{name}.weight"].T + p.get(f"{name}.bias", 0)

    def rotate(a):    # (heads, seq, head), the halves of a head as real and imaginary parts
        angle = np.outer(np.arange(seq), config["rope_theta"] ** (-np.arange(0, head, 2) / head))
        turned = (a[..., :head // 2] + 1j * a[..., head // 2:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], -1)

    def perceptron(x, names):
        gate = linear(x, names[0])
        return linear(gate / (1 + np.exp(-gate)) * linear(x, names[1]), names[2])

    def experts(x, name, parts, of_all=False):
        logits = linear(x, f"{name}.gate")
        out = np.zeros_like(x)
        for row, scores in np.ndenumerate(np.empty(x.shape[:-1])):
            best = np.argsort(-logits[row])[:config["num_experts_per_tok"]]
            share = np.exp(logits[row]) / np.exp(logits[row][... if of_all else best]).sum()
            for e in best:
                out[row] += share[e] * perceptron(x[row], [f"{name}.experts.{e}.{one}"
                                                           for one in parts])
        return out

    x = p["model.embed_tokens.weight"][tokens]
    hidden = np.triu(np.full((seq, seq), -np.inf), 1)
    for n in range(config["num_hidden_layers"]):
        name = f"model.layers.{n}"
        z = norm(x, f"{name}.input_layernorm.weight")
        q, k, v = (linear(z, f"{name}.self_attn.{one}_proj").reshape(
            len(tokens), seq, -1, head).swapaxes(1, 2) for one in "qkv")
        q, k, v = rotate(q), rotate(k).repeat(group, 1), v.repeat(group, 1)
        scores = np.exp(q @ k.swapaxes(-1, -2) / np.sqrt(head) + hidden)
        mixed = (scores / scores.sum(-1, keepdims=True) @ v).swapaxes(1, 2)
        x = x + linear(mixed.reshape(len(tokens), seq, -1), f"{name}.self_attn.o_proj")
        z = norm(x, f"{name}.post_attention_layernorm.weight")
        three = [f"{one}_proj" for one in ("gate", "up", "down")]
        if "num_local_experts" in config:
            x = x + experts(z, f"{name}.block_sparse_moe", ("w1", "w3", "w2"))
        elif f"{name}.mlp.shared_expert_gate.weight" in p:
            shared = perceptron(z, [f"{name}.mlp.shared_expert.{one}" for one in three])
            x = x + experts(z, f"{name}.mlp", three, not config["norm_topk_prob"]) + shared / (
                1 + np.exp(-linear(z, f"{name}.mlp.shared_expert_gate")))
        else:
            x = x + perceptron(z, [f"{name}.mlp.{one}" for one in three])
    table = "lm_head" if "lm_head.weight" in p else "model.embed_tokens"
    return linear(norm(x, "model.norm.weight"), table)


def plain_loss(logits, targets) -> float:
    """The mean cross entropy of the targets that are not -1."""
    terms = np.log(np.exp(logits).sum(-1)) - np.take_along_axis(
        logits, targets[..., None], -1)[..., 0]
    return terms[targets >= 0].mean()


def logits_of(model, tokens) -> tuple[np.ndarray, np.ndarray]:
    """The logits that a GPT computes on the ranks of its last stage, and the rows they are of."""
    ends, rows, found = model.chains[-1], model.pipeline.rows, []

    def inputs(micro):
        return ends.embedding.forward(tokens[rows[micro]])[0]

    def output(micro, y):
        block = ends.output.head.forward(ends.output.norm.forward(y)[0])[0]
        space, (batch, seq, _) = model.chunks[-1].inner, model.chunks[-1].shape
        found.append((micro, space.layout().unshard(block, space.grid,
                                                    (batch, seq, model.vocab))))
    model.pipeline.forward(inputs, output)
    own = np.arange(len(tokens))
    return (np.concatenate([own[rows[micro]] for micro, _ in found] or [own[:0]]),
            np.concatenate([one for _, one in found] or [np.empty((0, 0, 0))]))


def differences(model, expected_logits, loss, data, gradients=None) -> list[str]:
    """How a GPT's logits, loss and gradients differ by more than 1e-12 from those expected.

    Logits are compared with the largest one, gradients with their norms.
    """
    wrong = []
    rows, found = logits_of(model, data[0])
    if len(rows) and np.abs(found - expected_logits[rows]).max() > 1e-12 * np.abs(
            expected_logits).max():
        wrong.append("logits")
    if abs(model.step(*data) / loss - 1) > 1e-12:
        wrong.append("loss")
    if gradients is not None:
        own = model.gradients()
        wrong += [name for name in own.keys() | gradients.keys() if not np.linalg.norm(
            own[name] - gradients[name]) <= 1e-12 * np.linalg.norm(gradients[name])]
    return wrong
