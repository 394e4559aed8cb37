"""Measure a layer of experts by parts, beside PyTorch's ways to compute it, under mpirun."""

import argparse

from bench.command_line import expert_options, measuring, options
from bench.command_line.publish import measure
from bench.command_line.scheme_options import add_scheme
from bench.experiments.experts.measured import measure_experts
from bench.experiments.experts.problem import ExpertsCase, ExpertsSubject, make_mesh
from bench.records.journal import claim_folder
from bench.reports.micro_tables import showing

ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure experts``."""
    measuring.add_measurement(parser, 7, 120.0)
    for name, default, about in (("experts", 8, "experts"),
                                 ("data", 1, "replicas, among which the batch is divided")):
        parser.add_argument(f"--{name}", type=options.whole(1), default=default, metavar="N",
                            help=f"{about} (default {default})")
    options.add_sizes(parser, hidden=512, batch=8, seq=512)
    parser.add_argument("--wide", type=options.whole(1), metavar="N", help=(
        "features between the two products of an expert (default 4 times --hidden)"))
    expert_options.add_choice(parser, None)
    expert_options.add_expert_parallel(parser, None)
    options.add_dtype(parser)
    add_scheme(parser, "1d")
    options.add(parser, "grid")
    options.add_torch(parser, "the layer is also computed on one process with all cores: in a "
                              "loop over experts, in padded batched products, and in PyTorch's "
                              "own grouped products")


def run(arguments: argparse.Namespace, comm) -> int:
    """Verify and measure, and write the record; return the exit status."""
    limits = measuring.limits_of(arguments)
    chosen = expert_options.experts_from(arguments, None, every=1)
    case = ExpertsCase(chosen, arguments.hidden, arguments.wide or 4 * arguments.hidden,
                       arguments.batch, arguments.seq, arguments.dtype, arguments.seed)
    # Values and gradients of both matrices of an expert, and the input, in 16 bits.
    measuring.check_memory(2 * case.hidden * (4 * chosen.count * case.wide
                                              + case.batch * case.seq), arguments.backend, comm)
    out = claim_folder(arguments.out, comm)
    mesh = make_mesh(comm, arguments.scheme, arguments.grid, arguments.data, arguments.backend)
    subject = ExpertsSubject(mesh, case, arguments.expert_parallel)
    divided = f"-e{subject.expert_parallel}" * (subject.expert_parallel != arguments.data)
    name = f"experts-{chosen.count}-top{chosen.top}-h{case.hidden}{divided}-p{comm.size:03d}"
    return measure(name, lambda: measure_experts(subject, arguments.torch, limits), out, comm,
                   showing(arguments.show))
