"""Measure one Transformer layer beside one process' PyTorch, under mpirun."""

import argparse
import gc

import mm3d
from bench.errors import UsageError, WrongResult
from bench.experiments.layer.layer import MeasuredLayer, check_overlap, measure_layer
from bench.records.journal import claim_folder
from bench.reports.micro_tables import format_record
from bench.command_line import measuring, options
from bench.command_line.publish import publish, report_failure
from mm3d import ModelSizes

GROUP = "Measure the parts alone"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``layer``."""
    measuring.add_measurement(parser, 7, 60.0)
    parser.add_argument("--hidden", type=options.numbers, default=[512, 1024, 2048],
                        metavar="N,...",
                        help="features of a token (default 512,1024,2048)")
    parser.add_argument("--head", type=options.whole(1), default=64, metavar="N",
                        help="features of an attention head (default 64)")
    parser.add_argument("--batch", type=options.whole(1), default=8, metavar="N",
                        help="sequences in a batch (default 8)")
    parser.add_argument("--seq", type=options.whole(1), default=512, metavar="N",
                        help="tokens in a sequence (default 512)")
    options.add_dtype(parser)
    parser.add_argument("--scheme", default="3d", metavar="NAME",
                        help="parallelism of the layer (default 3d)")
    options.add_grid(parser)
    parser.add_argument("--torch", metavar="PYTHON", help=(
        "verify the layer with PyTorch and measure it beside PyTorch, by this interpreter "
        "(default: verify it with the serial scheme, measure it alone)"))
    options.add_overlap(
        parser, "measure the layer also with communication that goes on while ranks multiply")


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure and write a layer of each hidden size; return the exit status."""
    limits = measuring.limits_of(arguments)
    check_head(arguments.hidden, arguments.head)
    if arguments.overlap:
        check_overlap(arguments.scheme)
    measuring.check_model_memory(1, max(arguments.hidden), arguments.batch * arguments.seq,
                                 arguments.backend, comm)
    out = claim_folder(arguments.out, comm)
    status = 0
    for hidden in arguments.hidden:
        gc.collect()
        sizes = ModelSizes(1, hidden, hidden // arguments.head, arguments.batch, arguments.seq)
        try:
            scheme = mm3d.scheme(arguments.scheme, comm, arguments.grid, arguments.backend)
            layer = MeasuredLayer(scheme, sizes, arguments.seed, arguments.dtype)
        except ValueError as error:
            raise UsageError(str(error)) from error
        name = f"layer-{arguments.scheme}-h{hidden}-{arguments.dtype}"
        try:
            record = measure_layer(layer, arguments.torch, arguments.overlap, limits)
        except WrongResult as wrong:
            status = report_failure(name, wrong, comm)
        else:
            status = max(status, publish(record, out, name, comm, format_record))
        scheme.grid.free()
        del layer
    return status


def check_head(hidden_sizes: list[int], head: int) -> None:
    """Raise UsageError for a hidden size that is not a multiple of the features of a head."""
    for hidden in hidden_sizes:
        if head < 1 or hidden % head:
            raise UsageError(f"--hidden {hidden} --head {head}: a head of at least 1 feature, "
                             f"and --hidden a multiple of it, would do")
