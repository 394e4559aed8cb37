"""Check that one public name has one meaning: no two modules define it."""

import ast
from collections import defaultdict
from pathlib import Path

from support import ROOT

# Names that every module of a kind has, by what asks for them, and the folders of these modules.
PROTOCOLS = {
    "a verb": ("bench/verbs", "ON_ALL_RANKS GROUP TABLES add_options run check_ranks"),
    "a kind of records": ("bench/records/kinds", "SCHEMAS derive check_texts tables"),
    "the rules of a kind": ("bench/validation", "RULES"),
    "a program": ("bench jobs mm3d/examples mm3d/selftest.py",
                  "main command parser run_verb COMMAND PROGRAM"),
    "the forms of a product": ("mm3d/schemes", "ab abt atb"),
    "a kernel and its plain form": ("mm3d/arrays/compiled.py mm3d/model/functional.py",
                                    "gelu_forward gelu_backward normalize_backward"),
    "the library's public name": ("mm3d/schemes mm3d/__init__.py", "SCHEMES")}


def is_protocol(name: str, place: str) -> bool:
    """Whether a module at this place has the name since all of its kind have it."""
    return any(name in names.split() and place.startswith(tuple(folders.split()))
               for folders, names in PROTOCOLS.values())


def shared_names(root: Path) -> dict[str, list[str]]:
    """Return the names that several modules define, with the place of each.

    Functions, classes and types count, and constants that another module asks for.
    """
    places, asked = defaultdict(dict), set()
    for package in ("mm3d", "bench", "jobs"):
        for path in sorted((root / package).rglob("*.py")):
            file = str(path.relative_to(root))
            module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
            tree = ast.parse(path.read_text("utf-8"))
            for node in tree.body:
                for name in defined(node):
                    places[name].setdefault(module, f"{file}:{node.lineno}")
            asked |= names_asked_for(tree)
    found = {}
    for name, modules in places.items():
        own = [place for module, place in modules.items()
               if not name.isupper() or (module, name) in asked]
        others = [place for place in own if not is_protocol(name, place)]
        if others and len(own) > 1 and not name.startswith("_"):
            found[name] = own
    return found


def defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a module defines."""
    if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [one.id for target in targets if isinstance(node, (ast.Assign, ast.AnnAssign))
            for one in ast.walk(target) if isinstance(one, ast.Name)]


def names_asked_for(tree: ast.Module) -> set[tuple[str, str]]:
    """Return the names that a file asks other modules for, each after its module."""
    called = {}    # modules, or names in them, by what they are called here
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            called |= {alias.asname or alias.name: (alias.name, "") for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            called |= {alias.asname or alias.name: (node.module, alias.name)
                       for alias in node.names}
    return {*called.values()} | {
        (".".join(filter(None, called[node.value.id])), node.attr) for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
        and node.value.id in called}


def test_a_public_name_is_defined_once():
    """Two things have two names, and one thing is told once; protocols are listed above."""
    told = shared_names(ROOT)
    assert not told, "\n".join(f"{name}: {', '.join(places)}" for name, places in told.items())
