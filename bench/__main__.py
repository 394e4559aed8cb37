"""``python -m bench``: the verbs of the benchmark."""

import argparse
import importlib
import sys
from typing import NoReturn, Sequence

from bench import beyond, show
from bench.cases import HEADINGS, PAPER, TITLES, UsageError, load
from bench.options import add_doctor, add_files, add_microbenchmarks, add_reproduce
from mm3d import environment

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
    presets = "; ".join(f"{name}: {preset.about}" for name, preset in load().presets.items())

    rows = argparse.ArgumentParser(add_help=False)
    rows.add_argument("--table", default="all", metavar="NAMES",
                      help=f"{', '.join(HEADINGS)}, some with commas between, or all (default)")
    rows.add_argument("--scheme", default="all", metavar="NAMES",
                      help=f"{', '.join(TITLES)}, some with commas between, or all that the "
                           f"paper has: {', '.join(PAPER)} (default)")
    rows.add_argument("--preset", default="laptop", choices=load().presets,
                      help=f"the sizes (default laptop). {presets}")
    rows.add_argument("--out", metavar="DIR",
                      help="where the .h5 files go (default results/<machine>)")
    rows.add_argument("--warmup", type=int, metavar="N",
                      help="steps before the first that is timed, with the one that is verified "
                           "(default: the preset's)")
    rows.add_argument("--repetitions", type=int, metavar="N",
                      help="the least number of steps that are timed (default: the preset's)")
    rows.add_argument("--max-repetitions", type=int, metavar="N",
                      help="the greatest (default: the preset's)")
    rows.add_argument("--max-seconds", type=float, metavar="S",
                      help="no step beyond the least number begins when so many seconds have "
                           "passed (default: the preset's)")
    rows.add_argument("--width", type=float, default=0.05, metavar="FRACTION",
                      help="enough steps are timed when the 95 %% confidence intervals of both "
                           "medians are no wider than this part of them (default 0.05)")
    rows.add_argument("--traced", type=int, metavar="N",
                      help="steps after those that count, traced to tell where the time goes "
                           "(default: the preset's; 0 for none)")
    rows.add_argument("--order", type=int, metavar="SEED",
                      help="of the order in which rows are measured (default: drawn; recorded)")
    rows.add_argument("--dtype", default=load().settings.dtype, choices=("float32", "float64"),
                      help=f"of every array (default {load().settings.dtype})")
    rows.add_argument("--backend", metavar="NAME",
                      help="the array library (default MM3D_BACKEND, or numpy)")
    rows.add_argument("--seed", type=int, default=0, metavar="N",
                      help="of parameters and input (default 0)")

    run = verbs.add_parser("run", parents=[rows], help=(
        "under mpirun: measure the selected rows that have as many ranks as the job"))
    for name in ("layers", "hidden", "heads", "batch", "seq"):
        run.add_argument(f"--{name}", type=int, metavar="N", help="instead of the preset's")
    run.add_argument("--rows", metavar="NAMES", help=(
        "instead of --table and --scheme: both of each row, such as weak:3d,strong:1d"))
    run.add_argument("--grid", metavar="XxYxZ", help=(
        "sizes of the grid's directions, or auto for the planner's choice"))
    run.add_argument("--machine", default="cpu", metavar="NAME", help=(
        "the machine that the planner of --grid auto plans for (default cpu)"))
    run.add_argument("--inside", default="auto", metavar="AXIS", help=(
        "the direction of the grid that stays inside a node, where ranks fill nodes one after "
        "the other (default auto: the one that moves the most words)"))
    run.add_argument("--trace", metavar="FILE", help=(
        "write the last traced step of each row for chrome://tracing and ui.perfetto.dev; with "
        "several rows each has its name in the file's"))
    run.add_argument("--stop-file", metavar="FILE", help=(
        "when this file exists, end the row with the repetitions that there are, and begin no "
        "other: what a job does that nears its time limit"))
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
    from mm3d.store import StoreError
    comm = MPI.COMM_WORLD
    try:
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


def main(argv: Sequence[str] | None = None) -> int:
    """Do what the command line says; the exit status."""
    arguments = parser().parse_args(argv)
    if arguments.verb in ON_ALL_RANKS:
        return run_on_all_ranks(arguments)
    if environment.launcher_rank():
        return 0  # one rank is enough
    from mm3d.store import StoreError
    try:
        if arguments.verb in beyond.VERBS:
            return beyond.run(arguments)
        if arguments.verb == "doctor":
            from bench.doctor import doctor
            return doctor(arguments)
        if arguments.verb in show.VERBS:
            return show.run(arguments)
        if arguments.verb == "reproduce":
            from bench.reproduce import reproduce
            return reproduce(arguments)
        if arguments.verb == "merge":
            from bench.merge import merge
            print(merge(arguments.target, arguments.sources))
        if arguments.verb == "validate":
            from bench.validate import validate
            return validate(arguments.sources)
        if arguments.verb == "start":
            from bench.start import start
            return start(arguments)
        if arguments.verb == "cube":
            from bench.cube import cube
            print(cube(arguments.file))
        return 0
    except OSError as error:
        named = error.filename and error.strerror
        print(f"error: {f'{error.filename}: {error.strerror}' if named else error}",
              file=sys.stderr)
        return 2
    except (UsageError, StoreError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def command() -> NoReturn:
    """The program."""
    sys.exit(main())


if __name__ == "__main__":
    command()
