"""The verb ``doctor``: what this environment can do, and whether that is what a job needs."""

import argparse
import json
import math
import shlex
from dataclasses import asdict
from pathlib import Path

from bench.cases import UsageError
from bench.checks import CHECKS, FAILED
from bench.facts import Facts
from mm3d import environment


def doctor(arguments: argparse.Namespace) -> int:
    """Print every finding; 1 when a check has failed, otherwise 0.

    Raises
    ------
    UsageError
        When it runs under a launcher, or an argument cannot be meant.
    """
    if environment.local_ranks() > 1:
        raise UsageError("doctor starts the launcher itself: run it without, as in "
                         "python -m bench doctor --launcher 'mpirun -n 8'")
    if arguments.ranks < 1 or not 0 < arguments.limit < math.inf:
        raise UsageError(f"--ranks {arguments.ranks} --limit {arguments.limit:g}: give at least "
                         "one rank, and a finite number of seconds above 0")
    try:
        command = (shlex.split(arguments.launcher) if arguments.launcher
                   else environment.mpirun_command(arguments.ranks) if not arguments.seen
                   else ["launcher"])
    except (FileNotFoundError, ValueError) as error:
        raise UsageError(f"--launcher: {error}") from error
    facts = Facts(arguments.ranks, command, arguments.ranks_per_node, arguments.gpus_per_node,
                  arguments.device_buffers, arguments.module, arguments.out, arguments.limit,
                  Path(arguments.seen) if arguments.seen else None, arguments.clean)
    checks = list(CHECKS)
    if arguments.gpu:
        from bench.doctor_gpu import CHECKS as MORE
        checks += MORE
    findings = [check(facts) for check in checks]
    if arguments.json:
        print(json.dumps({"findings": [asdict(one) for one in findings], "ranks": facts.world},
                         indent=1))
    else:
        for one in findings:
            print(f"{one.state:8}{one.check:12}{one.text}", flush=True)
    return int(any(one.state == FAILED for one in findings))
