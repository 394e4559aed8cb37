"""Programs of the tour, see README.rst, and of a training beside the library transformers."""

import argparse
from typing import Any

from mm3d import launcher


class ExampleParser(argparse.ArgumentParser):
    """A parser of options that prints once, on whatever number of ranks."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if launcher.launcher_rank() == 0:
            super()._print_message(message, file)
