"""Check launcher, MPI, BLAS, GPUs and files of this environment; fail when one is not usable."""

import argparse
import shlex
from pathlib import Path

from bench import mpi
from bench.command_line import options
from bench.command_line.config_options import add_fields, told
from bench.doctor.checks import CHECKS, FAILED, Finding
from bench.doctor.child_jobs import Facts
from bench.document import Column, Notes, Part, Table
from bench.errors import UsageError
from mm3d import launcher
from mm3d.config import Division
from mm3d.console import say

GROUP = "This machine"
OF_CHECKS = ("launcher", "ranks_per_node", "gpus_per_node", "backend", "variable",
             "device_buffers", "module", "seen", "clean")    # not of ``--gpu whole``


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor``."""
    parser.add_argument("--ranks", type=options.whole(1), metavar="N", help=(
        "number of ranks that the launcher shall start (default 2; 8 with --gpu whole)"))
    parser.add_argument("--launcher", metavar="COMMAND",
                        help="command that starts that many ranks of a program, such as 'srun "
                             "--mpi=pmix -n 8' (default: mpirun)")
    parser.add_argument("--ranks-per-node", type=options.whole(0), default=0, metavar="N",
                        help="fail when a node has more ranks (default 0: any number)")
    parser.add_argument("--gpus-per-node", type=options.whole(0), default=0, metavar="N",
                        help="fail when a node has fewer GPUs, or ranks share one (default 0: "
                             "none are needed)")
    add_fields(parser, Division, ["backend"], told(Division, ["backend"], backend=""), (
        "fail when a rank cannot use this array library"), choices=("numpy", "cupy"), metavar=None)
    parser.add_argument("--variable", action="append", default=[], type=variable,
                        metavar="NAME=VALUE", help=(
        "fail when this environment variable does not reach a rank; may be repeated"))
    parser.add_argument("--gpu", nargs="?", choices=("usable", "whole"), const="usable", help=(
        "also check that the GPU here computes every dtype right, and which transports move its "
        "arrays; whole: run everything that needs a GPU, one step after another, whatever fails, "
        "with logs, summary.txt and results in --out"))
    parser.add_argument("--only", metavar="NAME,...", help=(
        "with --gpu whole: run these steps alone (default: all); a wrong name lists them"))
    parser.add_argument("--rehearse", action="store_true", help=(
        "with --gpu whole: run the steps on NumPy at tiny sizes, without a GPU"))
    parser.add_argument("--device-buffers", action="store_true",
                        help="fail when MPI cannot read and write device memory")
    parser.add_argument("--module", action="append", default=[], metavar="NAME",
                        help="fail when this environment module is not loaded; may be repeated")
    parser.add_argument("--out", metavar="DIR",
                        help="fail when results cannot be written into this folder")
    parser.add_argument("--limit", type=options.number(above=True), metavar="SECONDS", help=(
        "the longest that a child job may take (default 60; 600 with --gpu whole, and half of it "
        "for a self-test)"))
    parser.add_argument("--seen", metavar="DIR",
                        help="start no child job: read the output of bench.doctor.census in this "
                             "folder, as batch jobs do")
    parser.add_argument("--clean", action="store_true", help=(
        "remove the shared memory that killed jobs of this user have left in /dev/shm and no "
        "process has open; processes of a container that shares the folder are not seen, so not "
        "while one runs a job"))


def run(arguments: argparse.Namespace) -> int:
    """Print every finding, or every step of ``--gpu whole``; return 1 when one failed, else 0."""
    if launcher.local_ranks() > 1:
        raise UsageError("doctor starts the launcher itself: run it without, as in "
                         "python -m bench doctor --launcher 'mpirun -n 8'")
    if arguments.gpu == "whole":
        return test_gpu(arguments)
    if arguments.only or arguments.rehearse:
        raise UsageError("--only and --rehearse are for --gpu whole: give it too, or leave them "
                         "out")
    arguments.ranks = arguments.ranks or 2
    facts = Facts(arguments.ranks, launcher_command(arguments), arguments.ranks_per_node,
                  arguments.gpus_per_node, arguments.backend, arguments.device_buffers,
                  dict(arguments.variable), arguments.module,
                  arguments.out, arguments.limit or 60.0,
                  Path(arguments.seen) if arguments.seen else None, arguments.clean)
    checks = list(CHECKS)
    if arguments.gpu:
        mpi.start()    # for the model on this GPU
        from bench.doctor.gpu_checks import GPU_CHECKS as MORE
        checks += MORE
    findings = {check.__name__: check(facts) for check in checks}
    arguments.show(list_findings(findings, facts.seen is None))
    return int(any(one.state == FAILED for one in findings.values()))


def list_findings(findings: dict[str, Finding], explained: bool) -> list[Part]:
    """Make the table of all checks, and say which of them matter; `explained` in general too."""
    failed = [name for name, one in findings.items() if one.state == FAILED]
    columns = [Column("state"), Column("check", align="<"), Column("finding", align="<")]
    means = [f"NOT USABLE: mend {' and '.join(failed)}, and ask again." if failed else
             "Usable: no check failed."]
    if explained:
        means.append(
            "launcher and hdf5 must be ok: ranks start, and results are kept. cluster decides "
            "what reproduce does: if it is ok, and MPI works there, rows run on an emulated "
            "cluster, else on the cores at hand. A warning says what is slower or left out; what "
            "is skipped is not here, or nobody asked for it.")
    return [Table("This environment", columns,
                  [[one.state, name, one.text] for name, one in findings.items()]),
            Notes("What it means:", means)]


def test_gpu(arguments: argparse.Namespace) -> int:
    """Run the steps of ``--gpu whole``, a line for each; return 1 when one failed, else 0.

    Tests that are all skipped prove nothing: they fail too, but in a rehearsal, which has no GPU.
    """
    from bench.doctor import gpu_suite
    if not arguments.out:
        raise UsageError("--gpu whole writes logs and results: give --out DIR too")
    for name in OF_CHECKS:
        if getattr(arguments, name):
            raise UsageError(f"--{name.replace('_', '-')} would do nothing here: it is of checks, "
                             f"which --gpu whole makes as one of its steps; leave it out")
    out = Path(arguments.out).absolute()
    steps = gpu_suite.list_steps(out, arguments.ranks or 8, arguments.limit or 600,
                                 arguments.rehearse)
    status = 0
    for outcome in gpu_suite.run_steps(gpu_suite.select_steps(steps, arguments.only), out):
        say(str(outcome))
        skipped = outcome.skipped and not arguments.rehearse
        status = max(status, int(bool(outcome.problem) or skipped))
    return status


def variable(text: str) -> tuple[str, str]:
    """Read NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{text!r}: give it as NAME=VALUE")
    return name, value


def launcher_command(arguments: argparse.Namespace) -> list[str]:
    """Return the command that starts the ranks of a program."""
    if arguments.seen and not arguments.launcher:
        return ["launcher"]    # serves messages alone
    try:
        return (shlex.split(arguments.launcher) if arguments.launcher
                else launcher.mpirun_command(arguments.ranks))
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(f"--launcher: {error}") from error
