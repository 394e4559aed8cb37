"""Define the option that names the parallelism of a model's layers."""

import argparse

from bench.command_line.options import name_of
from mm3d.schemes import find_scheme


def add_scheme(parser: argparse.ArgumentParser, default: str = "3d") -> None:
    """Add ``--scheme``, the parallelism of a model's layers."""
    parser.add_argument("--scheme", type=scheme, default=default, metavar="NAME",
                        help=f"parallelism of the layers in a stage (default {default})")


def scheme(text: str) -> str:
    """Return the name of the scheme that `text` stands for."""
    return name_of(lambda: find_scheme(text).name)
