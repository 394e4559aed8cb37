"""The verbs of ``python -m bench``: a file each, found by its name.

A file ``NAME.py`` in this folder is the verb NAME and needs to be named nowhere else.  It has

- a docstring whose first line is its help,
- ``GROUP``, the heading under which ``--help`` lists it,
- ``ON_ALL_RANKS = True`` where all ranks of ``mpirun`` run it (otherwise rank 0 alone does), or a
  function that returns this for its options,
- ``add_options(parser)``, which adds its options to an `argparse.ArgumentParser`, and
- ``run(arguments, comm)``, or ``run(arguments)`` where one rank runs it: the exit status.  It
  prints tables and notes by ``arguments.show(parts)``, in the ``--format`` that all verbs have,
  but those with ``TABLES = False``.

A folder is a verb whose next word is the name of a file in it, such as ``measure matmul``; that
file is like a verb, without a heading.  As no two kinds have one name, the kind alone will do.  No
verb imports another: they share what is in `bench.command_line`.
"""

import argparse
import ast
import importlib
import pkgutil
from pathlib import Path
from types import ModuleType
from typing import NoReturn, Sequence

from bench.command_line.parser import Parser
from bench.errors import UsageError, in_options
from bench.reports.formats import FORMATS, render
from mm3d.console import say

# The order in which a user needs them; verbs that are not here come last.
ORDER = ("reproduce", "run", "report", "compare", "merge", "validate", "measure", "train", "judge",
         "dry", "plan", "predict", "calibrate", "draw", "cluster", "doctor",
         # kinds of measure, and of draw
         "gemm", "collectives", "matmul", "layer", "experts", "pipeline", "checkpoint", "step",
         "meshes", "gpu", "start", "cube", "schedule")


def names(verb: str = "") -> list[str]:
    """List the verbs, or the kinds of `verb`, in the order in which a user needs them."""
    folder = Path(__path__[0]) / verb
    found = {module.name for module in pkgutil.iter_modules([str(folder)])}
    return [*(name for name in ORDER if name in found), *sorted(found - {*ORDER})]


def kinds() -> dict[str, str]:
    """Return the verb of each kind."""
    return {kind: verb for verb in names() for kind in names(verb)}


def in_full(words: Sequence[str]) -> list[str]:
    """Return a command line with its verb, where it begins with a kind, such as ``matmul``."""
    verb = kinds().get(words[0]) if words else None
    return [verb, *words] if verb else [*words]


def load_verb(name: str) -> ModuleType:
    """Import a verb, or a kind such as ``measure matmul``."""
    return importlib.import_module(".".join([__name__, *name.split()]))


class _Parser(Parser):
    """A parser that raises its message."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def check_command(name: str, words: Sequence[str], ranks: int = 0) -> None:
    """Check that the verb `name` takes the options `words`, without running it.

    A verb with a function ``check_ranks`` also says whether so many `ranks`, if any, can run it.

    Raises UsageError when one of them is unknown, has a wrong value, or is missing.
    """
    parser, verb = _Parser(prog=f"bench {name}", add_help=False), load_verb(name)
    add_options(parser, verb)
    arguments = parser.parse_args(words)
    if ranks and hasattr(verb, "check_ranks"):
        try:
            verb.check_ranks(arguments, ranks)
        except UsageError as error:
            raise UsageError(in_options(str(error), vars(arguments))) from error


def add_options(parser: argparse.ArgumentParser, verb: ModuleType) -> None:
    """Add the options of a verb, ``--format`` where it prints tables, and how it shows them."""
    verb.add_options(parser)
    parser.set_defaults(show=lambda parts: say(render(parts)))
    if getattr(verb, "TABLES", True):
        parser.add_argument("--format", default="text", choices=FORMATS, help=(
            "format of the tables (default text); csv is one table of all, with all digits"))


def add_verbs(parser: argparse.ArgumentParser, chosen: Sequence[str] | None,
              verb: str = "") -> None:
    """Add all verbs to a parser, or all kinds of `verb`.

    Only the verb, and its kind, that are `chosen` are imported and have options; all if None.
    """
    several = parser.add_subparsers(dest="kind" if verb else "verb", required=True,
                                    metavar="KIND" if verb else "VERB")
    for name in names(verb):
        if chosen is not None and name not in chosen[:1]:
            several.add_parser(name)
            continue
        module = load_verb(f"{verb} {name}")
        about = first_line(module.__doc__ or "")
        one = several.add_parser(name, help=about, description=about)
        if names(name):
            add_verbs(one, chosen and chosen[1:], name)
        else:
            add_options(one, module)
            one.set_defaults(verb_file=module)


def groups(verb: str = "") -> dict[str, dict[str, str]]:
    """List the verbs, or the kinds of `verb`, by heading, each with its help.

    Both are read from the sources: importing all verbs takes long.
    """
    found: dict[str, dict[str, str]] = {}
    for name in names(verb):
        path = Path(__path__[0], verb, name)
        tree = ast.parse((path / "__init__.py" if path.is_dir() else
                          path.with_suffix(".py")).read_text("utf-8"))
        group = next((ast.literal_eval(node.value) for node in tree.body
                      if isinstance(node, ast.Assign)
                      and ast.unparse(node.targets[0]) == "GROUP"), "Kinds")
        found.setdefault(group, {})[name] = first_line(ast.get_docstring(tree) or "")
    return found


def first_line(docstring: str) -> str:
    """Return the first line of `docstring`, which is a verb's help."""
    return docstring.strip().partition("\n")[0]
