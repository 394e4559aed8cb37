"""Models with experts for tests."""
import numpy as np

import mm3d
from mm3d.model.experts.layer import ExpertsLayer

SIZES = dict(layers=2, hidden=12, heads=2, batch=3, seq=5, dtype="float64")


def expert_layers(chain) -> list[ExpertsLayer]:
    """All layers of experts of a chain, recomputed ones too."""
    return [found for one in chain.layers for found in (
        [one] if isinstance(one, ExpertsLayer) else
        expert_layers(one) if hasattr(one, "layers") else [])]


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
