"""State what a model computes, beside the names and shapes of its parameters."""

from dataclasses import dataclass
from typing import Any

from mm3d.arrays.plain_numbers import plain_number
from mm3d.grid.agreement import text_of
from mm3d.model.architecture import FIELD, Architecture
from mm3d.model.experts.options import ExpertOptions
from mm3d.model.stack import Stack
from mm3d.model.transformer_layers import transformer_layers

Fact = float | int | str    # what an attribute of a file can be
TRANSFORMER = "model_spec"    # what checkpoints of all versions call its layers


@dataclass(frozen=True)
class Definition:
    """State facts of a model, by name, as checkpoints hold them."""

    function: dict[str, Fact]    # facts that the outputs depend on, beside the parameters
    # Facts that matter to a training alone: losses, gradients, and rounding.
    training: dict[str, Fact]

    def extended(self, function: dict[str, Any], training: dict[str, Any]) -> "Definition":
        """Return these facts and more, with None as a text."""
        return Definition(self.function | _as_facts(function), self.training | _as_facts(training))


def define_transformer(stack: Stack, make_layers: Any) -> Definition:
    """Return the definition of a Transformer; parameters as in `mm3d.Transformer`."""
    function = {"layers": stack.layers, "hidden": stack.hidden, "heads": stack.heads,
                "causal": bool(stack.causal), "epsilon": stack.architecture.epsilon}
    function |= architecture_facts(stack.architecture)
    made_by = getattr(make_layers, "func", make_layers)    # a part of the layers of a pipeline
    training = {"dtype": str(stack.dtype), "dropout": stack.dropout, "described_by": (
        TRANSFORMER if made_by is transformer_layers else text_of(made_by))}
    if stack.dropout:
        fits = -2 ** 63 <= stack.seed < 2 ** 64    # in a number of a file; masks have any seed
        training["mask_seed"] = stack.seed if fits else str(stack.seed)
    found = Definition({}, {}).extended(function, training)
    return found if stack.experts is None else found.extended(*_define_experts(stack.experts))


def architecture_facts(architecture: Architecture) -> dict[str, Fact]:
    """Return what an architecture adds to a definition, beside its epsilon."""
    return _as_facts({f"{FIELD}.{name}": text_of(value) if isinstance(value, tuple) else value
                      for name, value in vars(architecture).items() if name != "epsilon"})


def _define_experts(experts: ExpertOptions) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return what experts add to a definition."""
    function = {"count": experts.count, "top": experts.top, "every": experts.every,
                "gate": experts.gate, "capacity": experts.capacity}
    training = {"balance": experts.balance, "z": experts.z, "bias_rate": experts.bias_rate,
                "convention": experts.convention,
                "jitter": 0.0}    # of the router's input: earlier checkpoints state it
    if experts.capacity is not None:    # these say how it is counted
        function |= {"convention": training.pop("convention"), "order": experts.dropping_order,
                     "min_capacity": experts.least_capacity}
    function |= experts.design.given()
    return tuple({f"experts.{name}": value for name, value in facts.items()}
                 for facts in (function, training))


def _as_facts(values: dict[str, Any]) -> dict[str, Fact]:
    """Return values as facts."""
    return {name: "none" if value is None else plain_number(value)
            for name, value in values.items()}
