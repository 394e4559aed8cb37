"""The verbs of ``python -m bench``: a file each, found by its name.

A file ``NAME.py`` in this folder is the verb NAME and needs to be named nowhere else.  It has

- a docstring whose first line is its help,
- ``GROUP``, the heading under which ``--help`` lists it,
- ``ON_ALL_RANKS``, whether all ranks of ``mpirun`` run it (otherwise rank 0 alone),
- ``add_options(parser)``, which adds its options to an `argparse.ArgumentParser`, and
- ``run(arguments, comm)``, or ``run(arguments)`` where one rank runs it: the exit status.

No verb imports another: they share what is in `bench.command_line`.
"""

import argparse
import ast
import importlib
import pkgutil
from dataclasses import dataclass
from types import ModuleType
from typing import NoReturn, Sequence

from bench.errors import UsageError

# As a person needs them; a verb that is not here comes last in its group.
ORDER = ("reproduce", "run", "table", "plot", "report", "compare", "merge", "validate", "gemm",
         "collectives", "matmul", "scalapack", "layer", "experts", "pipeline", "checkpoint",
         "train", "step", "gpu", "dry", "plan", "predict", "calibrate", "check", "schedule",
         "cube", "cluster", "doctor", "gpusuite", "start")


@dataclass(frozen=True)
class Entry:
    """A verb as ``--help`` lists it."""

    name: str
    group: str
    about: str


def names() -> list[str]:
    """List the verbs, in the order in which a person needs them."""
    found = {module.name for module in pkgutil.iter_modules(__path__)}
    return [*(name for name in ORDER if name in found), *sorted(found - {*ORDER})]


def load(name: str) -> ModuleType:
    """Import the verb `name`."""
    return importlib.import_module(f"{__name__}.{name}")


class _Parser(argparse.ArgumentParser):
    """A parser that raises its message."""

    def error(self, message: str) -> NoReturn:
        """Raise UsageError with `message`."""
        raise UsageError(message)


def check_words(name: str, words: Sequence[str]) -> None:
    """Check that the verb `name` takes the options `words`, without running it.

    Raises
    ------
    UsageError
        When one of them is unknown, has a wrong value, or is missing.
    """
    parser = _Parser(add_help=False)
    load(name).add_options(parser)
    parser.parse_args(words)


def entry(name: str) -> Entry:
    """Read the heading and the help of the verb `name` from its source, without importing it."""
    source = pkgutil.get_data(__name__, f"{name}.py")
    assert source is not None
    tree = ast.parse(source)
    group = next(ast.literal_eval(node.value) for node in tree.body
                 if isinstance(node, ast.Assign)
                 and [ast.unparse(target) for target in node.targets] == ["GROUP"])
    return Entry(name, group, first_line(ast.get_docstring(tree) or ""))


def groups() -> dict[str, list[Entry]]:
    """List the verbs by heading."""
    found: dict[str, list[Entry]] = {}
    for one in map(entry, names()):
        found.setdefault(one.group, []).append(one)
    return found


def first_line(docstring: str) -> str:
    """Return the first line of `docstring`, which is a verb's help."""
    return docstring.strip().partition("\n")[0]
