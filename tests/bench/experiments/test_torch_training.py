"""A training beside PyTorch's: what it is given, what is recorded; by a made-up interpreter."""
import contextlib
from types import SimpleNamespace

import numpy as np

from bench.experiments.training import torch_gpt


class Parameter(np.ndarray):
    """An array with two methods of a tensor."""

    def dim(self):
        return self.ndim

    def mul_(self, factor):
        self *= factor


class MomentumSGD:
    """SGD as PyTorch documents it: the decay is added to the gradient, before the momentum."""

    def __init__(self, parameters, lr, momentum=0.0, weight_decay=0.0):
        self.param_groups = [{"params": list(parameters), "lr": lr}]
        self.momentum, self.decay, self.buffers = momentum, weight_decay, {}

    def step(self):
        for group in self.param_groups:
            for n, p in enumerate(group["params"]):
                self.buffers[n] = (self.momentum * self.buffers.get(n, 0)
                                   + 0.5 + self.decay * np.asarray(p))    # the gradient: 0.5
                p -= group["lr"] * self.buffers[n]


def test_momentum_does_not_take_up_the_decay():
    """As in `mm3d.training.optimizers`: matrices are multiplied by 1 - lr weight_decay."""
    torch = SimpleNamespace(no_grad=contextlib.nullcontext, optim=SimpleNamespace(SGD=MomentumSGD))
    model = SimpleNamespace(p={name: np.ones(shape).view(Parameter) for name, shape in (
        ("weight", (2, 2)), ("bias", (2,)))})
    case = {"optimizer": "sgd", "lr": 0.1, "momentum": 0.5, "weight_decay": 0.2}
    optimizer = torch_gpt.make_optimizer(torch, model, case)
    matrix, vector, moment = 1.0, 1.0, 0.0
    for rate in (0.1, 0.05):
        torch_gpt.change(torch, model, optimizer, case, rate)
        moment = 0.5 * moment + 0.5
        matrix, vector = matrix * (1 - 0.2 * rate) - rate * moment, vector - rate * moment
    assert np.allclose(model.p["weight"], matrix) and np.allclose(model.p["bias"], vector)
