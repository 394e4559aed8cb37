"""Join the runs of files and folders in one new file."""

import argparse

from bench import merge
from bench.verbs import options

GROUP = "Look at results"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``merge``."""
    parser.add_argument("target", metavar="OUT", help="the new file, such as all.h5")
    options.add_sources(parser)


def run(arguments: argparse.Namespace) -> int:
    """Write the new file and say what is in it; 0."""
    print(merge.merge(arguments.target, arguments.sources))
    return 0
