"""The formulas about published models, which `bench.prediction.model_file` reads by their names.
"""

from fractions import Fraction
from math import prod
from typing import Any

from bench.prediction.model_file import load_model
from mm3d.model import cost
from mm3d.pretrained.shapes import parameter_shapes

Number = int | Fraction
ROUTED = (".experts.up.", ".experts.down.")    # in names of parameters that not all tokens use


def model_parameters(model: str) -> int:
    """Count the parameters of a model."""
    return load_model(model).parameters


def active_parameters(model: str) -> Fraction:
    """Count the parameters that a token uses, of all experts those it is sent to."""
    found = load_model(model)
    experts = found.experts
    return sum((prod(shape) * (Fraction(experts.top, experts.count)
                               if any(part in name for part in ROUTED) else Fraction(1))
                for name, shape in parameter_shapes(found.model()).items()), Fraction(0))


def model_flops(model: str, sequence: int, passes: int = 1) -> int:
    """Count the operations of a sequence in a model: forward, or with backward 3 passes."""
    found = load_model(model)
    layers = cost.flops(found.sizes(1, sequence), found.experts)["forward"]
    return passes * (layers + 2 * sequence * found.hidden * found.vocab)


def flops_of_tokens(model: str, tokens: Number) -> Fraction:
    """Return 6 operations for each parameter and token."""
    return 6 * model_parameters(model) * Fraction(tokens)


FORMULAS: tuple[Any, ...] = (model_parameters, active_parameters, model_flops, flops_of_tokens)
