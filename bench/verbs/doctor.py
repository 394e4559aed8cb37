"""Say what this environment can do; fail when that is not what is wanted."""

import argparse

from bench import doctor
from bench.verbs import options

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
                        help="start no child job: read what bench.census has said into this "
                             "folder, as batch jobs do")
    parser.add_argument("--clean", action="store_true", help=(
        "remove the shared memory that killed jobs of this user have left in /dev/shm, where no "
        "process has it open; those of a container that shares the folder are not seen: not "
        "while one runs a job"))
    parser.add_argument("--json", action="store_true", help="machine-readable")


def run(arguments: argparse.Namespace) -> int:
    """Print every finding; the exit status."""
    return doctor.doctor(arguments)
