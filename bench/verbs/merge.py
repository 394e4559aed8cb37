"""Join the runs of files and folders in one new file."""

import argparse
import os
from pathlib import Path

from bench.command_line import options
from bench.records import merged, run_file
from mm3d.console import say

GROUP = "Look at results"
TABLES = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``merge``."""
    parser.add_argument("target", metavar="OUT", help="new file, such as all.h5")
    options.add_sources(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the new file and print the number of runs in it; 1 if some were left out, else 0."""
    target = Path(arguments.target)
    files = [path for path in run_file.files_among(arguments.sources)
             if os.path.realpath(path) != os.path.realpath(target)]
    count, problems = merged.merge_files(files, target)
    say(f"{arguments.target}: {count} run{'s' * (count > 1)} of {len(files)} "
        f"file{'s' * (len(files) > 1)}")
    return run_file.report_left_out(problems)
