"""Parse options; a one-line error says what is wrong and what may have been meant."""

import argparse
from typing import Any, NoReturn, Sequence

import mm3d
from bench.errors import in_short
from mm3d import launcher
from mm3d.console import say
from mm3d.names import find_name, suggestion, unknown_name

PACKAGE = "mm3d[completion]"    # installs what lets shells complete


class Parser(argparse.ArgumentParser):
    """A parser whose errors one rank prints, in a line that says what would do.

    Options are given in full.  Choices are taken in any case, with or without hyphens.  `also` are
    words that the caller takes instead of a verb.
    """

    also: Sequence[str] = ()

    def __init__(self, *names: Any, **settings: Any) -> None:
        super().__init__(*names, **{"allow_abbrev": False, **settings})

    def error(self, message: str) -> NoReturn:
        """Print what is wrong, in a line; exit with status 2."""
        self.exit(2, f"{self.prog}: error: {in_short(message)}\n")

    def add_program_options(self, command: str) -> None:
        """Add ``--version``, and ``--print-completion`` for shells to complete `command`."""
        self.add_argument("--version", action="version", version=f"mm3d {mm3d.__version__}")
        self.add_argument("--print-completion", metavar="SHELL", action=PrintCompletion,
                          choices=("bash", "zsh", "tcsh"), command=command, help=(
                              f"print what lets a shell complete {command}: bash, zsh or tcsh"))

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:
        """Parse options; an unknown one is refused before one that is missing."""
        if args is not None:
            self._refuse_unknown(args)
        found, rest = super().parse_known_args(args, namespace)
        if rest:
            self.error(f"unrecognized arguments: {' '.join(rest)}")
        return found, rest

    def _refuse_unknown(self, words: Sequence[str]) -> None:
        rest = any(action.nargs in (argparse.PARSER, argparse.REMAINDER)
                   for action in self._actions)
        for word in words:
            if word == "--" or rest and not word.startswith("-"):
                return    # what follows is not this parser's
            option = word.partition("=")[0]
            if option.startswith("--") and option not in self._option_string_actions:
                self.error(f"{option} is no option of {self.prog}"
                           f"{suggestion(option, self._option_string_actions)}")

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        # Where a value is looked for, an empty one would be taken for none; some options mean it.
        if ("" in arg_strings and action.const != ""
                and action.nargs not in (argparse.PARSER, argparse.REMAINDER)):
            raise argparse.ArgumentError(action, "its value is empty: give one" + (
                ", or leave the option out" if action.option_strings else ""))
        return super()._get_values(action, arg_strings)

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        value = super()._get_value(action, arg_string)
        if isinstance(value, str) and action.choices and action.nargs != argparse.PARSER:
            try:
                return find_name(value, action.choices, "")
            except ValueError as error:
                raise argparse.ArgumentError(action, str(error).strip()) from error
        return value

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.nargs == argparse.PARSER and value not in action.choices:
            raise argparse.ArgumentError(action, unknown_name(
                repr(value), value, action.choices, self.also))
        super()._check_value(action, value)

    def _print_message(self, message: str, file: Any = None) -> None:
        if launcher.launcher_rank() == 0:
            super()._print_message(message, file)


class PrintCompletion(argparse.Action):
    """Print what lets a shell complete a command, and exit."""

    def __init__(self, *names: Any, command: str, **settings: Any) -> None:
        super().__init__(*names, **settings)
        self.command = command

    def __call__(self, parser: argparse.ArgumentParser, namespace: argparse.Namespace,
                 values: Any, option_string: str | None = None) -> None:
        """Print it; refuse in words where shtab is not installed."""
        try:
            import shtab
        except ImportError:
            parser.error(f"{option_string} needs the package shtab: pip install '{PACKAGE}' "
                         f"would do")
        parser.prog = self.command
        if launcher.launcher_rank() == 0:
            say(shtab.complete(parser, values))
        parser.exit()
