"""The verbs of ``python -m bench``: a file each, found by its name.

A file ``NAME.py`` in this folder is the verb NAME and needs to be named nowhere else.  It has

- a docstring whose first line is its help,
- ``GROUP``, the heading under which ``--help`` lists it,
- ``ON_ALL_RANKS``, whether all ranks of ``mpirun`` run it (otherwise rank 0 alone), or a function
  that returns this for its options,
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
import importlib.util
import pkgutil
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import NoReturn, Sequence

from bench.command_line import options
from bench.command_line.parser import Parser
from bench.document import Part
from bench.errors import UsageError, in_options
from bench.reports.formats import FORMATS, render
from mm3d.console import say

# The order in which a user needs them; verbs that are not here come last.
ORDER = ("reproduce", "run", "report", "compare", "merge", "validate", "measure", "train", "judge",
         "dry", "plan", "predict", "calibrate", "draw", "cluster", "doctor",
         # kinds of measure, and of draw
         "gemm", "collectives", "matmul", "layer", "experts", "pipeline", "checkpoint", "step",
         "meshes", "gpu", "start", "cube", "schedule")


@dataclass(frozen=True)
class Entry:
    """A verb, or a kind of one, as ``--help`` lists it."""

    name: str
    group: str
    about: str


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
        """Raise UsageError with `message`."""
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


def show(parts: Sequence[Part]) -> None:
    """Print parts of a document as text."""
    say(render(parts))


def add_options(parser: argparse.ArgumentParser, verb: ModuleType) -> None:
    """Add the options of a verb, ``--format`` where it prints tables, and how it shows them."""
    verb.add_options(parser)
    parser.set_defaults(show=show)
    if getattr(verb, "TABLES", True):
        options.add_format(parser, FORMATS)


def add_verbs(parser: argparse.ArgumentParser, chosen: Sequence[str] | None,
              verb: str = "") -> None:
    """Add all verbs to a parser, or all kinds of `verb`.

    Parameters
    ----------
    chosen : sequence of str or None
        The verb, and its kind, whose options are added; None for all.  Others are not imported.
    verb : str
        The verb whose kinds are added; "" for verbs.
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


def entry(name: str) -> Entry:
    """Read the heading and the help of a verb from its source, without importing it."""
    spec = importlib.util.find_spec(".".join([__name__, *name.split()]))
    assert spec is not None and spec.origin is not None
    tree = ast.parse(Path(spec.origin).read_text("utf-8"))
    group = next((ast.literal_eval(node.value) for node in tree.body
                  if isinstance(node, ast.Assign)
                  and [ast.unparse(target) for target in node.targets] == ["GROUP"]), "Kinds")
    return Entry(name.split()[-1], group, first_line(ast.get_docstring(tree) or ""))


def groups(verb: str = "") -> dict[str, list[Entry]]:
    """List the verbs, or the kinds of `verb`, by heading."""
    found: dict[str, list[Entry]] = {}
    for one in (entry(f"{verb} {name}") for name in names(verb)):
        found.setdefault(one.group, []).append(one)
    return found


def first_line(docstring: str) -> str:
    """Return the first line of `docstring`, which is a verb's help."""
    return docstring.strip().partition("\n")[0]
