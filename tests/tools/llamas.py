"""Transformers of other architectures, and their definition in plain NumPy."""
import mm3d
from bench.experiments.training.plain_gpt import PlainPart

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


def norm(x, state, name, how):
    return PlainPart(state, "", how).norm(name, x)


def plain_layers(x, state, layers, heads, how, causal=True):
    """The definition of a stack of layers, for any architecture without experts."""
    for n in range(layers):
        x = PlainPart(state, f"layers.{n}.", how).layer(x, heads, causal)
    return x
