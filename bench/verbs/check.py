"""Measure every scheme and grid beside the model's predictions, alone or under mpirun."""

import argparse

from bench.agreement import make_on_rank_0
from bench.errors import UsageError, WrongResult
from bench.experiments.products import operands
from bench.prediction import machine_model, whole_steps, work_list
from bench.prediction.beside_measured import read_measured
from bench.prediction.work import predict_seconds
from bench.records.journal import claim_folder
from bench.reports.formats import render
from bench.reports.measured_tables import compare_predictions
from bench.command_line import measuring, options
from bench.command_line.publish import publish, report_failure
from mm3d.console import say
from mm3d.schemes import registry
from mm3d.transport.choice import HOST_TRANSPORTS

GROUP = "Plan and predict"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``check``."""
    parser.add_argument("--machine", required=True, metavar="FILE",
                        help="the file that calibrate wrote with this number of ranks")
    parser.add_argument("--matmul", type=options.shape, action="append", metavar="M,N,K",
                        help="a product: C is M x K, the sum has N terms; may be repeated")
    parser.add_argument("--layer", type=options.sizes("HIDDEN,HEADS,BATCH,SEQ"), action="append",
                        metavar="HIDDEN,HEADS,BATCH,SEQ", help="a Transformer; may be repeated")
    parser.add_argument("--layers", type=options.whole(1), default=1, metavar="N",
                        help="layers of each Transformer (default 1)")
    parser.add_argument("--rounds", type=options.whole(1), default=20, metavar="N",
                        help="rounds over all measurements, whose medians count (default 20)")
    known = [name for name, scheme in registry().items() if scheme.divides_work]
    parser.add_argument("--scheme", type=options.some_of(*known), default=[], metavar="NAMES",
                        help=f"only these, separated by commas (default: {', '.join(known)})")
    parser.add_argument("--inside", type=lambda text: text.split(","), default=[],
                        metavar="AXES", help=(
                            "directions such as x,y,z: measure each grid once for each, placed "
                            "so that lines along it stay inside a node, where ranks fill one node "
                            "after the other (default: in the order of the grid alone)"))
    options.add_dtype(parser)
    parser.add_argument("--seed", type=options.whole(0), default=0, metavar="N",
                        help="seed of the numbers and of the order (default 0)")
    measuring.add_out(parser)
    measuring.add_stall(parser)
    measuring.add_cluster(parser)


def run(arguments: argparse.Namespace, comm) -> int:
    """Measure products and layers, print them beside the model's seconds; 0 when written.

    Raises
    ------
    UsageError
        When there is nothing to measure, a scheme has no grid of so many ranks, or the machine
        is a model for other ranks, another transport or other dtypes.
    """
    machine = machine_model.load_machine(arguments.machine, arguments.dtype)
    if not arguments.matmul and not arguments.layer:
        raise UsageError("nothing to measure: give --matmul M,N,K or --layer "
                         "HIDDEN,HEADS,BATCH,SEQ")
    known = sorted({axis for scheme in registry().values() for axis in scheme.directions})
    unknown = [axis for axis in arguments.inside if axis not in known]
    if unknown:
        raise UsageError(f"--inside {','.join(arguments.inside)}: no grid has a direction "
                         f"{unknown[0]!r}; {', '.join(known)} would do")
    transport = _transport(arguments.machine, machine, comm)
    out = claim_folder(arguments.out, comm)
    try:
        works = work_list.list_works(
            comm.size, arguments.matmul or (),
            [(*sizes, arguments.layers) for sizes in arguments.layer or ()],
            arguments.inside, arguments.scheme)
        expected = comm.bcast(make_on_rank_0(
            lambda: [sum(predict_seconds(machine, work, arguments.dtype).values())
                     for work in works], comm))
        record = whole_steps.measure_works(works, expected, comm, arguments.dtype, arguments.seed,
                                           arguments.rounds, transport,
                                           lambda line: say(line) if comm.rank == 0 else None)
    except WrongResult as wrong:
        return report_failure("check", f"{wrong}; no times were written", comm)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return publish(record if comm.rank == 0 else None, out, "check", comm,
                   lambda record: render(
                       compare_predictions(machine, list(read_measured(record)))))


def _transport(name: str, machine: machine_model.Machine, comm) -> str:
    """Return how the collectives of `comm` travel.

    Raises
    ------
    UsageError
        When the machine was measured with other ranks, in another emulated cluster or with
        another transport.
    """
    count = machine.measured_ranks
    if machine.passes and count != comm.size:
        raise UsageError(f"--machine {name} was measured with {count} rank{'s' * (count > 1)}, "
                         f"not {comm.size}: start that many, or calibrate with {comm.size}")
    machine_model.check_cluster(machine, name)
    transport = operands.default_transport(comm)
    if not machine.matches_transport(transport):
        raise UsageError(f"--machine {name} was measured with transport {machine.transport}, not "
                         f"{transport}: {_remedy(machine.transport, comm)}calibrate again")
    return transport


def _remedy(transport: str, comm) -> str:
    """Say what makes the ranks of `comm` use a machine's `transport`, if anything does."""
    if comm.size == 1:
        return "start more ranks, or "
    return f"set MM3D_TRANSPORT={transport}, or " if transport in HOST_TRANSPORTS else ""
