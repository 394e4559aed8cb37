"""Models with experts for tests, and what a plain loop over tokens and experts makes of them."""
import numpy as np

import mm3d
from mm3d.model.experts.layer import ExpertsLayer

SIZES = dict(layers=2, hidden=12, heads=2, batch=3, seq=5, dtype="float64")


def expert_layer(model: mm3d.Transformer, number: int = -1) -> ExpertsLayer:
    """One of the layers of experts of a model without recomputation."""
    return [one for residual in model.layers.layers for one in residual.layers
            if isinstance(one, ExpertsLayer)][number]


def state_of(model: mm3d.Transformer, seed: int = 3) -> dict[str, np.ndarray]:
    """Random global parameters, with routers that send tokens to all experts."""
    rng, state = np.random.default_rng(seed), {}
    for p in model.parameters:
        scale = 1 if "router" in p.name else 0.3
        state[p.name] = (p.name.endswith(("ln1.weight", "ln2.weight"))
                         + scale * rng.standard_normal(p.public_shape))
    return state


def activations(model: mm3d.Transformer, seed: int = 1) -> list[np.ndarray]:
    """A global input, and a global gradient of the output."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal(model.shape) for _ in range(2)]


def step(model: mm3d.Transformer, state=None, seed: int = 1) -> dict[str, np.ndarray]:
    """Global output and gradients of a pass, by name, and the routers' losses."""
    model.load(state or state_of(model))
    model.zero_gradients()
    model.routings.totals.clear()
    x, dy = activations(model, seed)
    y, saved = model.forward(model.shard(x))
    dx = model.backward(model.shard(dy), saved)
    return {"y": model.unshard(y), "dx": model.unshard(dx), **model.gradients(),
            "chosen": np.array([one.chosen for one in model.routings.totals]),
            "dropped": np.array([one.dropped for one in model.routings.totals])}


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x ** 3)))


def looped(tokens: np.ndarray, parameters: dict[str, np.ndarray], experts: mm3d.Experts,
           capacity: int | None) -> tuple[np.ndarray, int]:
    """The output of a layer of experts, token by token; and the number of dropped pairs."""
    logits = tokens @ parameters["router.weight"].T
    chosen = [sorted(range(experts.count), key=lambda e: (-z[e], e))[:experts.top]
              for z in logits]
    order = [(t, n) for t in range(len(tokens)) for n in range(experts.top)]
    if experts.dropping_order == "choice":
        order.sort(key=lambda pair: pair[1])
    y, taken, dropped = np.zeros_like(tokens), [0] * experts.count, 0
    for t, n in order:
        e = chosen[t][n]
        if capacity is not None and taken[e] == capacity:
            dropped += 1
            continue
        taken[e] += 1
        p = np.exp(logits[t] - logits[t].max())
        gate = p[e] / (p.sum() if experts.gate == "switch" else p[chosen[t]].sum())
        up, down = ([one[e] for one in (parameters[f"{name}.weight"], parameters.get(
            f"{name}.bias", np.zeros(experts.count)))] for name in ("up", "down"))
        inner = np.tensordot(tokens[t], up[0], 1) + up[1]
        inner = gelu(inner) if inner.ndim == 1 else inner[0] / (1 + np.exp(-inner[0])) * inner[1]
        y[t] += gate * (inner @ down[0] + down[1])
    return y, dropped
