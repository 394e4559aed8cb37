"""Check the rule of record classes (``bench/README.rst``), read from the source."""

import ast
import re

import pytest

from support import ROOT

# Modules whose tuples are made by the thousand in steps and plans, are keys of dictionaries, or
# become rows of arrays.
TUPLES = {"mm3d.tracing.events", "mm3d.tracing.observed_calls", "mm3d.schemes.closed_form",
          "mm3d.training.schedules.messages", "mm3d.training.schedules.schedule",
          "mm3d.training.schedules.builders.auto",
          "bench.instruments.spans", "bench.statistics",
          "bench.prediction.seconds", "bench.prediction.training_plans.choices",
          "bench.prediction.training_plans.estimate",
          "bench.prediction.training_plans.expert_work",
          "bench.prediction.training_plans.layer_work"}
COUNTERS = {"mm3d.grid.axis.Traffic"}    # no record: added to in every collective


# The source of every module with such a class.
SOURCES = {".".join(path.relative_to(ROOT).with_suffix("").parts): text
           for package in ("mm3d", "bench", "jobs") for path in (ROOT / package).rglob("*.py")
           if re.search("dataclass|NamedTuple|Struct", text := path.read_text())}


def mutable_dataclasses(source: str) -> set[str]:
    """The dataclasses that are not frozen."""
    return {*re.findall(r"@(?:\w+\.)?dataclass\b(?!\(frozen=True\b).*\n(?:\s*@.*\n)*"
                        r"\s*class (\w+)", source)}


def tuples(source: str) -> set[str]:
    """The NamedTuples."""
    return {*re.findall(r"class (\w+)\((?:\w+\.)?NamedTuple\)", source)}


def names(*nodes: ast.AST) -> set[str]:
    return {name.id for node in nodes for name in ast.walk(node) if isinstance(name, ast.Name)}


def undecoded_structs(source: str) -> set[str]:
    """The msgspec.Structs that nothing in the file is decoded into, as a whole or as a part."""
    if "Struct" not in source:
        return set()
    tree = ast.parse(source)
    known = {node.name: node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    structs = {name for name, node in known.items()
               if any(ast.unparse(base).endswith("Struct") for base in node.bases)}
    while more := {name for name, node in known.items() if names(*node.bases) & structs} - structs:
        structs |= more
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)
             and (ast.unparse(node.func) == "decode"    # of bench.text_files
                  or ast.unparse(node.func).startswith("msgspec.")
                  and ast.unparse(node.func).endswith((".decode", ".convert")))]
    reached = names(*calls) & structs
    while more := {part for name in reached for part in names(*known[name].bases, *(
            field.annotation for field in known[name].body if isinstance(field, ast.AnnAssign)))
            & structs} - reached:
        reached |= more
    return structs - reached


def test_dataclasses_are_frozen():
    found = {f"{file}.{name}" for file, text in SOURCES.items()
             for name in mutable_dataclasses(text)}
    assert found == COUNTERS


def test_named_tuples_are_few():
    assert {file for file, text in SOURCES.items() if tuples(text)} == TUPLES


def test_structs_are_decoded():
    found = {f"{file}.{name}" for file, text in SOURCES.items()
             for name in undecoded_structs(text)}
    assert len(SOURCES) > 100 and not found


@pytest.mark.parametrize("check, source", [
    (mutable_dataclasses, "@dataclass\nclass A:\n    x: int"),
    (mutable_dataclasses, "@dataclasses.dataclass(eq=False)\n@final\nclass A:\n    x: int"),
    (mutable_dataclasses, "@dataclass(frozen=False)\nclass A:\n    x: int"),
    (tuples, "class A(typing.NamedTuple):\n    x: int"),
    (undecoded_structs, "class A(msgspec.Struct, frozen=True):\n    x: int\na = A(1)"),
    (undecoded_structs, "class B(Struct): pass\nclass A(B): pass\n"
                        "def f(t):\n    return msgspec.toml.decode(t, type=B)")])
def test_a_class_that_breaks_the_rule_is_seen(check, source):
    assert check(source) == {"A"}
