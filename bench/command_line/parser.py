"""Parse options, and say what is wrong with them in lines that can be read."""

import argparse
from typing import NoReturn

from bench.errors import in_short


class Parser(argparse.ArgumentParser):
    """A parser whose errors show of long texts the beginning alone."""

    def error(self, message: str) -> NoReturn:
        """Print how the program is used, and what is wrong; exit with status 2."""
        super().error(in_short(message))
