"""The verb ``check``: every scheme and grid of the job's ranks, measured beside predictions."""

from bench import matmul, model, operands, replay, sampling, trials
from bench.cases import UsageError
from bench.journal import writable
from bench.products import Problem
from bench.replay import Work
from mm3d import dry, timing
from mm3d.choice import ON_HOST
from mm3d.record import Measurements, Variable
from mm3d.store import Check


def check(arguments, comm) -> int:
    """Measure products and layers, print them beside the model's seconds; 0 when written.

    Raises
    ------
    UsageError
        When there is nothing to measure, or the machine is a model for other ranks, another
        transport or other dtypes.
    """
    chosen = model.load(arguments.machine, arguments.dtype)
    if arguments.rounds < 1:
        raise UsageError(f"--rounds {arguments.rounds}: must be at least 1")
    if not arguments.matmul and not arguments.layer:
        raise UsageError("nothing to measure: give --matmul M,N,K or --layer "
                         "HIDDEN,HEADS,BATCH,SEQ")
    if chosen.passes and chosen.ranks_per_node != comm.size:
        raise UsageError(f"--machine {arguments.machine} was measured with "
                         f"{chosen.ranks_per_node} rank{'s' * (chosen.ranks_per_node > 1)}, not "
                         f"{comm.size}: start that many, or calibrate with {comm.size}")
    transport = operands.usual_transport(comm)
    if not chosen.travels(transport):
        raise UsageError(f"--machine {arguments.machine} was measured with transport "
                         f"{chosen.transport}, not {transport}: "
                         f"{remedy(chosen.transport, comm)}calibrate again")
    out = writable(arguments.out, comm)
    works = trials.everywhere(comm.size, arguments.matmul or (),
                              [(*sizes, arguments.layers) for sizes in arguments.layer or ()])
    checks: list[Check] = []
    try:
        steps = [(product if work.kind == "matmul" else layers)(work, arguments, comm, checks)
                 for work in works]
    except ValueError as error:
        raise UsageError(str(error)) from error
    wrong = [f"{done.quantity} is off by {done.error:.2g}, tolerance {done.tolerance:.2g}"
             for done in checks if not done.passed]
    if wrong:
        return sampling.failed("check", f"{wrong[0]}; no times were written", comm)
    found = trials.rounds(steps, arguments.rounds, arguments.seed)
    environs = sampling.measured_environment("numpy", comm)
    record = Measurements(
        "check", {"dtype": arguments.dtype, "seed": arguments.seed, "transport": transport},
        environs,
        {"work": [work.label for work in works], "phase": dry.PHASES,
         "repetition": range(arguments.rounds)},
        {"samples": Variable(found.transpose(1, 2, 0), "s", ("work", "phase", "repetition"))},
        checks)
    return sampling.publish(record if comm.rank == 0 else None, out, "check", comm,
                            lambda: replay.report(chosen, list(replay.measured(record))))


def remedy(transport: str, comm) -> str:
    """What makes the ranks of `comm` use a machine's `transport`, if anything does."""
    if comm.size == 1:
        return "start more ranks, or "
    return f"set MM3D_TRANSPORT={transport}, or " if transport in ON_HOST else ""


def product(work: Work, arguments, comm, checks: list[Check]) -> trials.Trial:
    """C = AB, and then dA and dB."""
    problem = Problem(work.scheme, work.form, comm, work.grid, work.sizes, arguments.dtype,
                      arguments.seed, "numpy")
    for phase in dry.PHASES:
        checks += [Check(f"{work.label}: {done.quantity}", done.error, done.tolerance) for done in
                   matmul.verified(problem, getattr(problem, phase)(), arguments.seed)]
    return trials.product(problem, comm, timing.Clock(comm))


def layers(work: Work, arguments, comm, checks: list[Check]) -> trials.Trial:
    """A Transformer's step, verified against the serial scheme."""
    network, found = trials.transformer(work, comm, arguments.dtype, arguments.seed)
    checks += found
    return trials.layers(network, comm, timing.Clock(comm))
