"""``python -m bench``: the verbs of the benchmark."""

import argparse
import gc
import importlib
import sys
from typing import NoReturn, Sequence

from bench import beyond, rowoptions, show
from bench.cases import UsageError
from bench.options import add_doctor, add_files, add_microbenchmarks, add_reproduce
from mm3d import environment, guard

ON_ALL_RANKS = {"run": "bench.run", "gemm": "bench.micro", "collectives": "bench.micro",
                "matmul": "bench.matmul", "calibrate": "bench.calibrate",
                "check": "bench.check", "layer": "bench.layer", "gpu": "bench.gpu",
                "scalapack": "bench.scalapack"}


class Parser(argparse.ArgumentParser):
    """A parser whose messages come from one rank only."""

    def _print_message(self, message: str, file=None) -> None:
        import mm3d  # noqa: F401  (before MPI starts)
        from mpi4py import MPI
        if MPI.COMM_WORLD.rank == 0:
            super()._print_message(message, file)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    top = Parser(prog="python -m bench", description=(
        "Measure the rows of Tables 1 and 2 of arXiv:2105.14450 and set them beside what was "
        "published."))
    verbs = top.add_subparsers(dest="verb", required=True, metavar="VERB")
    rows = rowoptions.rows()
    rowoptions.add_run(verbs, rows)
    add_microbenchmarks(verbs)
    add_reproduce(verbs, rows)
    show.add_verbs(verbs)
    add_files(verbs)
    picture = verbs.add_parser("cube", help="draw which rank of a cube holds which block")
    picture.add_argument("file", metavar="FILE", help="the picture, such as cube.png")
    add_doctor(verbs)
    beyond.add_verbs(verbs)
    return top


def run_on_all_ranks(arguments) -> int:
    """A verb for ``mpirun``: a failing rank ends the job, and leaves none waiting."""
    verb = getattr(importlib.import_module(ON_ALL_RANKS[arguments.verb]), arguments.verb)
    from mpi4py import MPI
    from bench.watch import watching
    from mm3d.store import StoreError
    comm = MPI.COMM_WORLD
    # Modules stay: the collections before each measurement need not look through them again, on
    # many ranks that share few cores.
    gc.freeze()
    try:
        with watching(comm, getattr(arguments, "stall", None)) as arguments.watched:
            status = verb(arguments, comm)
        # A rank that leaves with a failure may end the job: only after rank 0 has said why.
        comm.Barrier()
        return status
    except (UsageError, StoreError) as error:
        # The same on every rank, so one of them says it; all leave together.
        if comm.rank == environment.launcher_rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        comm.Barrier()
        return 2
    except BaseException:
        if comm.size == 1:
            raise
        environment.abort(comm)
        raise


def run_alone(arguments) -> int:
    """A verb for one process; the exit status."""
    for family in (beyond, show):
        if arguments.verb in family.VERBS:
            return family.run(arguments)
    if arguments.verb == "doctor":
        from bench.doctor import doctor
        return doctor(arguments)
    if arguments.verb == "reproduce":
        from bench.reproduce import reproduce
        return reproduce(arguments)
    if arguments.verb == "validate":
        from bench.validate import validate
        return validate(arguments.sources)
    if arguments.verb == "start":
        from bench.start import start
        return start(arguments)
    if arguments.verb == "merge":
        from bench.merge import merge
        print(merge(arguments.target, arguments.sources))
    if arguments.verb == "cube":
        from bench.cube import cube
        print(cube(arguments.file))
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit status."""
    arguments = parser().parse_args(argv)
    if arguments.verb in ON_ALL_RANKS:
        return run_on_all_ranks(arguments)
    if environment.launcher_rank():
        return 0  # one rank is enough
    from bench.status import status_of
    return status_of(run_alone, arguments)


def command() -> NoReturn:
    """The program."""
    guard.together()    # `run_on_all_ranks` ends the job when one rank fails
    sys.exit(main())


if __name__ == "__main__":
    command()
