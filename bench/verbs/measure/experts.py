"""Measure a layer of experts by parts, beside PyTorch's ways to compute it, under mpirun."""

import argparse

from bench.command_line import expert_options, measuring, options
from bench.command_line.config_options import MEASURED_DTYPES, Told, add_fields, read
from bench.command_line.publish import publisher
from bench.experiments.experts.measured import measure_experts
from bench.experiments.experts.problem import ExpertsCase, ExpertsSubject, make_mesh
from mm3d.config import Division, Model
from mm3d.model.experts.layer import Experts

ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``measure experts``."""
    measuring.add_measurement(parser, 7, 120.0)
    add_fields(parser, Experts, ["count"], {"count": 8}, "experts")
    add_fields(parser, Division, ["data"])
    sizes = {"hidden": 512, "batch": 8, "seq": 512}
    add_fields(parser, Model, sizes, sizes)
    parser.add_argument("--wide", type=options.whole(1), metavar="N", help=(
        "features between the two products of an expert (default 4 times --hidden)"))
    expert_options.add_choice(parser, None)
    add_fields(parser, Division, ["expert_parallel"], {"expert_parallel": Told("--data")})
    add_fields(parser, Model, ["dtype"], choices=MEASURED_DTYPES)
    add_fields(parser, Division, ["scheme", "grid"], {"scheme": "1d"})
    options.add_torch(parser, "the layer is also computed on one process with all cores: in a "
                              "loop over experts, in padded batched products, and in PyTorch's "
                              "own grouped products")


def run(arguments: argparse.Namespace, comm) -> int:
    """Verify and measure, and write the record; return the exit status."""
    limits = measuring.limits_of(arguments)
    chosen = expert_options.experts_from(arguments, None, every=1)
    case = read(ExpertsCase, arguments, experts=chosen,
                wide=arguments.wide or 4 * arguments.hidden)
    # Values and gradients of both matrices of an expert, and the input, in 16 bits.
    measuring.check_memory(2 * case.hidden * (4 * chosen.count * case.wide
                                              + case.batch * case.seq), arguments.backend, comm)
    publish = publisher(arguments, comm)
    mesh = make_mesh(comm, arguments.scheme, arguments.grid, arguments.data, arguments.backend)
    subject = ExpertsSubject(mesh, case, arguments.expert_parallel)
    divided = f"-e{subject.expert_parallel}" * (subject.expert_parallel != arguments.data)
    name = f"experts-{chosen.count}-top{chosen.top}-h{case.hidden}{divided}-p{comm.size:03d}"
    return publish(name, lambda: measure_experts(subject, arguments.torch, limits))
