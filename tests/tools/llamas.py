"""Transformers of other architectures, and their definition in plain NumPy."""
import numpy as np

import mm3d

# Sizes of which nothing divides: 3 heads of keys, each of 2 heads of queries, of 6 features.
SIZES = dict(layers=2, hidden=10, heads=6, batch=3, seq=7)
LLAMA = dict(norm="rms", epsilon=1e-6, positions="rotary", rotary_base=500.0, kv_heads=3, head=6,
             rotary_scaling=(8.0, 1.0, 4.0, 40), perceptron="swiglu", inner=13, biases="none")
# Each differs from Llama in some fields: Qwen 2, Mistral, and what nobody uses but all may.
ARCHITECTURES = {
    "llama": LLAMA,
    "qwen": LLAMA | dict(biases="qkv", rotary_scaling=None, kv_heads=1),
    "window": LLAMA | dict(window=3, kv_heads=None, head=4, inner=None),
    "biases": LLAMA | dict(biases="all", norm="layer"),
    "gelu": dict(kv_heads=2, head=3, perceptron="gelu", inner=9, biases="none"),
    "rms": dict(norm="rms", head=4)}


def architecture(name: str) -> mm3d.Architecture:
    return mm3d.Architecture(**ARCHITECTURES[name])


def norm(x, p, name, how):
    if how.norm == "rms":
        return p[f"{name}.weight"] * x / np.sqrt((x ** 2).mean(-1, keepdims=True) + how.epsilon)
    mean = x.mean(-1, keepdims=True)
    return p[f"{name}.weight"] * (x - mean) / np.sqrt(
        x.var(-1, keepdims=True) + how.epsilon) + p[f"{name}.bias"]


def rotated(a, how):
    """Rotate (batch, seq, heads, features), as complex numbers."""
    d = a.shape[-1]
    speed = how.rotary_base ** (-2 * np.arange(d // 2) / d)
    if how.rotary_scaling:
        factor, low, high, original = how.rotary_scaling
        for i, one in enumerate(speed):
            length = 2 * np.pi / one
            if length > original / low:
                speed[i] = one / factor
            elif length >= original / high:
                smooth = (original / length - low) / (high - low)
                speed[i] = (1 - smooth) * one / factor + smooth * one
    turned = (a[..., :d // 2] + 1j * a[..., d // 2:]) * np.exp(
        1j * np.arange(a.shape[1])[:, None, None] * speed)
    return np.concatenate([turned.real, turned.imag], -1)


def linear(x, p, name):
    """x W + b; the dimensions of W after the first are joined."""
    weight = p[f"{name}.weight"]
    return x @ weight.reshape(len(weight), -1) + p.get(f"{name}.bias", np.zeros(1)).reshape(-1)


def perceptron(z, p, how, names=("mlp.up", "mlp.down")):
    u = linear(z, p, names[0])
    if how.perceptron == "swiglu":
        gate, u = np.split(u, 2, -1)
        u = u * gate / (1 + np.exp(-gate))
    else:
        u = u / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (u + 0.044715 * u ** 3)))
    return linear(u, p, names[1])


def attended(z, p, heads, head, how, causal):
    """Attention, with every head of queries and its own copy of keys and values."""
    (batch, seq, _), kv = z.shape, how.kv_heads or heads
    parts = linear(z, p, "attention.qkv").reshape(batch, seq, heads // kv + 2, kv, head)
    q = parts[:, :, :-2].swapaxes(2, 3).reshape(batch, seq, heads, head)
    k, v = (np.repeat(parts[:, :, n], heads // kv, axis=2) for n in (-2, -1))
    if how.positions == "rotary":
        q, k = rotated(q, how), rotated(k, how)
    back = np.arange(seq)[:, None] - np.arange(seq)
    hidden = (back < 0) | (back >= (how.window or seq)) if causal else back > seq
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(head)
    scores = np.exp(np.where(hidden, -np.inf, scores))
    scores /= scores.sum(-1, keepdims=True)
    mixed = np.einsum("bhqk,bkhd->bqhd", scores, v).reshape(batch, seq, heads * head)
    return linear(mixed, p, "attention.proj")


def plain_layers(x, state, layers, heads, how, causal=True):
    """The definition of a stack of layers, for any architecture without experts."""
    head = how.head or x.shape[-1] // heads
    for n in range(layers):
        p = {name.removeprefix(f"layers.{n}."): a for name, a in state.items()}
        x = x + attended(norm(x, p, "ln1", how), p, heads, head, how, causal)
        x = x + perceptron(norm(x, p, "ln2", how), p, how)
    return x
