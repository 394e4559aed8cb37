"""Check files against the schema and the rules of a run; explain each violation."""

import argparse

from bench import validate
from bench.verbs import options

GROUP = "Look at results"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``validate``."""
    options.add_sources(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print what is wrong with each file; the exit status."""
    return validate.validate(arguments.sources)
