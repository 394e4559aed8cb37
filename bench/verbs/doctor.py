"""Say what this environment can do; fail when that is not what is wanted."""

import argparse
import json
import math
import shlex
from dataclasses import asdict
from pathlib import Path

from bench.doctor.checks import CHECKS, FAILED
from bench.doctor.child_jobs import Facts
from bench.errors import UsageError
from bench.verbs import options
from mm3d import launcher

GROUP = "This machine"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``doctor``."""
    parser.add_argument("--ranks", type=int, default=2, metavar="N",
                        help="that the launcher shall start (default 2)")
    parser.add_argument("--launcher", metavar="COMMAND",
                        help="starts so many ranks of a program, such as 'srun --mpi=pmix -n 8' "
                             "(default: mpirun)")
    parser.add_argument("--ranks-per-node", type=options.whole(0), default=0, metavar="N",
                        help="fail when a node has more")
    parser.add_argument("--gpus-per-node", type=options.whole(0), default=0, metavar="N",
                        help="fail when a node has fewer, or ranks share one")
    parser.add_argument("--gpu", action="store_true", help=(
        "also that the GPU here computes every type right, and which transports carry its arrays"))
    parser.add_argument("--device-buffers", action="store_true",
                        help="fail when MPI cannot carry them")
    parser.add_argument("--module", action="append", default=[], metavar="NAME",
                        help="fail when it is not loaded; may be repeated")
    parser.add_argument("--out", metavar="DIR", help="fail when results cannot be written there")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS",
                        help="that a child job may take (default 60)")
    parser.add_argument("--seen", metavar="DIR",
                        help="start no child job: read what bench.doctor.census has said into "
                             "this folder, as batch jobs do")
    parser.add_argument("--clean", action="store_true", help=(
        "remove the shared memory that killed jobs of this user have left in /dev/shm, where no "
        "process has it open; those of a container that shares the folder are not seen: not "
        "while one runs a job"))
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(arguments: argparse.Namespace) -> int:
    """Print every finding; 1 when a check has failed, otherwise 0.

    Raises
    ------
    UsageError
        When it runs under a launcher, or an argument cannot be meant.
    """
    if launcher.local_ranks() > 1:
        raise UsageError("doctor starts the launcher itself: run it without, as in "
                         "python -m bench doctor --launcher 'mpirun -n 8'")
    if arguments.ranks < 1 or not 0 < arguments.limit < math.inf:
        raise UsageError(f"--ranks {arguments.ranks} --limit {arguments.limit:g}: give at least "
                         "one rank, and a finite number of seconds above 0")
    try:
        command = (shlex.split(arguments.launcher) if arguments.launcher
                   else launcher.mpirun_command(arguments.ranks) if not arguments.seen
                   else ["launcher"])
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(f"--launcher: {error}") from error
    facts = Facts(arguments.ranks, command, arguments.ranks_per_node, arguments.gpus_per_node,
                  arguments.device_buffers, arguments.module, arguments.out, arguments.limit,
                  Path(arguments.seen) if arguments.seen else None, arguments.clean)
    checks = list(CHECKS)
    if arguments.gpu:
        from bench.doctor.gpu_checks import CHECKS as MORE
        checks += MORE
    findings = [check(facts) for check in checks]
    if arguments.json:
        print(json.dumps({"findings": [asdict(one) for one in findings], "ranks": facts.world},
                         indent=1))
    else:
        for one in findings:
            print(f"{one.state:8}{one.check:12}{one.text}", flush=True)
    return int(any(one.state == FAILED for one in findings))
