"""Take the gradient of a weight apart: the terms of its sum over sequences or positions."""

import copy
from typing import Any, Callable

import numpy as np

from bench.experiments.dump.computation import Start, compute_alone, to_tensors, wide
from mm3d.model.embedding import TiedHead
from mm3d.model.layers import Gelu


def gradient_terms(start: Start, name: str, dim: int) -> np.ndarray:
    """Return the terms of a gradient, one for each sequence (dim 0) or position (dim 1).

    The backward pass of the layer that has the weight is computed again, by the output's gradient
    in one sequence or position alone.
    """
    calls: list[tuple[Any, Any, tuple]] = []

    def remember(gpt: Any) -> None:
        ends, (chunk,) = gpt.chains[-1], gpt.chunks
        layers = [ends.output.norm, ends.output.head, ends.embedding]
        layers += [layer for block in chunk.layers.layers for layer in block.layers]
        for layer in layers:
            layer.backward = _remembering(layer, layer.backward, calls)
    gpts: list[Any] = []
    compute_alone(start, lambda gpt: (gpts.append(gpt), remember(gpt)))
    gpt, terms = gpts[0], []
    for at in range(start.tokens.shape[dim]):
        gpt.zero_gradients()
        for back, dy, more in calls:
            own = np.zeros_like(dy)
            box = (slice(None),) * dim + (at,)
            own[box] = dy[box]
            back(own, *copy.deepcopy(more))
        gpt.chains[-1].output.add_tied_gradient()
        gradients = {p.name: wide(p.grad) for p in gpt.trained}
        terms.append(to_tensors(start.family, gpt.config.model, gradients)[name])
    return np.array(terms)


def _remembering(layer: Any, back: Callable, calls: list) -> Callable:
    """Return a backward pass that copies what it is given."""
    def backward(dy: Any, *more: Any) -> Any:
        if layer.parameters or isinstance(layer, (Gelu, TiedHead)):
            own = type(layer).backward.__get__(layer)    # which keeps nothing
            calls.append((own, np.array(dy), copy.deepcopy(more)))
        return back(dy, *more)
    return backward
