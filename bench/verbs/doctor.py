"""Check launcher, MPI, BLAS, GPUs and files of this environment; fail when one is not usable."""

import argparse
import json
import shlex
from dataclasses import asdict
from pathlib import Path

from bench import mpi
from bench.doctor.checks import CHECKS, FAILED
from bench.doctor.child_jobs import Facts
from bench.errors import UsageError
from bench.command_line import options
from bench.command_line.number_types import number
from mm3d import launcher
from mm3d.console import say

GROUP = "This machine"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor``."""
    parser.add_argument("--ranks", type=options.whole(1), default=2, metavar="N",
                        help="number of ranks that the launcher shall start (default 2)")
    parser.add_argument("--launcher", metavar="COMMAND",
                        help="command that starts that many ranks of a program, such as 'srun "
                             "--mpi=pmix -n 8' (default: mpirun)")
    parser.add_argument("--ranks-per-node", type=options.whole(0), default=0, metavar="N",
                        help="fail when a node has more ranks (default 0: any number)")
    parser.add_argument("--gpus-per-node", type=options.whole(0), default=0, metavar="N",
                        help="fail when a node has fewer GPUs, or ranks share one (default 0: "
                             "none are needed)")
    parser.add_argument("--backend", choices=("numpy", "cupy"),
                        help="fail when a rank cannot use this array library")
    parser.add_argument("--variable", action="append", default=[], type=variable,
                        metavar="NAME=VALUE", help=(
        "fail when this environment variable does not reach a rank; may be repeated"))
    parser.add_argument("--gpu", action="store_true", help=(
        "also check that the GPU here computes every dtype right, and which transports move its "
        "arrays"))
    parser.add_argument("--device-buffers", action="store_true",
                        help="fail when MPI cannot read and write device memory")
    parser.add_argument("--module", action="append", default=[], metavar="NAME",
                        help="fail when this environment module is not loaded; may be repeated")
    parser.add_argument("--out", metavar="DIR",
                        help="fail when results cannot be written into this folder")
    parser.add_argument("--limit", type=number(above=True), default=60.0, metavar="SECONDS",
                        help="the longest that a child job may take (default 60)")
    parser.add_argument("--seen", metavar="DIR",
                        help="start no child job: read the output of bench.doctor.census in this "
                             "folder, as batch jobs do")
    parser.add_argument("--clean", action="store_true", help=(
        "remove the shared memory that killed jobs of this user have left in /dev/shm and no "
        "process has open; processes of a container that shares the folder are not seen, so not "
        "while one runs a job"))
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print every finding; return 1 when a check has failed, otherwise 0.

    Raises
    ------
    UsageError
        When it runs under a launcher.
    """
    if launcher.local_ranks() > 1:
        raise UsageError("doctor starts the launcher itself: run it without, as in "
                         "python -m bench doctor --launcher 'mpirun -n 8'")
    facts = Facts(arguments.ranks, launcher_command(arguments), arguments.ranks_per_node,
                  arguments.gpus_per_node, arguments.backend, arguments.device_buffers,
                  dict(arguments.variable), arguments.module,
                  arguments.out, arguments.limit,
                  Path(arguments.seen) if arguments.seen else None, arguments.clean)
    checks = list(CHECKS)
    if arguments.gpu:
        mpi.start()    # for the model on this GPU
        from bench.doctor.gpu_checks import CHECKS as MORE
        checks += MORE
    findings = [check(facts) for check in checks]
    if arguments.json:
        say(json.dumps({"findings": [asdict(one) for one in findings], "ranks": facts.world},
                       indent=1))
    else:
        for one in findings:
            say(f"{one.state:8}{one.check:12}{one.text}")
    return int(any(one.state == FAILED for one in findings))


def variable(text: str) -> tuple[str, str]:
    """Read NAME=VALUE."""
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{text!r}: give it as NAME=VALUE")
    return name, value


def launcher_command(arguments: argparse.Namespace) -> list[str]:
    """Return the command that starts the ranks of a program.

    Raises
    ------
    UsageError
        When ``--launcher`` cannot be read, or there is no mpirun.
    """
    if arguments.seen and not arguments.launcher:
        return ["launcher"]    # serves messages alone
    try:
        return (shlex.split(arguments.launcher) if arguments.launcher
                else launcher.mpirun_command(arguments.ranks))
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(f"--launcher: {error}") from error
