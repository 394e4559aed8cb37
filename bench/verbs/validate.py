"""Check files against the schema and the rules of a run; explain each violation."""

import argparse

from bench.command_line import options
from bench.errors import Unreadable
from bench.records import run_file, schema
from bench.validation.files import check_file
from mm3d.console import say

GROUP = "Look at results"
TABLES = False


class _Schema(argparse.Action):
    """Print the schema instead of checking files, as ``--help`` prints the options."""

    def __call__(self, parser, *_) -> None:
        say(schema.describe_files())
        parser.exit()


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``validate``."""
    options.add_sources(parser)
    parser.add_argument("--schema", action=_Schema, nargs=0,
                        help="print what files of each kind hold, and check none")


def run(arguments: argparse.Namespace) -> int:
    """Print violations and warnings of each file; 1 if one is not valid or not read, else 0."""
    status, unread = 0, []
    for path in run_file.files_among(arguments.sources):
        try:
            errors, warnings = check_file(path)
        except Unreadable as error:
            unread.append(error)
            continue
        say(f"{path}: {'NOT VALID' if errors else 'valid'}")
        for kind, lines in (("error", errors), ("warning", warnings)):
            for line in lines:
                say(f"  {kind}: {line}")
        status = max(status, int(bool(errors)))
    return run_file.report_left_out(unread) or status
