"""Define the options that say on which mesh a GPT is trained."""

import argparse

from bench.command_line import measuring, options
from bench.command_line.scheme_options import add_scheme
from bench.experiments.training.plan import Placement
from mm3d.training.schedules import registry


def add_mesh(parser: argparse.ArgumentParser) -> None:
    """Add the options that say on which mesh a model is trained."""
    parser.add_argument("--data", type=options.whole(1), default=1, metavar="N",
                        help="replicas, among which the batch is divided (default 1)")
    parser.add_argument("--shards", type=options.whole(1), metavar="N", help=(
        "replicas that divide one copy of the model by --zero, the others having copies of their "
        "own (default: all)"))
    parser.add_argument("--zero", type=int, choices=range(4), default=0, help=(
        "divide among the replicas: 1, moments and masters; 2, gradients too; 3, parameters too "
        "(default 0: nothing)"))
    parser.add_argument("--stages", type=options.whole(1), default=1, metavar="P",
                        help="stages of the pipeline in each replica (default 1)")
    parser.add_argument("--schedule", type=options.schedule, default="1f1b", metavar="NAME",
                        help=f"schedule of the stages, of {', '.join(registry())} (default 1f1b)")
    parser.add_argument("--microbatches", type=options.whole(1), default=1, metavar="M",
                        help="micro-batches of a replica's part of the batch, as equal"
                             " as can be (default 1)")
    add_scheme(parser)
    options.add_grid(parser)
    options.add_recompute(parser)
    measuring.add_backend(parser)


def make_placement(arguments: argparse.Namespace) -> Placement:
    """Return the mesh that the options say."""
    fields = Placement.__dataclass_fields__
    return Placement(**{name: getattr(arguments, name, field.default)    # no verb has all
                        for name, field in fields.items()})
