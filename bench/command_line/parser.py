"""Parse options, and say what is wrong with them in lines that can be read."""

import argparse
import re
from typing import NoReturn

WORD, MESSAGE = 60, 1000    # letters


class Parser(argparse.ArgumentParser):
    """A parser whose errors show of long texts the beginning alone."""

    def error(self, message: str) -> NoReturn:
        """Print how the program is used, and what is wrong; exit with status 2."""
        message = re.sub(rf"\S{{{WORD},}}", lambda word: f"{word[0][:WORD // 2]}...", message)
        if len(message) > MESSAGE:    # the choices are at the end
            message = f"{message[:MESSAGE // 2]} ... {message[-MESSAGE // 2:]}"
        super().error(message)
