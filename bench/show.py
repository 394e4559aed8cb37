"""The verbs that read results: ``table`` and ``plot``."""

import argparse

from bench import formats

VERBS = ("table", "plot")


def add_verbs(verbs) -> None:
    """Give the command line the verbs."""
    table = _verb(verbs, "table", "print the tables from the files of a folder")
    table.add_argument("--format", default="text", choices=formats.FORMATS, help=(
        "how (default text); csv is one file of all tables, with numbers in full"))
    _verb(verbs, "plot", "draw the figures from the files of a folder")


def _verb(verbs, name: str, text: str) -> argparse.ArgumentParser:
    parser = verbs.add_parser(name, help=text, description=text)
    parser.add_argument("folder", metavar="DIR", help="the folder with the .h5 files")
    return parser


def run(arguments) -> int:
    """Do what the verb says; 0.

    Raises
    ------
    StoreError
        When there are no results.
    """
    if arguments.verb == "table":
        from bench.tables import tables
        print(tables(arguments.folder, arguments.format))
    else:
        from bench.plots import plots
        for path in plots(arguments.folder):
            print(path)
    return 0
