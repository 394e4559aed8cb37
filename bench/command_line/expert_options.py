"""Define and read the options of layers with experts."""

import argparse
import math
from typing import Any

from bench.command_line import options
from bench.command_line.number_types import number
from bench.errors import UsageError, as_usage_error
from mm3d.model.experts.layer import Experts
from mm3d.model.experts.options import (CONVENTIONS, GATES, ORDERS, ExpertDesign,
                                        check_experts_given)

GATE = "mixtral"    # by default
# The options of add_choice and add_layers, with the fields of Experts that they set.
CHOICE = {"expert_top": "top", "capacity": "capacity", "gate": "gate", "convention": "convention",
          "min_capacity": "min_capacity", "expert_order": "order"}
# The options of add_design, with the fields of ExpertDesign.
DESIGN = {"expert_width": "width", "shared_expert": "shared", "shared_gate": "shared_gate",
          "expert_groups": "groups", "expert_top_groups": "top_groups",
          "expert_factor": "factor"}
LAYERS = {**CHOICE, "expert_every": "every", "balance": "balance", "z_loss": "z",
          "bias_rate": "bias_rate"}


def add_choice(parser: argparse.ArgumentParser, capacity: float | None) -> None:
    """Add the options that say how tokens choose experts, and which tokens these take.

    `capacity` is the default, also to be given to `experts_from`.
    """
    field = Experts.__dataclass_fields__
    parser.add_argument("--expert-top", type=options.whole(1), metavar="N", help=(
        f"experts that a token is sent to (default {field['top'].default})"))
    parser.add_argument("--capacity", type=read_capacity, metavar="X", help=(
        "tokens that an expert takes, as a multiple of an equal share, or none for all (default "
        + ("none)" if capacity is None else f"{capacity}; none with --convention huggingface)")))
    parser.add_argument("--gate", choices=GATES, help=(
        f"what multiplies the outputs of experts (default {GATE})"))
    parser.add_argument("--convention", choices=CONVENTIONS, help=(
        f"whose definitions of capacity and balance loss are used (default "
        f"{field['convention'].default})"))
    parser.add_argument("--min-capacity", type=options.whole(0), metavar="N", help=(
        "tokens that an expert takes at least (default 4 with --convention deepspeed, else 0)"))
    parser.add_argument("--expert-order", choices=ORDERS, help=(
        "whose tokens a full expert drops: the last ones by position, or second choices before "
        "first ones (default choice with --gate gshard, and with --convention deepspeed "
        "--expert-top 2; else position)"))


def add_layers(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model some of whose layers have experts."""
    parser.add_argument("--experts", type=options.whole(1), metavar="N", help=(
        "put N experts in place of the perceptron of some layers (default: those of "
        "--model, or none)"))
    add_choice(parser, Experts.capacity)
    parser.add_argument("--expert-every", type=options.whole(1), metavar="N", help=(
        f"one layer of so many has experts, with 1 all (default {Experts.every})"))
    for name, default, about in (
            ("balance", Experts.balance, "coefficient of the balance loss"),
            ("z-loss", Experts.z, "coefficient of the router's z-loss"),
            ("bias-rate", Experts.bias_rate, "by how much a step changes the bias of --gate "
                                             "sigmoid-bias")):
        parser.add_argument(f"--{name}", type=number(), metavar="X",
                            help=f"{about} (default {default:g})")
    add_design(parser)


def add_design(parser: argparse.ArgumentParser) -> None:
    """Add the options of what experts have in Qwen's and DeepSeek's models."""
    for name, about in (
            ("expert-width", "features between the products of an expert (default: those of the "
                             "perceptron)"),
            ("shared-expert", "the same of an expert that every token goes to (default: none)"),
            ("expert-groups", "groups of experts, of which a token goes to the best, with --gate "
                              "sigmoid-bias (default 1)"),
            ("expert-top-groups", "groups that a token goes to (default 1)")):
        parser.add_argument(f"--{name}", type=options.whole(1), metavar="N", help=about)
    parser.add_argument("--shared-gate", action="store_const", const=True, help=(
        "multiply the shared expert's output by the sigmoid of a product with the token"))
    parser.add_argument("--expert-factor", type=number(above=True), metavar="X",
                        help="what gates are multiplied by at last (default 1)")


def add_expert_parallel(parser: argparse.ArgumentParser, default: int | None = 1) -> None:
    """Add the number of replicas that divide the experts; None is for all."""
    parser.add_argument("--expert-parallel", type=options.whole(1), default=default, metavar="N",
                        help=(
        f"neighbouring replicas that divide the experts, a divisor of --data; with 1 each has "
        f"all (default {default or '--data'})"))


def read_capacity(text: str) -> float:
    """Read a capacity factor, or "none", which is infinite."""
    try:
        return math.inf if text == "none" else number(above=True)(text)
    except argparse.ArgumentTypeError as error:
        raise argparse.ArgumentTypeError(f"{error}, such as 1.25, or none") from error


def experts_of(arguments: argparse.Namespace) -> Experts | None:
    """Return the experts that the options of `add_layers` ask for; None for none.

    UsageError when they are not possible, or would do nothing.
    """
    if arguments.experts is not None:
        return experts_from(arguments, Experts.capacity)
    for name in (*LAYERS, *DESIGN):
        if getattr(arguments, name) is not None:
            raise _without_effect(arguments, name, "--experts 8")
    return None


def experts_from(arguments: argparse.Namespace, capacity: float | None,
                 **more: Any) -> Experts:
    """Return ``--experts`` experts, with the options that were given and defaults for the others.

    UsageError when they are not possible, or an option would do nothing beside the others.
    """
    given = {field: value for name, field in LAYERS.items()
             if (value := getattr(arguments, name, None)) is not None}
    if given.get("convention") == "huggingface":
        capacity = None
    found = {"gate": GATE, "capacity": capacity, **given, **more}
    if found["capacity"] == math.inf:
        found["capacity"] = None
    for name, nothing, remedy in (
            ("bias_rate", found["gate"] != "sigmoid-bias", "--gate sigmoid-bias"),
            ("min_capacity", found["capacity"] is None, "--capacity 1.25"),
            ("expert_order", found["capacity"] is None, "--capacity 1.25")):
        if LAYERS[name] in given and nothing:
            raise _without_effect(arguments, name, remedy)
    design = ExpertDesign(**{field: value for name, field in DESIGN.items()
                             if (value := getattr(arguments, name, None)) is not None})
    if design.top_groups > 1 and design.groups == 1:
        raise _without_effect(arguments, "expert_top_groups", "--expert-groups 8")
    experts = Experts(arguments.experts, **found, design=design)
    with as_usage_error():
        check_experts_given(experts, getattr(arguments, "layers", None))
    return experts


def _without_effect(arguments: argparse.Namespace, name: str, remedy: str) -> UsageError:
    """Return the error of an option that would do nothing."""
    return UsageError(f"{options.written(name, getattr(arguments, name))} would do nothing here: "
                      f"{remedy} would do, or leave it out")
