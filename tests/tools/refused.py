"""Command lines on the ranks of a test, without a process for each, and their parsers."""
import argparse
import io
from contextlib import redirect_stderr, redirect_stdout
from typing import Iterator

from bench.__main__ import parser
from bench.errors import StoreError, UsageError


def run_verb(comm, *words: str) -> tuple[int, str]:
    """Return the exit status of a command line, which all ranks of `comm` must agree on, and what
    they print, all together. `bench.__main__` prints an error itself once."""
    printed, error = io.StringIO(), ""
    with redirect_stdout(printed), redirect_stderr(printed):
        try:
            arguments = parser(words[:2]).parse_args(words)
            status = arguments.verb_file.run(arguments, comm)
        except (UsageError, StoreError) as caught:
            status, error = 2, f"error: {caught}\n"
        except SystemExit as ended:
            status = ended.code
    everyone = comm.allgather((status, error))
    assert everyone == everyone[:1] * comm.size, everyone
    return status, "".join(comm.allgather(printed.getvalue())) + error


def done(comm, *words: str) -> str:
    """Return what the ranks of `comm` print about a command line that succeeds."""
    status, said = run_verb(comm, *words)
    assert status == 0, said
    return said


def parsers_of(top: argparse.ArgumentParser,
               *words: str) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    """A parser, below it those of verbs and kinds, each with the words that begin its line."""
    yield words, top
    for action in top._actions:
        if isinstance(action, argparse._SubParsersAction):
            for word, one in action.choices.items():
                yield from parsers_of(one, *words, word)


def has_verbs(parser: argparse.ArgumentParser) -> bool:
    """Whether it only chooses among verbs or kinds, which have the options."""
    return any(isinstance(one, argparse._SubParsersAction) for one in parser._actions)


def refused(comm, *words: str) -> str:
    """Return what the ranks of `comm` print about a command line that all of them refuse."""
    status, said = run_verb(comm, *words)
    assert status != 0, said
    return said
