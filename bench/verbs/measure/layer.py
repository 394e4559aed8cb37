"""Measure one Transformer layer beside one process' PyTorch, under mpirun."""

import argparse
import gc
from functools import partial

import mm3d
from bench.command_line import measuring, options
from bench.command_line.publish import measure
from bench.command_line.scheme_options import add_scheme
from bench.errors import UsageError
from bench.experiments.layer.layer import MeasuredLayer, check_overlap, measure_layer
from bench.records.journal import claim_folder
from bench.reports.micro_tables import format_record
from mm3d import ModelSizes

ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure layer``."""
    measuring.add_measurement(parser, 7, 60.0)
    parser.add_argument("--hidden", type=options.numbers, default=[512, 1024, 2048],
                        metavar="N,...",
                        help=f"{options.SIZES['hidden']}, each measured (default 512,1024,2048)")
    parser.add_argument("--head-size", type=options.whole(1), default=64, metavar="N",
                        help="features of an attention head (default 64)")
    options.add_sizes(parser, batch=8, seq=512)
    options.add_dtype(parser)
    add_scheme(parser)
    options.add_grid(parser)
    options.add_torch(parser, "the layer is verified, instead of by the serial scheme, and "
                              "PyTorch measured beside it")
    options.add_overlap(
        parser, "measure the layer also with communication that goes on while ranks multiply")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write a layer of each hidden size; return the exit status."""
    limits = measuring.limits_of(arguments)
    check_head(arguments.hidden, arguments.head_size)
    if arguments.overlap:
        check_overlap(arguments.scheme)
    measuring.check_model_memory(1, max(arguments.hidden), arguments.batch * arguments.seq,
                                 arguments.backend, comm)
    out = claim_folder(arguments.out, comm)
    status = 0
    for hidden in arguments.hidden:
        gc.collect()
        sizes = ModelSizes(1, hidden, hidden // arguments.head_size, arguments.batch,
                           arguments.seq)
        try:
            scheme = mm3d.scheme(arguments.scheme, comm, arguments.grid, arguments.backend)
            layer = MeasuredLayer(scheme, sizes, arguments.seed, arguments.dtype)
        except ValueError as error:
            raise UsageError(str(error)) from error
        status = max(status, measure(
            f"layer-{arguments.scheme}-h{hidden}-{arguments.dtype}",
            partial(measure_layer, layer, arguments.torch, arguments.overlap, limits), out, comm,
            format_record))
        scheme.grid.free()
        del layer
    return status


def check_head(hidden_sizes: list[int], head: int) -> None:
    """Raise UsageError for a hidden size that is not a multiple of the features of a head."""
    for hidden in hidden_sizes:
        if hidden % head:
            raise UsageError(f"--hidden {hidden} --head-size {head}: a head of at least 1 "
                             f"feature, and --hidden a multiple of it, would do")
