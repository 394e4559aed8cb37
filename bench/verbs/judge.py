"""Judge steps of training that any program dumped: name the first tensor that is not right."""

import argparse
from typing import Any

from bench.agreement import make_on_each_rank
from bench.command_line import measuring
from bench.errors import UsageError
from bench.experiments.dump.dumps import StepDump, check_same_start, read_dump
from bench.experiments.dump.names import TABLES
from bench.experiments.dump.telling import summary, tell, tell_both, verdict_parts
from bench.experiments.dump.verdicts import Verdict, judge
from mm3d.console import say

GROUP = "Judge other programs"
ON_ALL_RANKS = True


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``judge``."""
    parser.add_argument("dumps", nargs="*", metavar="DUMP", help=(
        "folders of config.json and safetensors, see results/judge/README.rst; of several each "
        "is told in one line"))
    parser.add_argument("--against", metavar="DUMP", help=(
        "a dump of the same step by other ranks: say whether the difference is rounding"))
    parser.add_argument("--names", default="huggingface", metavar="TABLE", help=(
        f"names of tensors: {', '.join(TABLES)}, or a file of TOML or JSON (default huggingface)"))
    measuring.add_stall(parser)


def run(arguments: argparse.Namespace, comm: Any) -> int:
    """Print the verdicts; 1 when a tensor is outside its envelope, or none was judged.

    Raises UsageError for dumps that cannot be read or compared.
    """
    if not arguments.dumps or arguments.against and len(arguments.dumps) > 1:
        raise UsageError("judge DUMP judges a dump, or several; with --against one")
    folders = arguments.dumps + [arguments.against] * bool(arguments.against)
    dumps = make_on_each_rank(    # one of which may not see them
        lambda: [read_dump(folder, arguments.names) for folder in folders], comm)
    if arguments.against:
        check_same_start(*dumps)
    for dump in dumps:
        if dump.model.layers > 1 and dump.model.experts and dump.model.experts.balance:
            raise UsageError(f"{dump.folder}: the routers' loss of Hugging Face is of all layers "
                             f"at once, which nothing here computes: output_router_logits false "
                             f"would do, or one layer")
    found = [(dump, judge(dump, comm)) for dump in dumps]
    if comm.rank == 0:    # which alone looks for causes
        if arguments.format == "text":
            say(*_told(found, bool(arguments.against)))
        else:
            arguments.show(verdict_parts(found, bool(arguments.against)))
    return int(any(verdict.first or not verdict.judged for _, verdict in found))


def _told(found: list[tuple[StepDump, Verdict]], both: bool) -> list[str]:
    """Return the lines of all verdicts; with `both` two dumps of a step are compared."""
    if len(found) > 1 and not both:
        return [summary(*one) for one in found]
    lines = [line for one in found for line in (*tell(*one), "")]
    return lines + tell_both(*found) if both else lines[:-1]
