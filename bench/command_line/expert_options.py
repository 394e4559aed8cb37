"""Define and read the options of layers with experts."""

import argparse

from bench.command_line import options
from bench.errors import UsageError
from mm3d.model.experts.dispatch import WAYS
from mm3d.model.experts.options import GATES, Experts


def add_choice(parser: argparse.ArgumentParser, capacity: float | None, gate: str) -> None:
    """Add the options that say how tokens choose experts, with these defaults."""
    parser.add_argument("--top", type=options.whole(1), default=2, metavar="N",
                        help="experts that a token is sent to (default 2)")
    parser.add_argument("--capacity", type=read_capacity, default=capacity, metavar="X", help=(
        f"tokens that an expert takes, as a multiple of an equal share, or none for all (default "
        f"{'none' if capacity is None else capacity})"))
    parser.add_argument("--gate", choices=GATES, default=gate, help=(
        f"what multiplies the outputs of experts (default {gate})"))


def add_layers(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model some of whose layers have experts."""
    parser.add_argument("--experts", type=options.whole(1), metavar="N", help=(
        "put N experts in place of the perceptron of some layers (default: none)"))
    add_choice(parser, 1.25, "mixtral")
    parser.add_argument("--expert-every", type=options.whole(1), default=2, metavar="N",
                        help="one layer of so many has experts, with 1 all (default 2)")
    for name, default, about in (("balance", 0.01, "coefficient of the balance loss"),
                                 ("z-loss", 0.001, "coefficient of the router's z-loss"),
                                 ("jitter", 0.0, "largest relative change of the router's "
                                                 "input, at random")):
        parser.add_argument(f"--{name}", type=float, default=default, metavar="X",
                            help=f"{about} (default {default:g})")
    parser.add_argument("--expert-parallel", type=options.whole(1), default=1, metavar="N", help=(
        "neighbouring replicas that divide the experts, a divisor of --data; with 1 each has all "
        "(default 1)"))


def add_assumed(parser: argparse.ArgumentParser) -> None:
    """Add the options of a model with experts whose routing is assumed, as it is not run."""
    add_layers(parser)
    parser.add_argument("--expert-way", choices=WAYS, default="fewest", help=(
        "how rows come to experts of other replicas: exchanged, gathered, or whichever moves "
        "fewer words (default fewest)"))
    parser.add_argument("--imbalance", type=float, default=1.0, metavar="X", help=(
        "let the experts of this rank get X times their equal share of the tokens, as those of "
        "the busiest rank (default 1: all experts get equally many)"))


def read_capacity(text: str) -> float | None:
    """Read a capacity factor, or "none"."""
    try:
        return None if text == "none" else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r}: a factor such as 1.25, or none, would do")


def experts_of(arguments: argparse.Namespace) -> Experts | None:
    """Return the experts that the options of `add_layers` ask for; None for none.

    Raises
    ------
    UsageError
        When they are not possible.
    """
    if arguments.experts is None:
        return None
    found = Experts(arguments.experts, arguments.top, arguments.expert_every, arguments.capacity,
                    arguments.gate, arguments.balance, arguments.z_loss, arguments.jitter)
    try:
        found.check()
    except ValueError as error:
        raise UsageError(str(error)) from error
    return found
