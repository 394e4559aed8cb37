"""Measure one Transformer layer beside PyTorch or ColossalAI, under mpirun."""

import argparse
import gc
from functools import partial

import mm3d
from bench.cases.variants import Variant, schemes_with_option
from bench.command_line import measuring, options
from bench.command_line.config_options import MEASURED_DTYPES, add_fields, told
from bench.command_line.publish import publisher
from bench.errors import UsageError, as_usage_error
from bench.experiments.layer.layer import (COLOSSAL, MeasuredLayer, PYTORCH, check_overlap,
                                           measure_layer)
from mm3d import ModelSizes
from mm3d.config import Division, Model

ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure layer``."""
    measuring.add_measurement(parser, 7, 60.0)
    add_fields(parser, Model, ["hidden"], {"hidden": [512, 1024, 2048]}, "{}, each measured",
               type=options.numbers, metavar="N,...")
    parser.add_argument("--head-size", type=options.whole(1), default=64, metavar="N",
                        help="features of an attention head (default 64)")
    add_fields(parser, Model, ["batch", "seq"], {"batch": 8, "seq": 512})
    add_fields(parser, Model, ["dtype"], choices=MEASURED_DTYPES)
    add_fields(parser, Division, ["scheme", "grid"])
    options.add_torch(parser, "the layer is verified, instead of by the serial scheme, and "
                              "PyTorch measured beside it")
    parser.add_argument("--colossal", metavar="PYTHON", help=(
        "an interpreter that has ColossalAI, whose 3-D layers of as many processes the layer is "
        "verified with and measured beside, in place of --torch; with --keep both they move "
        "equal words"))
    add_fields(parser, Variant, ["keep"], told(Variant, ["keep"]))
    add_fields(parser, Variant, ["overlap"], about="measure the layer also so: {}")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write a layer of each hidden size; return the exit status."""
    limits = measuring.limits_of(arguments)
    for hidden in arguments.hidden:
        if hidden % arguments.head_size:
            raise UsageError(f"--hidden {hidden} --head-size {arguments.head_size}: a head of at "
                             f"least 1 feature, and --hidden a multiple of it, would do")
    if arguments.overlap:
        check_overlap(arguments.scheme)
    if arguments.torch and arguments.colossal:
        raise UsageError(f"--torch {arguments.torch} --colossal {arguments.colossal}: a layer is "
                         f"measured beside one of them")
    beside = next((one for one in ((PYTORCH, arguments.torch), (COLOSSAL, arguments.colossal))
                   if one[1]), None)
    chosen = {"keep": arguments.keep} if arguments.keep else {}
    apart = {"overlap": False} if arguments.scheme in schemes_with_option("overlap") else {}
    measuring.check_model_memory(1, max(arguments.hidden), arguments.batch * arguments.seq,
                                 arguments.backend, comm)
    publish, status = publisher(arguments, comm), 0
    for hidden in arguments.hidden:
        gc.collect()
        sizes = ModelSizes(1, hidden, hidden // arguments.head_size, arguments.batch,
                           arguments.seq)
        with as_usage_error():
            scheme = mm3d.scheme(arguments.scheme, comm, arguments.grid, arguments.backend,
                                 **chosen | apart)
            layer = MeasuredLayer(scheme, sizes, arguments.seed, arguments.dtype)
        name = "-".join(["layer", arguments.scheme, *[f"keep-{arguments.keep}"] * bool(chosen),
                         f"h{hidden}", arguments.dtype])
        status = max(status, publish(
            name, partial(measure_layer, layer, beside, arguments.overlap, limits)))
        scheme.grid.free()
        del layer
    return status
