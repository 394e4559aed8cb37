"""Define and read the options of layers with experts."""

import argparse
import math
from typing import Any

from bench.command_line import options
from bench.command_line.number_types import number
from bench.errors import as_usage_error
from mm3d.model.experts.layer import Experts
from mm3d.model.experts.options import (CONVENTIONS, GATES, ORDERS, ExpertDesign,
                                        check_experts_given)

GATE = "mixtral"    # by default


def read_capacity(text: str) -> float:
    """Read a capacity factor, or "none", which is infinite."""
    try:
        return math.inf if text == "none" else number(above=True)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, such as 1.25, or none") from error


COUNT = {"type": options.whole(1), "metavar": "N"}
FACTOR = {"type": number(), "metavar": "X"}
# Options by the fields of Experts, or of ExpertDesign, that they set: how each is read, its help.
CHOICE: dict[str, tuple[str, dict[str, Any], str]] = {
    "expert_top": ("top", COUNT, "experts that a token is sent to (default "
                   f"{Experts.__dataclass_fields__['top'].default})"),
    "capacity": ("capacity", {"type": read_capacity, "metavar": "X"}, (
        "tokens that an expert takes, as a multiple of an equal share, or none for all (default "
        "{capacity})")),
    "gate": ("gate", {"choices": GATES}, (
        f"what multiplies the outputs of experts (default {GATE})")),
    "convention": ("convention", {"choices": CONVENTIONS}, (
        "whose definitions of capacity and balance loss are used (default "
        f"{Experts.__dataclass_fields__['convention'].default})")),
    "min_capacity": ("min_capacity", COUNT | {"type": options.whole(0)}, (
        "tokens that an expert takes at least (default 4 with --convention deepspeed, else 0)")),
    "expert_order": ("order", {"choices": ORDERS}, (
        "whose tokens a full expert drops: the last ones by position, or second choices before "
        "first ones (default choice with --gate gshard, and with --convention deepspeed "
        "--expert-top 2; else position)"))}
LAYERS = CHOICE | {
    "expert_every": ("every", COUNT, (
        f"one layer of so many has experts, with 1 all (default {Experts.every})")),
    "balance": ("balance", FACTOR, (
        f"coefficient of the balance loss (default {Experts.balance:g})")),
    "z_loss": ("z", FACTOR, f"coefficient of the router's z-loss (default {Experts.z:g})"),
    "bias_rate": ("bias_rate", FACTOR, (
        f"by how much a step changes the bias of --gate sigmoid-bias (default "
        f"{Experts.bias_rate:g})"))}
# Of Qwen's and DeepSeek's models.
DESIGN = {
    "expert_width": ("width", COUNT, (
        "features between the products of an expert (default: those of the perceptron)")),
    "shared_expert": ("shared", COUNT, (
        "the same of an expert that every token goes to (default: none)")),
    "expert_groups": ("groups", COUNT, (
        "groups of experts, of which a token goes to the best, with --gate sigmoid-bias (default "
        "1)")),
    "expert_top_groups": ("top_groups", COUNT, "groups that a token goes to (default 1)"),
    "shared_gate": ("shared_gate", {"action": "store_const", "const": True}, (
        "multiply the shared expert's output by the sigmoid of a product with the token")),
    "expert_factor": ("factor", FACTOR | {"type": number(above=True)}, (
        "what gates are multiplied by at last (default 1)"))}


def add_choice(parser: argparse.ArgumentParser, capacity: float | None,
               known: dict[str, tuple[str, dict[str, Any], str]] = CHOICE) -> None:
    """Add the options that say how tokens choose experts, and which tokens these take.

    `capacity` is the default, also to be given to `experts_from`; `known` are options as those of
    `CHOICE`.
    """
    said = "none" if capacity is None else f"{capacity}; none with --convention huggingface"
    for name, (_, how, about) in known.items():
        parser.add_argument(f"--{name.replace('_', '-')}", help=about.format(capacity=said), **how)


def add_layers(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model some of whose layers have experts."""
    parser.add_argument("--experts", **COUNT, help=(
        "put N experts in place of the perceptron of some layers (default: those of "
        "--model, or none)"))
    add_choice(parser, Experts.capacity, LAYERS | DESIGN)


def add_expert_parallel(parser: argparse.ArgumentParser, default: int | None = 1) -> None:
    """Add the number of replicas that divide the experts; None is for all."""
    parser.add_argument("--expert-parallel", type=options.whole(1), default=default, metavar="N",
                        help=(
        f"neighbouring replicas that divide the experts, a divisor of --data; with 1 each has "
        f"all (default {default or '--data'})"))


def experts_of(arguments: argparse.Namespace) -> Experts | None:
    """Return the experts that the options of `add_layers` ask for; None for none.

    Raises UsageError when they are not possible, or would do nothing.
    """
    if arguments.experts is not None:
        return experts_from(arguments, Experts.capacity)
    for name in (*LAYERS, *DESIGN):
        if getattr(arguments, name) is not None:
            raise options.without_effect(name, getattr(arguments, name), "--experts 8")
    return None


def experts_from(arguments: argparse.Namespace, capacity: float | None,
                 **more: Any) -> Experts:
    """Return ``--experts`` experts, with the options that were given and defaults for the others.

    Raises UsageError when they are not possible, or an option would do nothing beside the others.
    """
    given, design = ({field: value for name, (field, *_) in known.items()
                      if (value := getattr(arguments, name, None)) is not None}
                     for known in (LAYERS, DESIGN))
    if given.get("convention") == "huggingface":
        capacity = None
    found = {"gate": GATE, "capacity": capacity, **given, **more}
    if found["capacity"] == math.inf:
        found["capacity"] = None
    for name, nothing, remedy in (
            ("bias_rate", found["gate"] != "sigmoid-bias", "--gate sigmoid-bias"),
            ("min_capacity", found["capacity"] is None, "--capacity 1.25"),
            ("expert_order", found["capacity"] is None, "--capacity 1.25")):
        if LAYERS[name][0] in given and nothing:
            raise options.without_effect(name, getattr(arguments, name), remedy)
    experts = Experts(arguments.experts, **found, design=ExpertDesign(**design))
    if experts.design.top_groups > 1 and experts.design.groups == 1:
        raise options.without_effect("expert_top_groups", experts.design.top_groups,
                                     "--expert-groups 8")
    with as_usage_error():
        check_experts_given(experts, getattr(arguments, "layers", None))
    return experts
