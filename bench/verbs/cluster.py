"""Run a command that starts mpirun in an emulated cluster on this machine."""

import argparse

from bench.cluster.run import refuse_launcher, run_inside
from bench.cluster.spec import Cluster, parse_latency, parse_rate
from bench.errors import UsageError
from bench.command_line import options

GROUP = "This machine"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``cluster``."""
    parser.usage = ("%(prog)s --nodes N --ranks R [--link RATE] [--latency TIME] -- COMMAND ...")
    parser.description += (
        "  Each node is a network namespace with a link of its own to a switch; Linux only, no "
        "root needed.  An mpirun in COMMAND fills one node with ranks after the other.  It has to "
        "be MPICH's or Open MPI's.  COMMAND's exit status is this one's.")
    parser.add_argument("--nodes", type=options.whole(1), required=True, metavar="N",
                        help="number of nodes")
    parser.add_argument("--ranks", type=options.whole(1), required=True, metavar="R",
                        help="ranks on a node, at most")
    parser.add_argument("--link", default="unlimited", metavar="RATE", help=(
        "rate of each node's link in each direction, in bit, kbit, Mbit or Gbit per second, such "
        "as 200Mbit (default unlimited)"))
    parser.add_argument("--latency", default="0s", metavar="TIME", help=(
        "delay of what a node sends, such as 1ms, where the kernel has netem (default none)"))
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND",
                        help="the command and its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status.

    Raises
    ------
    UsageError
        When it cannot be run.
    """
    command = arguments.command[arguments.command[:1] == ["--"]:]
    if not command:
        raise UsageError("no command to run: -- COMMAND would do, such as -- mpirun -n 8 python "
                         "PROGRAM")
    cluster = Cluster(arguments.nodes, arguments.ranks, parse_rate(arguments.link),
                      parse_latency(arguments.latency))
    refuse_launcher("cluster")
    return run_inside(cluster, command)
