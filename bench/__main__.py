"""Run a verb of `bench.verbs`, on one rank or on all: ``python -m bench VERB``, or ``mm3d VERB``.
"""

import argparse
import gc
import os
import shutil
import sys
import textwrap
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Callable, Iterator, NoReturn, Sequence

from bench import mpi

mpi.expect_interrupt(__name__ == "__main__")    # also while modules are imported
mpi.defer_start()    # before mm3d is imported, which imports mpi4py.MPI

from bench import verbs  # noqa: E402
from bench.cluster.spec import Cluster  # noqa: E402
from bench.command_line.parser import Parser  # noqa: E402
from bench.document import Part  # noqa: E402
from bench.errors import UsageError, as_usage_error, in_options, in_short, status_of  # noqa: E402
from bench.reports import formats  # noqa: E402
from mm3d import guard, launcher  # noqa: E402
from mm3d.console import complain, protect, say  # noqa: E402

COMMAND = "mm3d"    # the name of this program where it is installed
PROGRAM = COMMAND if Path(sys.argv[0]).name == COMMAND else "python -m bench"


class VerbsParser(Parser):
    """A parser of verbs, or of the kinds of a verb, whose help lists them."""

    def format_help(self) -> str:
        """Return the help."""
        if self._subparsers is None:
            return super().format_help()
        verb = "".join(self.prog.removeprefix(PROGRAM).split())
        width = max(40, min(100, shutil.get_terminal_size().columns)) - 2
        lines = [self.format_usage(), textwrap.fill(str(self.description), width)]
        for group, entries in verbs.groups(verb).items():
            lines += ["", f"{group}:"]
            lines += [textwrap.fill(about, width, initial_indent=f"  {name:13}",
                                    subsequent_indent=" " * 15)
                      for name, about in entries.items()]
        word = "KIND" if verb else "VERB"
        return "\n".join([*lines, "", f"{self.prog} {word} --help says more.", ""])


def parser(chosen: Sequence[str] | None = None) -> argparse.ArgumentParser:
    """Return the command line, with the options of all verbs, or of the verb `chosen` alone.

    It imports only the verbs whose options it has; a second word of `chosen` is a kind.
    """
    top = VerbsParser(prog=PROGRAM, description=(
        "Measure the rows of Tables 1 and 2 of arXiv:2105.14450 and set them beside what was "
        "published."))
    top.also = tuple(verbs.kinds())
    top.add_program_options(COMMAND)
    verbs.add_verbs(top, chosen)
    return top


@contextmanager
def shown(arguments: argparse.Namespace) -> Iterator[None]:
    """Print what a verb shows in another ``--format`` than text at its end, as one document.

    Other lines go to standard error meanwhile, so that a program can read the document.
    """
    form, parts = getattr(arguments, "format", "text"), list[Part]()
    if form == "text":
        yield
        return
    arguments.show = parts.extend
    try:
        with redirect_stdout(sys.stderr):
            yield
    finally:
        if parts:
            say(formats.render(parts, form))


def run_verb(run: Callable[..., int], arguments: argparse.Namespace, *more) -> int:
    """Run a verb; rewrite errors about the library's arguments as errors about options."""
    try:
        return run(arguments, *more)
    except UsageError as error:
        raise UsageError(in_short(in_options(str(error), vars(arguments)))) from error


def run_on_all_ranks(run: Callable[..., int], arguments: argparse.Namespace) -> int:
    """Run a verb for ``mpirun``: a failing rank ends the job, and leaves none waiting."""
    mpi.start()
    from mpi4py import MPI
    from bench.errors import StoreError
    from bench.instruments.host import source_at_start
    from mm3d.tracing.watchdog import Watchdog
    from mm3d.transport.nodes import emulated_node_size
    comm = MPI.COMM_WORLD
    # Modules stay: the collections before each measurement need not look through them again, on
    # many ranks that share few cores.
    gc.freeze()
    if comm.rank == 0:
        source_at_start()    # by the end somebody may have checked out another commit
    try:
        with as_usage_error():
            launcher.check_launcher(comm.size)
            emulated_node_size()    # refuses a wrong number
        if seconds := getattr(arguments, "stall", None):
            with Watchdog(comm, seconds) as watchdog:
                arguments.watched = watchdog.attached
                status = run_verb(run, arguments, comm)
        else:
            status = run_verb(run, arguments, comm)
        # A rank that leaves with a failure may end the job: only after rank 0 has said why.
        comm.Barrier()
        return status
    except (UsageError, StoreError) as error:
        # The same on every rank, so one of them says it; all leave together.
        if comm.rank == launcher.launcher_rank() == 0:
            complain(f"error: {error}")
        comm.Barrier()
        return 2
    except BaseException as error:
        if comm.size > 1:
            guard.end_job(error)
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Run the verb of a command line; return the exit status."""
    words = verbs.in_full(sys.argv[1:] if argv is None else argv)
    # Before the verb and its kind no option takes a value, but one that shows all verbs.
    first = [word for word in words if not word.startswith("-")][:2]
    whole = any(word.startswith("--print-completion") for word in words)
    arguments = parser(None if whole else first).parse_args(words)
    arguments.words = words    # for verbs that start the same command again
    run, ranks = arguments.verb_file.run, getattr(arguments.verb_file, "ON_ALL_RANKS", False)
    on_all_ranks = ranks(arguments) if callable(ranks) else ranks
    cluster = getattr(arguments, "cluster", None)
    try:
        inside = cluster and Cluster.from_environment()
    except UsageError as error:
        if not launcher.launcher_rank():
            complain(f"error: {error}")
        return 2
    if cluster != inside:
        if launcher.launcher_rank():
            return 0    # one rank is enough to refuse
        from bench.cluster.run import run_verb_inside
        return status_of(lambda: run_verb_inside(cluster, words, on_all_ranks))
    with shown(arguments):
        if on_all_ranks:
            return status_of(lambda: run_on_all_ranks(run, arguments))
        if launcher.launcher_rank():
            return 0  # one rank is enough
        return status_of(lambda: run_verb(run, arguments))


def refuse_different_words() -> None:
    """End all ranks with status 2 where they were given different words: some would wait.

    So would some with different arrays or transports by the environment.
    """
    mpi.start()    # also so that no rank ends before rank 0 has said what is wrong
    from mpi4py import MPI
    from mm3d.grid.agreement import compare, environment_facts
    words = {f"word {place}": word for place, word in enumerate(sys.argv[1:], 1)}
    try:
        compare(MPI.COMM_WORLD, PROGRAM,
                {"MM3D_BACKEND": os.environ.get("MM3D_BACKEND") or "numpy"}
                | environment_facts() | words)
    except ValueError as error:
        if MPI.COMM_WORLD.rank == 0:
            complain(f"error: {error}")
        MPI.COMM_WORLD.Barrier()
        sys.exit(2)


def command(run: Callable[[], int] = main) -> NoReturn:
    """Run the program, which is `run`."""
    protect()
    if launcher.has_launched():
        refuse_different_words()
    sys.excepthook = sys.__excepthook__    # the guard prints at once what this would print
    try:
        sys.exit(run())
    except KeyboardInterrupt as error:    # before the verb began, whose ranks would wait
        if launcher.has_launched():
            guard.end_job(error)
        complain("interrupted")
        sys.exit(130)


if __name__ == "__main__":
    command()
