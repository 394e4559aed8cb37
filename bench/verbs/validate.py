"""Check files against the schema and the rules of a run; explain each violation."""

import argparse

from bench.records.folder import list_files
from bench.validation.files import check_file
from bench.command_line import options

GROUP = "Look at results"
ON_ALL_RANKS = False


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``validate``."""
    options.add_sources(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the violations and warnings of each file; return 1 when one is not valid, else 0.

    Raises
    ------
    StoreError
        When there is no such file.
    """
    status = 0
    for path in list_files(arguments.sources):
        errors, warnings = check_file(path)
        print(f"{path}: {'NOT VALID' if errors else 'valid'}")
        for kind, lines in (("error", errors), ("warning", warnings)):
            for line in lines:
                print(f"  {kind}: {line}")
        status = max(status, int(bool(errors)))
    return status
