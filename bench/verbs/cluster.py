"""Run a command that starts mpirun in an emulated cluster on this machine."""

import argparse

from bench.cluster.run import refuse_launcher, run_inside
from bench.command_line import measuring
from bench.errors import UsageError

GROUP = "This machine"
TABLES = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``cluster``."""
    parser.usage = f"%(prog)s {measuring.CLUSTER} -- COMMAND ..."
    parser.description += (
        "  Each node is a network namespace with a link of its own to a switch; Linux only, no "
        "root needed.  An mpirun in COMMAND fills one node with ranks after the other.  It has to "
        "be MPICH's or Open MPI's.  COMMAND's exit status is this one's.")
    parser.add_argument("where", type=measuring.cluster_spec, metavar=measuring.CLUSTER, help=(
        "nodes, the most ranks of each, the rate of its link in each direction, in bit, kbit, "
        "Mbit or Gbit per second (default unlimited), and the delay of what it sends, where the "
        "kernel has netem (default none): 4x2:200Mbit or 4x2:1Gbit,1ms"))
    parser.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND",
                        help="the command and its arguments")


def run(arguments: argparse.Namespace) -> int:
    """Run the command; return its exit status.  Raises UsageError when it cannot."""
    command = arguments.command[arguments.command[:1] == ["--"]:]
    if not command:
        raise UsageError("no command to run: -- COMMAND would do, such as -- mpirun -n 8 python "
                         "PROGRAM")
    refuse_launcher("cluster")
    return run_inside(arguments.where, command)
