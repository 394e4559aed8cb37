"""Define and read the options of layers with experts."""

import argparse
import math
from dataclasses import fields
from typing import Any, Sequence

from bench.command_line import options
from bench.command_line.config_options import add_fields, given, names_of, read, told
from bench.errors import as_usage_error
from mm3d.model.experts.layer import Experts
from mm3d.model.experts.options import ExpertDesign, check_experts_given

GATE = "mixtral"    # by default
CHOICE = ("top", "capacity", "gate", "convention", "min_capacity", "order")
EXPERT_LAYERS = (*CHOICE, "every", "balance", "z", "bias_rate")
DESIGN = tuple(one.name for one in fields(ExpertDesign))    # of Qwen's and DeepSeek's models
OPTIONS = (*names_of(Experts, EXPERT_LAYERS), *names_of(ExpertDesign, DESIGN))


def add_choice(parser: argparse.ArgumentParser, capacity: float | None,
               names: Sequence[str] = CHOICE) -> None:
    """Add the options that say how tokens choose experts, and which tokens these take.

    `capacity` is the default, also to be given to `experts_from`; `names` are fields of `Experts`.
    """
    said = "none" if capacity is None else f"{capacity}; none with --convention huggingface"
    add_fields(parser, Experts, names, told(Experts, names, capacity=said, gate=GATE))


def add_layers(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model some of whose layers have experts."""
    add_fields(parser, Experts, ["count"], told(
        Experts, ["count"], count=": those of --model, or none"))
    add_choice(parser, Experts.capacity, EXPERT_LAYERS)
    add_fields(parser, ExpertDesign, DESIGN, told(ExpertDesign, DESIGN))


def experts_of(arguments: argparse.Namespace) -> Experts | None:
    """Return the experts that the options of `add_layers` ask for; None for none.

    UsageError when they are not possible, or would do nothing.
    """
    if arguments.experts is not None:
        return experts_from(arguments, Experts.capacity)
    for name, value in options.given_of(arguments, OPTIONS).items():
        raise options.without_effect(name, value, "--experts 8")
    return None


def experts_from(arguments: argparse.Namespace, capacity: float | None,
                 **more: Any) -> Experts:
    """Return ``--experts`` experts, with the options that were given and defaults for the others.

    UsageError when they are not possible, or an option would do nothing beside the others.
    """
    said = given(Experts, arguments)
    if said.get("convention") == "huggingface":
        capacity = None
    found = {"gate": GATE, "capacity": capacity, **said, **more}
    if found["capacity"] == math.inf:
        found["capacity"] = None
    for name, nothing, remedy in (
            ("bias_rate", found["gate"] != "sigmoid-bias", "--gate sigmoid-bias"),
            ("min_capacity", found["capacity"] is None, "--capacity 1.25"),
            ("order", found["capacity"] is None, "--capacity 1.25")):
        if name in said and nothing:
            raise options.without_effect(*names_of(Experts, [name]), said[name], remedy)
    experts = Experts(**found, design=read(ExpertDesign, arguments))
    if experts.design.top_groups > 1 and experts.design.groups == 1:
        raise options.without_effect("expert_top_groups", experts.design.top_groups,
                                     "--expert-groups 8")
    with as_usage_error():
        check_experts_given(experts, getattr(arguments, "layers", None))
    return experts
