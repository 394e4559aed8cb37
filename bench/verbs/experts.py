"""Measure a layer of experts by parts, beside PyTorch's ways to compute it, under mpirun."""

import argparse

from bench.command_line import expert_options, measuring, options
from bench.command_line.publish import publish, report_failure
from bench.errors import WrongResult
from bench.experiments.experts.measured import measure_experts
from bench.experiments.experts.problem import ExpertsCase, Subject, make_mesh
from bench.records.journal import claim_folder
from bench.reports.micro_tables import format_record

GROUP = "Measure the parts alone"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``experts``."""
    measuring.add_measurement(parser, 7, 120.0)
    for name, default, about in (("experts", 8, "experts"),
                                 ("hidden", 512, "features of a token"),
                                 ("batch", 8, "sequences in a batch, of all replicas"),
                                 ("seq", 512, "tokens in a sequence"),
                                 ("data", 1, "replicas, among which sequences are divided")):
        parser.add_argument(f"--{name}", type=options.whole(1), default=default, metavar="N",
                            help=f"{about} (default {default})")
    parser.add_argument("--wide", type=options.whole(1), metavar="N", help=(
        "features between the two products of an expert (default 4 times --hidden)"))
    expert_options.add_choice(parser, None)
    parser.add_argument("--expert-parallel", type=options.whole(1), metavar="N", help=(
        "neighbouring replicas that divide the experts, a divisor of --data; with 1 each has all "
        "(default --data)"))
    options.add_dtype(parser)
    parser.add_argument("--scheme", default="1d", metavar="NAME",
                        help="parallelism of each replica (default 1d)")
    options.add_grid(parser)
    parser.add_argument("--torch", metavar="PYTHON", help=(
        "also compute the layer by PyTorch on one process with all cores, by this interpreter: in "
        "a loop over experts, in padded batched products, and in its own grouped products"))


def run(arguments: argparse.Namespace, comm) -> int:
    """Verify and measure, and write the record; return the exit status."""
    limits = measuring.limits_of(arguments)
    chosen = expert_options.experts_from(arguments, None, every=1)
    case = ExpertsCase(chosen, arguments.hidden, arguments.wide or 4 * arguments.hidden,
                       arguments.batch, arguments.seq, arguments.dtype, arguments.seed)
    words = 2 * case.hidden * (4 * chosen.count * case.wide + case.batch * case.seq)
    measuring.check_memory(words, arguments.backend, comm)
    out = claim_folder(arguments.out, comm)
    mesh = make_mesh(comm, arguments.scheme, arguments.grid, arguments.data, arguments.backend)
    subject = Subject(mesh, case, arguments.expert_parallel)
    divided = f"-e{subject.expert_parallel}" * (subject.expert_parallel != arguments.data)
    name = f"experts-{chosen.count}-top{chosen.top}-h{case.hidden}{divided}-p{comm.size:03d}"
    try:
        record = measure_experts(subject, arguments.torch, limits)
    except WrongResult as wrong:
        return report_failure(name, wrong, comm)
    return publish(record, out, name, comm, format_record)
